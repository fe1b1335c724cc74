"""Stages of dvc.yaml and commands, one a module; `pipelines.app` has what they share."""

import os
import sys
from pathlib import Path

# For one release, the commands that were removed in 1.1, with their successors.
SUCCESSORS = {
    "pipelines.repro": "make repro, decoder, caches, survey and seed run dvc repro",
    "pipelines.run": "python -m pipelines.scale SCALE overrides && make repro",
    "pipelines.verdict": "the claims on the page have a column with the published verdicts",
    "pipelines.decode": "python -m pipelines.caches model=PATH text=FILE decoding=true",
    "pipelines.pretrained": "python -m pipelines.probe pretrained=smollm2",
    "pipelines.benchmark": "python -m benchmarks.survey measures time and memory",
    "checks.stamp": "nothing is needed: a fingerprint holds only the code that its stage runs",
}


class Removed:
    """The last finder of `sys.meta_path`: Python asks it for modules that no other finder knows."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Ends the program with one line and exit code 2 at a command that was removed."""
        if name in SUCCESSORS:
            print(f"error: {name} was removed in 1.1: {SUCCESSORS[name]}", file=sys.stderr)
            sys.exit(2)


sys.meta_path.append(Removed)

# `dvc exp run --temp` and `--queue` run a copy of the tree: its own library must win over an
# installed one.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

# How long OpenMP's idle threads spin before they sleep; it must be set before torch loads. By
# default they spin for milliseconds, which slows a machine with other work (two trainings at once
# took thirty times as long as one). With OMP_WAIT_POLICY=PASSIVE they do not spin, and a training
# step alone on two cores took 1.7 times as long. Here they spin for tenths of a millisecond: 2.8
# and 1.04 times.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "6000")

# Without a terminal, libraries would print their bars as lines between those of DVC. They read this
# variable when they are imported.
if not sys.stderr.isatty():
    for library in ("HF_DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
