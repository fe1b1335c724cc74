"""Makes a function a Hydra app with a checked config; hashes and writes the files of apps."""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pipelines.app.errors import (
    FULL_ERROR,
    ending_with_one_line,
    first_speaks,
    result_or_failure,
    tracebacks,
)
from pipelines.app.method_cards import check_arguments, register_methods
from pipelines.app.values import (
    CONF_FOLDER,
    check,
    check_override,
    is_group,
    leaves,
    read_params,
    values_of_scale,
)


def app(
    name: str, *, short: Collection[str] = ()
) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Makes a Hydra app over conf/<name>.yaml; its function gets the section <name>.

    Values are checked as soon as they are composed: the function imports what takes long, so that
    a wrong one is refused before that. Errors that the user can act on end the program with one
    line and exit code 1. With HYDRA_FULL_ERROR=1 the full traceback is shown. An argument of
    `short` stands for <name>.<argument>: Hydra would take some for config groups.
    """

    def decorate(function: Callable[[DictConfig], Any]) -> Callable[[], None]:
        def main() -> None:
            # with tracebacks Hydra raises instead of exiting
            with tracebacks(True), ending_with_one_line(), first_speaks():
                overrides = read_arguments(name, short)

                def task(cfg: DictConfig) -> Any:
                    return run_job(function, name, cfg, overrides)

                hydra.main(version_base=None, config_path=str(CONF_FOLDER), config_name=name)(
                    task
                )()

        return main

    return decorate


def read_arguments(name: str, short: Collection[str]) -> list[str]:
    """Completes sys.argv with the scale and the overrides of params.yaml for Hydra.

    Returns the overrides that were given, with the scale. Raises ValueError for what Hydra would
    not refuse by its name, and for a sweep of which every job is wrong.
    """
    arguments = [
        f"{name}.{argument}" if argument.partition("=")[0] in short else argument
        for argument in sys.argv[1:]
    ]
    parsed = get_args_parser().parse_intermixed_args(arguments)
    overrides = with_group(parse([*scale_of_params(arguments), *parsed.overrides]))
    # argparse takes overrides from one place alone
    options = [argument for argument in arguments if argument not in parsed.overrides]
    sys.argv[1:] = [*options, f"hydra.job.name={name}", *overrides]
    register_methods(name)
    if options in (["-m"], ["--multirun"]):  # other options are Hydra's to read
        check_sweep(name, overrides)
    elif any("${" in override for override in parsed.overrides):  # Hydra would name another key
        composed(name, overrides, app=name)
    return overrides


def run_job(
    function: Callable[[DictConfig], Any], name: str, cfg: DictConfig, overrides: Sequence[str]
) -> Any:
    """Checks a composed config, then runs an app's function on its section."""
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN

    def checked(section: DictConfig) -> Any:
        # Hydra leaves keys of its own out of the overrides that it names for a job
        own_overrides = HydraConfig.get().overrides.task if is_sweep else overrides
        with first_speaks():
            added = check(cfg, parse(own_overrides), name)
        check_arguments(cfg, added)
        return function(section)

    # what the function starts, such as the other processes of ddp, gets the user's choice
    with tracebacks(FULL_ERROR):
        if is_sweep:
            return result_or_failure(checked, cfg[name])
        with ending_with_one_line():  # ended here, before Hydra adds lines of its own
            return checked(cfg[name])


def check_sweep(name: str, overrides: Sequence[str]) -> None:
    """Raises the error of a sweep's first job where every job has one.

    One good job is enough: the others are refused when their turn comes. Raises ValueError where
    torchrun started the sweep several times.
    """
    if (together := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"each of the {together} processes would run the whole sweep: start -m without "
            f"torchrun, or torchrun without -m"
        )
    errors: list[Exception] = []
    for job in BasicSweeper.split_arguments(parse(overrides), None)[0]:
        try:
            composed(name, job, app=name)
            return
        except Exception as error:
            errors.append(error)
    raise errors[0]


def composed(name: str, overrides: Sequence[str], *, app: str = "", **options: Any) -> DictConfig:
    """Composes the config of an app as its command line would, within a running app or outside.

    Raises ValueError for a value that is not allowed; with `app` also where one is missing.
    """
    register_methods(name)
    parsed, conf = parse(overrides), str(CONF_FOLDER)
    is_running = GlobalHydra.instance().is_initialized()
    with nullcontext() if is_running else initialize_config_dir(conf, version_base=None):
        cfg = compose(name, list(overrides), **options)
    check(cfg, parsed, app)
    return cfg


