"""Runs the stages of dvc.yaml that have changed, a line for each, then compares the run.

    python -m pipelines.repro [report|decoder|caches|survey|first|second|third] [scale=hours] [...]

`dvc repro` does the work. A scale and overrides are first written into params.yaml, where DVC and
every app read them; without any the run is the one that params.yaml describes. `report` takes the
records of a scale that are kept with the published results (pipelines/app/seeds.py) as long as
today's code would make them. `first`, `second` and `third` train and evaluate every model from one
seed, several models at a time, because a second thread makes these stages hardly faster.
"""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

from dvc.config import Config
from dvc.repo import Repo
from dvc.stage import PipelineStage

from pipelines import verdict
from pipelines.app import ending_with_one_line, write_json
from pipelines.app.choice import choose
from pipelines.app.seeds import files_of, take, waiting
from pipelines.fingerprints import LATER, needed, refusals_of_dvc, stages_of_page
from value_aware_study.paths import TIMES

OF_A_SEED = ("evaluate_causal", "evaluate_masked")
QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a target or a seed, if none is named the report, with a scale and overrides."""
    with ending_with_one_line():
        arguments = sys.argv[1:] if arguments is None else arguments
        if not arguments or "=" in arguments[0]:
            arguments = ["report", *arguments]
        without_git()
        cfg = choose(arguments[1:])
        run(arguments[0], cfg.scale, Path(cfg.paths.outputs), Path(cfg.paths.seeds))


def without_git() -> None:
    """Lets DVC work in a folder that is no repository of git's, such as a downloaded ZIP."""
    if any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        return
    Path(".dvc").mkdir(exist_ok=True)
    with Config(str(Path(".dvc").resolve())).edit("local") as local:
        local.setdefault("core", {}).update(no_scm=True, analytics=False)


def run(target: str, scale: str, outputs: Path, seeds: Path) -> None:
    """Runs every stage that has changed up to the target, the page, then the verdict."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if not sys.stderr.isatty():
        os.environ.update(QUIET)
    of_page, times = stages_of_page(), outputs / TIMES
    rows = rows_of(target, of_page)
    stages = set(chain.from_iterable(rows))
    published = verdict.numbers(verdict.PUBLISHED / scale / TIMES)
    minutes = sum(published.get(stage, 0.0) for stage in stages) / at_once(rows) / 60
    about = f", about {minutes:.0f} minutes from nothing" if minutes else ""
    print(f"{len(stages)} stages{about}; unchanged ones are passed over", flush=True)
    take(seeds, scale, of_page.values())
    ran = made_again(rows[0]) if target == "report" else made(rows)
    for seconds in ran:
        write_json(times, verdict.numbers(times) | seconds)
    before = [stage for name, stage in of_page.items() if name != "report"]
    if all(out.exists for out in files_of(before)):
        write_json(times, verdict.numbers(times) | make(["report"]))
        missing = [
            f"make {name}"
            for name in LATER
            if not all(out.exists for out in files_of(stages_of(name).values()))
        ]
        if missing:
            print(
                f"not measured here: {', '.join(missing)}; dvc repro runs them all, then the page"
            )
        verdict.main()
    else:
        print(f"{target} has its records; `make repro` makes the page that shows them")


def rows_of(target: str, of_page: Iterable[str]) -> list[list[str]]:
    """Returns rows of stages, each in an order that it can run in, for a target or a seed.

    Those of a target are one row, as `survey` measures times; a seed has one for each model. Raises
    ValueError for what is neither a target nor a seed of this scale.
    """
    if target == "report":
        return [list(of_page)]
    if later := stages_of(target):
        return [list(needed(later))]
    evaluations = {stage: seed_of(stage) for stage in of_page if stage.startswith(OF_A_SEED)}
    ends = [stage for stage, seed in evaluations.items() if seed == target]
    if not ends:
        allowed = ["report", *filter(stages_of, LATER), *dict.fromkeys(evaluations.values())]
        raise ValueError(
            f"what to run is {target}; at this scale it must be {' or '.join(allowed)}"
        )
    return [list(needed([end])) for end in ends]


def stages_of(command: str) -> dict[str, PipelineStage]:
    """Returns the stages of a command of `LATER` that this scale has, by name."""
    groups = LATER.get(command, ())
    stages = needed(["report"])
    return {name: stages[name] for name in stages if name.partition("@")[0] in groups}


def seed_of(evaluation: str) -> str:
    """Returns the option of conf/replicate that a stage evaluates."""
    group, _, cell = evaluation.partition("@")
    return cell.rpartition("-")[2] if group.endswith("_again") else "first"


def at_once(rows: Collection[Sequence[str]]) -> int:
    return min(len(rows), os.cpu_count() or 1)


def made_again(row: Sequence[str]) -> Iterator[dict[str, float]]:
    """Runs the stages before the page that have changed or lack a file, and all that they read."""
    first, *stages, _ = row
    yield make([first])  # fingerprints, with which all others are compared
    while stage := waiting(stages):
        stages.remove(stage)
        yield make(needed([stage]))


def made(rows: Collection[Sequence[str]]) -> Iterator[dict[str, float]]:
    """Runs the stages that rows share, then the rows at once, each on its share of the cores."""
    counts = Counter(chain.from_iterable(rows))
    yield make(stage for stage in counts if counts[stage] > 1)
    os.environ.setdefault("OMP_NUM_THREADS", str((os.cpu_count() or 1) // at_once(rows)))
    os.environ.update(QUIET)
    apart = [[stage for stage in row if counts[stage] == 1] for row in rows]
    with ProcessPoolExecutor(at_once(rows), get_context("spawn")) as pool:
        yield from pool.map(make, apart)


def make(stages: Iterable[str]) -> dict[str, float]:
    """Lets DVC run those of some stages that have changed; prints and returns their seconds."""
    logging.getLogger("dvc").setLevel(logging.WARNING)  # a line for each stage, and its own ones
    seconds = {}
    for stage in stages:
        since = time.monotonic()
        with refusals_of_dvc():
            changed = Repo(_wait_for_lock=True).reproduce(stage, single_item=True)
        if changed:
            seconds[stage] = round(time.monotonic() - since, 1)
            print(f"{stage}: {seconds[stage]:,.0f} s", flush=True)
    return seconds


if __name__ == "__main__":
    main()
