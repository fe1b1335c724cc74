"""Writes the fingerprint of every stage: the values that it reads and the code that it runs.

    python -m pipelines.fingerprints

A fingerprint has the app's section of the composed config, all resolved. It also has hashes of the
syntax trees of the modules that the app and the classes named there import, and of the report's
templates and styles. DVC compares these files. So a stage runs again when one of its own values or
its code has changed, but not after a change of a comment, a docstring, or a value that only another
stage reads.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from dvc.repo import Repo
from omegaconf import OmegaConf

from pipelines.app import composed, ending_with_one_line, plain, scale_of_params, write_json
from pipelines.app.values import TRAINER
from pipelines.scale import checked, refusals_of_dvc
from value_aware_attention.files import load_json
from value_aware_attention.measurement.store import (
    code_hashes,
    defining_module,
    import_closure,
)

CODE_PACKAGES = ("pipelines", "value_aware_study", "value_aware_attention")
WITHOUT = {f"pipelines.app.{name}" for name in ("errors", "method_cards", "tracking", "values")}
"""Modules that change no result: they refuse values, log to W&B, or compose what "values" holds."""


def main() -> None:
    with ending_with_one_line():
        write_fingerprints(Path(checked().paths.outputs, "fingerprints"))


def write_fingerprints(folder: Path) -> None:
    """Writes the fingerprints that have changed, and prints the stages with their changes.

    A stage without a fingerprint is new: DVC runs it, and nothing is printed. If a file is
    unchanged, so is its stage. A file without a stage is removed.
    """
    paths = set()
    for name, app, overrides in stages():
        path = folder / f"{name}.json"
        paths.add(path)
        before = load_json(path, remedy="remove it") if path.exists() else None
        after = fingerprint(app, overrides)
        if before != after:
            write_json(path, after)
            if before is not None and (changes := sorted(differences(before, after))):
                print(f"{name}: {', '.join(changes[:4])}{', ...' if len(changes) > 4 else ''}")
    for path in set(folder.glob("*.json")) - paths:
        path.unlink()


def stages() -> Iterator[tuple[str, str, list[str]]]:
    """Yields name, app and overrides of every other stage of dvc.yaml, as DVC expands them."""
    with refusals_of_dvc():
        expanded = Repo().index.stages
    if not expanded:  # without dvc.yaml DVC has no stages
        raise ValueError("dvc.yaml has no stages, or there is none here: git checkout dvc.yaml")
    for stage in expanded:
        _, _, module, *overrides = stage.cmd.split()
        if (app := module.removeprefix("pipelines.")) != "fingerprints":
            yield stage.addressing, app, overrides


def fingerprint(app: str, overrides: list[str]) -> dict[str, Any]:
    """Returns {"values": the section that the app gets, "code": module -> hash}."""
    section = composed(app, [*overrides, *scale_of_params(overrides)])[app]
    # W&B's section changes no result, and only a running app knows a choice
    values = {
        key: plain(section[key]) if OmegaConf.is_config(section[key]) else section[key]
        for key in section
        if key not in ("run", "choice")
    }
    if "trainer" in values:
        trainer = values["trainer"]  # only what a scale or a user may set, and changes a result
        values["trainer"] = {key: trainer[key] for key in ("precision", *TRAINER) if key in trainer}
    classes = {name for name in targets(values) if name.startswith(CODE_PACKAGES)}
    modules = sorted({f"pipelines.{app}", *map(defining_module, classes)})
    code = code_hashes(*modules, packages=CODE_PACKAGES, without=WITHOUT)
    for folder in {
        file.parent
        for file in import_closure(*modules, packages=CODE_PACKAGES, without=WITHOUT).values()
    }:  # the page's template, styles and script too
        looks = (file for file in folder.iterdir() if file.suffix in (".html", ".css", ".js"))
        code |= {file.name: sha256(file.read_bytes()).hexdigest() for file in looks}
    return {"values": values, "code": code}


def targets(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        yield from [config["_target_"]] if "_target_" in config else []
        config = list(config.values())
    for value in config if isinstance(config, list) else []:
        yield from targets(value)


def differences(before: Any, after: Any, key: str = "") -> Iterator[str]:
    """Yields the dotted keys that differ; for values, with the new and the old value."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            yield from differences(
                before.get(name), after.get(name), f"{key}.{name}" if key else name
            )
    elif before != after:
        head, _, rest = key.partition(".")
        yield rest if head == "code" else f"{rest} = {after} (was {before})"[:80]


if __name__ == "__main__":
    ArgumentParser(
        usage="python -m pipelines.fingerprints",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    ).parse_args()
    main()
