"""Ends an app with one line at an error that the user can act on."""

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from typing import Any

from hydra.core.utils import env_override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipelines.app.values import asked, shown, unknown

TRACEBACKS = "HYDRA_FULL_ERROR"
FULL_ERROR = os.environ.get(TRACEBACKS) == "1"
USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError, OSError, KeyboardInterrupt)


def tracebacks(in_full: bool) -> AbstractContextManager[None]:
    """Sets Hydra's variable for full tracebacks within the block."""
    return env_override({TRACEBACKS: "1" if in_full else "0"})


@contextmanager
def ending_with_one_line() -> Iterator[None]:
    """Ends the program with one line at an error of the user, unless tracebacks are requested."""
    try:
        yield
    except USER_ERRORS as error:
        if FULL_ERROR:
            raise
        sys.exit(f"error: {one_line(error)}")


@contextmanager
def first_speaks() -> Iterator[None]:
    """Lets the first of the processes that torchrun started name what is wrong.

    torchrun ends all as soon as one of them ends, so the others must wait.
    """
    try:
        yield
    except USER_ERRORS:
        if os.environ.get("RANK", "0") != "0" and not FULL_ERROR:
            time.sleep(60.0)  # torchrun ends it earlier, with the first one
        raise


class Failure(str):
    """A line that a failed job of a sweep returns in place of its result."""


def result_or_failure(function: Callable[[DictConfig], Any], cfg: DictConfig) -> Any:
    """Returns the function's result or, after printing it, a Failure: other jobs must still run.

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


def one_line(error: BaseException) -> str:
    """Returns an error's message on one line; if Hydra wraps an error, that of the library."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    cause = error.__cause__ if isinstance(error, HydraException) else None
    if isinstance(cause, (ValueError, OSError)):
        return one_line(cause)
    text = f"{error}: {cause}" if cause else str(error)
    if key := re.match("Could not override '(.*)'", text):
        places = re.search("Did you mean to override one of (.*)[?]", text)
        # Hydra would invite to append it with +
        return unknown(key[1], places[1].split(", ") if places else ())
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override} cannot be read as key=value; a value with =, spaces, brackets or "
            f"other letters than those of English needs quotes, as in \"key='value'\""
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return (
            f"{group} is {shown(option)}; it must be one of {', '.join(error.options)}"
            f"{asked(get_close_matches(option, error.options, n=1))}"
        )
    text = text.partition("\nConfig search path:")[0]
    return (
        " ".join(text.replace(":\n\t", ": ").replace("\n\t", ", ").split()) or type(error).__name__
    )
