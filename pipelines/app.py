"""What every app shares: composition, one-line errors, files that are never half-written."""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.methods import check_added_arguments, check_methods, register_methods
from pipelines.together import check_added, check_given, check_together
from pipelines.values import (
    PARAMS_FILE,
    asked,
    check,
    edited_params,
    near_words,
    read_params,
    shown,
    unknown,
    values_of_scale,
)

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
            def checked(section: DictConfig) -> Any:
                overrides = HydraConfig.get().overrides.task
                check_all(cfg, name, overrides)
                check_added_arguments(cfg, overrides)
                return function(section)

            with tracebacks(FULL_ERROR):
                if HydraConfig.get().mode == RunMode.MULTIRUN:
                    return result_or_failure(checked, cfg[name])
                with ending_with_one_line():  # ended here, before Hydra adds lines of its own
                    return checked(cfg[name])

        def main() -> None:
            with tracebacks(True), ending_with_one_line():  # Hydra raises instead of exiting
                given = sys.argv[1:]
                ours = [f"hydra.job.name={name}", *scale_of_params(given), *edits_of_params()]
                overrides = get_args_parser().parse_intermixed_args(given).overrides
                check_given(overrides)
                # argparse takes overrides from one place alone
                options = [one for one in given if one not in overrides]
                sys.argv[1:] = [*options, *ours, *overrides]
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
        check_given(overrides)
        cfg = compose(name, [*edits_of_params(), *overrides], **options)
    check_all(cfg, "", overrides)
    return cfg


def check_all(cfg: DictConfig, app: str, overrides: Sequence[str]) -> None:
    """Raises ValueError for the first thing that is not allowed in the config of an app."""
    check(cfg, app)
    check_added(cfg, overrides)
    check_together(cfg, app)


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


def scale_of_params(arguments: Sequence[str]) -> list[str]:
    """The overrides that params.yaml chooses: its scale, unless one is given, and its `overrides`.

    DVC reads the scale and Hydra needs a choice; this keeps it written once. The `overrides` hold
    for the scale of params.yaml alone.
    """
    params = read_params()
    scale, overrides = f"scale={params['scale']}", list(params["overrides"])
    given = [one for one in arguments if one.startswith("scale=")]
    if given:
        return overrides if given[-1] == scale else []
    return [scale, *overrides]


def edits_of_params() -> list[str]:
    """The overrides that make an edited value of params.yaml win over the scale's.

    They come before those of the command line, which win over both.
    """
    return [f"{key}={typed(value)}" for key, value in edited_params().items()]


def say_edits(scale: str, overrides: Sequence[str]) -> None:
    """Says on stderr which edited values of params.yaml stand where the scale has others."""
    given = [one.partition("=")[0].lstrip("+") for one in overrides]
    of_scale = values_of_scale(scale) if scale != "laptop" else {}
    for key, value in edited_params().items():
        if key not in given and of_scale.get(key, value) != value:
            print(
                f"{key} is {shown(value)} in {PARAMS_FILE}, edited: it wins over scale={scale}, "
                f"which sets {shown(of_scale[key])}",
                file=sys.stderr,
            )


def typed(value: Any) -> str:
    """A value as Hydra reads it on a command line."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, str):
        return QuotedString(text=value, quote=Quote.single).with_quotes()
    return json.dumps(value)


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
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override} cannot be read as key=value; a value with other letters than those "
            f"of English, with spaces or brackets needs quotes, as in \"key='value'\""
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        near = asked(near_words(option, error.options))
        return f"{group} is {shown(option)}; it must be one of {', '.join(error.options)}{near}"
    text = text.partition("\nConfig search path:")[0]
    return (
        " ".join(text.replace(":\n\t", ": ").replace("\n\t", ", ").split()) or type(error).__name__
    )


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config as dictionaries and lists, interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))


def write_json(path: str | Path, content: Any, *, checksum: bool = False) -> None:
    """Writes sorted, indented JSON as `write_text` does, on request with a checksum in it.

    Raises ValueError for NaN and infinity, and leaves a file that was there as it is.
    """
    # imported here: it brings torch, and what composes a config refuses a wrong one before that
    from value_aware_attention.measurement.strict_json import to_json
    from value_aware_attention.storage import with_checksum, write_text

    try:
        text = to_json(content, indent=1, sort_keys=True)
    except ValueError as error:
        raise ValueError(f"{path} was not written: {error}") from None
    write_text(path, (with_checksum(text) if checksum else text) + "\n")
