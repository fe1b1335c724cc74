"""Starts apps at smoke scale in processes forked from one that has imported all of them."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

FIXED = ("scale=smoke", "logger=none", "trainer.accelerator=cpu")
REPOSITORY = Path(__file__).parents[1]
APPS = (
    *("corpus", "tokens", "train_causal", "train_masked", "evaluate"),
    *("survey", "probe", "report", "publish"),
)
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])
for _app in APPS:
    import_module(f"pipelines.{_app}")


def app_process(app: str, overrides: Sequence[str], root: Path, output: Path) -> ForkServerProcess:
    """Returns the process of `python -m pipelines.<app>`, started, which prints to a file."""
    process: ForkServerProcess = SERVER.Process(target=_run, args=(app, overrides, root, output))
    process.start()
    return process


def _run(app: str, overrides: Sequence[str], root: Path, output: Path) -> None:
    """Runs the app at the repository's root, on one thread."""
    os.chdir(REPOSITORY)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was not forked
    sys.stdout = sys.stderr = output.open("a", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    torch.set_num_threads(1)
    sys.argv = [f"pipelines.{app}", *FIXED, f"paths.root={root}", *overrides]
    import_module(f"pipelines.{app}").main()
