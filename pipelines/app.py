"""What every app shares: composition, one-line errors, files that are never half-written."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.methods import check_methods, register_methods
from pipelines.values import asked, check, near_words, read_params, unknown

CONFIG = str(Path(__file__).parents[1] / "conf")
TRACEBACKS = "HYDRA_FULL_ERROR"
FULL_ERROR = os.environ.get(TRACEBACKS) == "1"
USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError, KeyboardInterrupt)


def app(name: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """A Hydra app over conf/<name>.yaml whose function gets the section <name> of the config.

    Errors that the user can act on end the program with one line and exit code 1. With
    HYDRA_FULL_ERROR=1 the full traceback is shown.
    """

    def decorate(function: Callable[[DictConfig], Any]) -> Callable[[], None]:
        def task(cfg: DictConfig) -> Any:
            # what the function starts, such as the other processes of ddp, gets the user's choice
            with tracebacks(FULL_ERROR), ending_with_one_line():
                check(cfg, name)
                return function(cfg[name])  # ended here, before Hydra adds lines of its own

        def main() -> None:
            with tracebacks(True), ending_with_one_line():  # Hydra raises instead of exiting
                sys.argv += [f"hydra.job.name={name}", *scale_of_params(sys.argv[1:])]
                register_methods()
                check_methods()
                hydra.main(version_base=None, config_path=CONFIG, config_name=name)(task)()

        return main

    return decorate


def composed(name: str, overrides: Sequence[str], **options: Any) -> DictConfig:
    """The config of an app as its command line would make it of `overrides`; in an app or not."""
    register_methods()
    inside = GlobalHydra.instance().is_initialized()
    with nullcontext() if inside else initialize_config_dir(CONFIG, version_base=None):
        cfg = compose(name, list(overrides), **options)
    check(cfg)
    return cfg


@contextmanager
def tracebacks(shown: bool) -> Iterator[None]:
    """Sets Hydra's variable for the time of the block."""
    before = os.environ.get(TRACEBACKS)
    os.environ[TRACEBACKS] = "1" if shown else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TRACEBACKS]
        else:
            os.environ[TRACEBACKS] = before


@contextmanager
def ending_with_one_line() -> Iterator[None]:
    """Errors of the user's end the program with one line, unless tracebacks were asked for."""
    try:
        yield
    except USER_ERRORS as error:
        if FULL_ERROR:
            raise
        sys.exit(f"error: {one_line(error)}")


def scale_of_params(arguments: Sequence[str]) -> list[str]:
    """The override that makes the `scale` of params.yaml the group choice, unless one is given.

    DVC reads the value and Hydra needs a choice; this keeps it written once.
    """
    scale = read_params()["scale"]
    return [] if any(one.startswith("scale=") for one in arguments) else [f"scale={scale}"]


def one_line(error: BaseException) -> str:
    """The error's message on one line; of one that Hydra wraps, what the library said."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    cause = error.__cause__ if isinstance(error, HydraException) else None
    if isinstance(cause, (ValueError, OSError)):
        return one_line(cause)
    text = f"{error}: {cause}" if cause else str(error)
    if key := re.match("Could not override '(.*)'", text):
        places = re.search("Did you mean to override one of (.*)[?]", text)
        # Hydra would invite to append it with +
        return unknown(key[1], places[1].split(", ") if places else None)
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        near = asked(near_words(option, error.options))
        return f"{group} is {option}; it must be one of {', '.join(error.options)}{near}"
    text = text.partition("\nConfig search path:")[0]
    return (
        " ".join(text.replace(":\n\t", ": ").replace("\n\t", ", ").split()) or type(error).__name__
    )


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config as dictionaries and lists, interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill that takes its place under `path` only when everything succeeded."""
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: str | Path, content: Any) -> None:
    """Writes sorted, indented JSON as `write_text` does.

    Raises ValueError for NaN and infinity, and leaves a file that was there as it is.
    """
    # imported here: it brings torch, and what composes a config refuses a wrong one before that
    from value_aware_attention.measurement.strict_json import to_json

    try:
        text = to_json(content, indent=1, sort_keys=True)
    except ValueError as error:
        raise ValueError(f"{path} was not written: {error}") from None
    write_text(path, text + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    partial.write_text(text)
    partial.replace(target)
