"""What every app shares: composition, one-line errors, files that are never half-written."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.methods import register_methods
from value_aware_attention.measurement.strict_json import to_json
from value_aware_attention.storage import reading, with_checksum, write_text

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
            with tracebacks(FULL_ERROR):
                if HydraConfig.get().mode == RunMode.MULTIRUN:
                    return result_or_failure(function, cfg[name])
                with ending_with_one_line():  # ended here, before Hydra adds lines of its own
                    return function(cfg[name])

        def main() -> None:
            with tracebacks(True), ending_with_one_line():  # Hydra raises instead of exiting
                sys.argv += [f"hydra.job.name={name}", *scale_of_params(sys.argv[1:])]
                register_methods()
                hydra.main(version_base=None, config_path=CONFIG, config_name=name)(task)()

        return main

    return decorate


def composed(name: str, overrides: Sequence[str], **options: Any) -> DictConfig:
    """The config of an app as its command line would make it of `overrides`; in an app or not."""
    register_methods()
    inside = GlobalHydra.instance().is_initialized()
    with nullcontext() if inside else initialize_config_dir(CONFIG, version_base=None):
        return compose(name, list(overrides), **options)


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


class Failure(str):
    """What a job of a sweep returns in place of its result: one line that says why."""


def result_or_failure(function: Callable[[DictConfig], Any], cfg: DictConfig) -> Any:
    """What the function returns, or a Failure, also printed, so that a sweep's other jobs run.

    An error that the user cannot act on is printed with its traceback. Only Ctrl-C ends the sweep.
    """
    try:
        with ending_with_one_line():
            return function(cfg)
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise
        failure = Failure(str(stop.code).removeprefix("error: "))
    except Exception as error:
        traceback.print_exc()
        failure = Failure(f"{type(error).__name__}: {one_line(error)}")
    print(f"error: {failure}", file=sys.stderr)
    return failure


def scale_of_params(arguments: list[str]) -> list[str]:
    """The override that makes the `scale` of params.yaml the group choice, unless one is given.

    DVC reads the value and Hydra needs a choice; this keeps it written once.
    """
    if any(argument.startswith("scale=") for argument in arguments):
        return []
    if not Path("params.yaml").exists():
        sys.exit("error: no params.yaml in the current folder; run from the repository's root")
    with reading("params.yaml", "mend it"):
        return [f"scale={OmegaConf.load('params.yaml').scale}"]


def one_line(error: BaseException) -> str:
    """The error's message on one line; of one that Hydra wraps, what the library said."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    cause = error.__cause__ if isinstance(error, HydraException) else None
    if isinstance(cause, (ValueError, OSError)):
        return one_line(cause)
    text = f"{error}: {cause}" if cause else str(error)
    text = text.partition("\nConfig search path:")[0]
    return (
        " ".join(text.replace(":\n\t", ": ").replace("\n\t", ", ").split()) or type(error).__name__
    )


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config as dictionaries and lists, interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))


def check_counts(given: Mapping[str, Any]) -> None:
    """Raises ValueError for the first value, by its key, that is no whole number above 0."""
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value}; it must be a whole number of at least 1")


def write_json(path: str | Path, content: Any, *, checksum: bool = False) -> None:
    """Writes sorted, indented JSON as `write_text` does, on request with a checksum in it.

    Raises ValueError for NaN and infinity, and leaves a file that was there as it is.
    """
    try:
        text = to_json(content, indent=1, sort_keys=True)
    except ValueError as error:
        raise ValueError(f"{path} was not written: {error}") from None
    write_text(path, (with_checksum(text) if checksum else text) + "\n")
