"""Writes the fingerprint of every stage: the values that it reads and the code that it runs.

    python -m pipelines.fingerprints

A fingerprint is the app's section of the composed config, all resolved, with hashes of the syntax
trees of the modules that the app and the classes named there import, and of the report's templates
and styles. DVC compares these files, so that a stage runs again when one of its own values or the
code it runs has changed, and not for a comment, a docstring, or a value that another stage reads.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from dvc.exceptions import DvcException, NotDvcRepoError
from dvc.repo import Repo
from dvc.scm import NoSCMError, SCMError
from dvc.stage import PipelineStage
from networkx import dfs_postorder_nodes
from omegaconf import OmegaConf
from pygit2 import GitError

from pipelines.app import (
    composed,
    ending_with_one_line,
    one_line,
    scale_of_params,
    write_json,
)
from pipelines.app.choice import checked
from pipelines.app.values import TRAINER
from value_aware_attention.files import load_json
from value_aware_attention.measurement.store import (
    code_hashes,
    defining_module,
    import_closure,
)

PACKAGES = ("pipelines", "value_aware_study", "value_aware_attention")
ELSEWHERE = {"run", "choice"}
"""Keys of a stage's section that change no result, or that only a running app knows"""
OF_TRAINER = ("precision", *TRAINER)
"""Arguments of the trainer that a scale or a user may set and that change a result"""
WITHOUT = {"pipelines.app.tracking", "pipelines.app.values"}
"""Modules that change no result: they log to W&B or refuse values."""
LOOKS = (".html", ".css", ".js")


def main() -> None:
    with ending_with_one_line():
        write(Path(checked().paths.outputs, "fingerprints"))


def write(folder: Path) -> None:
    """Writes the fingerprints that have changed, and prints the stages with their changes.

    A file that stays as it was leaves its stage as it was, and one without a stage is removed.
    """
    wanted = set()
    for name, app, overrides in stages():
        found = fingerprint(app, overrides)
        path = folder / f"{name}.json"
        wanted.add(path)
        before = load_json(path, remedy="remove it") if path.exists() else None
        if before != found:
            changed = ["new"] if before is None else sorted(differences(before, found))
            write_json(path, found)
            print(f"{name}: {', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''}")
    for path in set(folder.glob("*.json")) - wanted:
        path.unlink()


def stages() -> Iterator[tuple[str, str, list[str]]]:
    """Yields name, app and overrides of every other stage of dvc.yaml, as DVC expands them."""
    with refusals_of_dvc():
        known = Repo().index.stages
    if not known:  # without dvc.yaml DVC knows of none
        raise ValueError("dvc.yaml has no stages, or there is none here: git checkout dvc.yaml")
    for stage in known:
        _, _, module, *overrides = stage.cmd.split()
        app = module.removeprefix("pipelines.")
        if app != "fingerprints":
            yield stage.addressing, app, overrides


def needed(targets: Sequence[str]) -> dict[str, PipelineStage]:
    """Returns the stages that targets need and their own, by name, in an order they can run in."""
    with refusals_of_dvc():
        repo = Repo()
        own = [stage for target in targets for stage in repo.stage.collect(target)]
        found = [stage for one in own for stage in dfs_postorder_nodes(repo.index.graph, one)]
    return {stage.addressing: stage for stage in found}


@contextmanager
def refusals_of_dvc() -> Iterator[None]:
    """Turns errors of DVC and git into a ValueError that names the file and a remedy."""
    try:
        yield
    except NotDvcRepoError:
        raise ValueError(f"{Path.cwd()} has no .dvc: git checkout .dvc, or dvc init") from None
    except NoSCMError as error:
        raise ValueError(one_line(error)) from None
    except SCMError as error:  # as of a ZIP
        raise ValueError(
            f"{error}: run git init, or dvc config --local core.no_scm true, as "
            "python -m pipelines.run does"
        ) from None
    except GitError as error:
        raise ValueError(f"git: {error}; git status says what to do") from None
    except DvcException as error:
        said, cause = one_line(error), one_line(error.__cause__ or error)
        because = "" if cause in said else f" ({cause})"
        raise ValueError(
            f"DVC: {said}{because}; git status names the files that have changed"
        ) from None


def fingerprint(app: str, overrides: list[str]) -> dict[str, Any]:
    """Returns {"values": the section that the app gets, "code": module -> hash}."""

    section = composed(app, [*overrides, *scale_of_params(overrides)])[app]
    values = {key: section[key] for key in section if key not in ELSEWHERE}
    if "trainer" in values:
        known = [key for key in OF_TRAINER if key in section.trainer]
        values["trainer"] = {key: section.trainer[key] for key in known}
    values = {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in values.items()
    }
    own = {name for name in targets(values) if name.startswith(PACKAGES)}
    return {"values": values, "code": _code({f"pipelines.{app}", *map(defining_module, own)})}


def _code(modules: set[str]) -> dict[str, str]:
    """Hashes the import closure of modules, and the templates and styles beside its files."""
    files = import_closure(*modules, packages=PACKAGES, without=WITHOUT)
    beside = {one for file in files.values() for one in file.parent.iterdir()}
    looks = (one for one in beside if one.suffix in LOOKS)
    code = code_hashes(*sorted(modules), packages=PACKAGES, without=WITHOUT)
    return code | {one.name: sha256(one.read_bytes()).hexdigest() for one in looks}


def targets(value: Any) -> Iterator[str]:
    """Yields every `_target_` of a config."""
    if isinstance(value, dict):
        yield from [value["_target_"]] if "_target_" in value else []
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            yield from targets(inner)


def differences(before: Any, after: Any, key: str = "") -> Iterator[str]:
    """Yields the dotted keys that differ, with their new values where these are short."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            inner = f"{key}.{name}" if key else name
            yield from differences(before.get(name), after.get(name), inner)
    elif before != after:
        head, _, rest = key.partition(".")
        yield rest if head == "code" else f"{rest} = {after}"[:80]


if __name__ == "__main__":
    main()