def own_values(cfg: DictConfig, name: str) -> str:
    """Writes the values that a record has of its own, for its name: "-prompts_4-seed_3".

    These are values that differ from those of the app's stage in a run of all, and that the name
    does not have already; many or long ones are a hash. An option with a new name has its values
    under that name.
    """
    root: Any = cfg._get_root()
    sections = OmegaConf.masked_copy(root, [name, "pretrained", "extent", "seed"])
    before, given = usual_values(root, name), tuple(HydraConfig.get().overrides.task)
    places = {str(override.key_or_group) for override in parse(given) if not is_group(override)}
    values = {
        key: value
        for key, value in leaves(OmegaConf.to_container(sections))
        if any(f"{key}.".startswith(f"{place}.") for place in places)
    }
    apart = {  # keys that the name has in another way, or that change no number
        *(f"{name}.{key}" for key in ("text", "text_name", "kind", "length", "group", "name")),
        *(f"{name}.{key}" for key in ("description", "scale", "records", "cache", "memory_gib")),
        "pretrained.description",
    }
    own = {
        key: str(value).strip("[]").replace(", ", "+")
        for key, value in values.items()
        if value != before.get(key) and key not in apart
    }
    text = "".join(
        f"-{key.partition('.')[2] or key}_{value}"
        for key, value in own.items()
        if f"{key.partition('.')[0]}.name" not in own
    )
    is_short = len(text) <= 60 and text.isprintable() and not set(text) & set("/\\ '")
    return text if is_short else f"-{sha256(text.encode()).hexdigest()[:12]}"


def usual_values(root: DictConfig, name: str) -> dict[str, Any]:
    """Reads the values that an app has at a scale, by key, from conf/ and params.yaml.

    An option of the user's own is not in conf/, so that whatever is given of it counts as another.
    """
    choices = HydraConfig.get().runtime.choices
    values = dict(leaves(read_params()))
    for group in ("", "pretrained", "extent"):
        if (path := CONF_FOLDER / group / f"{choices.get(group, name)}.yaml").exists():
            values |= dict(leaves(OmegaConf.to_container(OmegaConf.load(path)), group))
    return (
        values
        | values_of_scale(root.scale)
        | {
            str(override.key_or_group): override.value()
            for override in parse(scale_of_params(HydraConfig.get().overrides.task))
        }
    )


def with_group(overrides: Sequence[Override]) -> list[str]:
    """Writes overrides as they were given, those of keys of a swept group with ++ before them.

    Hydra composes once without all that is swept, and every job before the first one runs. It would
    end the sweep for a key that the default option or one of the swept ones lacks.
    """
    groups = tuple(
        f"{override.package or override.key_or_group}."
        for override in overrides
        if is_group(override) and override.is_sweep_override()
    )
    return [
        f"++{str(override.input_line).lstrip('+')}"
        if str(override.key_or_group).startswith(groups) and not override.is_delete()
        else str(override.input_line)
        for override in overrides
    ]


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides. Raises ValueError for one that Hydra takes, and that nothing reads."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    for override in parsed:
        check_override(override)
    return parsed


def scale_of_params(arguments: Sequence[str]) -> list[str]:
    """Returns the overrides that params.yaml chooses: its scale, unless one is given, and its own.

    DVC reads the scale and Hydra needs a choice; this keeps it written once. The `overrides` hold
    for the scale of params.yaml alone.
    """
    params = OmegaConf.create(read_params())
    scale, overrides = f"scale={params.scale}", list(params.overrides)
    if scales := [argument for argument in arguments if argument.startswith("scale=")]:
        return overrides if scales[-1] == scale else []
    return [scale, *overrides]


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Returns a config as dictionaries and lists, with its interpolations resolved."""
    return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


def write_json(path: str | Path, content: Any, *, checksum: bool = False) -> None:
    """Writes sorted, indented JSON as `write_text` does, on request with a checksum in it.

    Raises ValueError for NaN and infinity, and leaves a file that was there as it is.
    """
    # imported here: it brings torch, and what composes a config refuses a wrong one before that
    from value_aware_attention.files import save_json, to_json, write_text

    try:
        text = to_json(content, indent=1, sort_keys=True)
    except ValueError as error:
        raise ValueError(f"{path} was not written: {error}") from None
    (save_json if checksum else write_text)(path, text + "\n")


def file_hash(paths: Iterable[Path | str]) -> str:
    """Computes a sha256 over names and sha256 of files and of every file below folders, in order.

    A model's card and checksums are left out: no number depends on them. A file whose checksum was
    compared before is not read again.
    """
    from value_aware_attention.files import CARD, CHECKSUMS, checksum  # it brings torch

    digest = sha256()
    for path in map(Path, paths):
        for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
            if file.name not in (CARD, CHECKSUMS):
                digest.update(f"{file.name}\0{checksum(file)}\n".encode())
    return digest.hexdigest()
