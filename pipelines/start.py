"""What `python -m pipelines.<app>` refuses before the app's imports, which take seconds.

Python imports the package before the app's module, so that the values it was given are checked
here first. The app composes them again: a good start pays some tenths of a second.
"""

import os
import sys
from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipelines.app import (
    check_all,
    composed,
    ending_with_one_line,
    say_edits,
    scale_of_params,
)
from pipelines.values import CONF

SHORT = {"probe": ("model", "text", "tokenizer", "caches")}
"""Arguments that stand for probe.<name>: Hydra would take some for config groups."""
SWEEP = ("-m", "--multirun")


def check_start(app: str, arguments: Sequence[str]) -> None:
    """Ends the program with one line where no config, or a wrong one, can be composed.

    Options of Hydra, such as --help, are left to it. Of a sweep one good job is enough: the others
    are refused when their turn comes. Of the processes that torchrun starts the first one speaks,
    before the others have imported anything.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    overrides = [one for one in written_out(app, arguments) if one not in SWEEP]
    if any(one.startswith("-") for one in overrides):
        return
    with ending_with_one_line():
        if app == "fingerprints":
            name, overrides = "plan", []
        elif (CONF / f"{app}.yaml").exists():
            name = app
        else:
            return
        overrides = [*scale_of_params(overrides), *overrides]
        together = int(os.environ.get("WORLD_SIZE", "1"))
        if together > 1 and set(SWEEP) & set(arguments):
            raise ValueError(
                f"each of the {together} processes would run the whole sweep: start -m without "
                f"torchrun, or torchrun without -m"
            )
        if len(overrides) == 0 or not set(SWEEP) & set(arguments):
            check_job(name, overrides)
        else:
            check_sweep(name, overrides)


def check_job(name: str, overrides: Sequence[str]) -> None:
    """Raises ValueError for a config that cannot be; says what stands in place of the scale's."""
    cfg = composed(name, overrides)
    check_all(cfg, name, overrides)
    say_edits(cfg.scale, overrides)


def check_sweep(name: str, overrides: Sequence[str]) -> None:
    """Raises the error of the first job where every job of a sweep has one."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    first: Exception | None = None
    for job in BasicSweeper.split_arguments(parsed, None)[0]:
        try:
            check_job(name, job)
        except Exception as error:
            first = first or error
        else:
            return
    if first:
        raise first


def written_out(app: str, arguments: Sequence[str]) -> list[str]:
    """Arguments with the short ones of an app as the keys that they stand for."""
    short = SHORT.get(app, ())
    return [
        f"{app}.{argument}" if argument.partition("=")[0] in short else argument
        for argument in arguments
    ]


def of_command() -> str:
    """The app that Python was started with, as in `python -m pipelines.<app>`; "" for none."""
    given = sys.orig_argv
    module = given[given.index("-m") + 1] if "-m" in given[:-1] else ""
    return module.removeprefix("pipelines.") if module.startswith("pipelines.") else ""
