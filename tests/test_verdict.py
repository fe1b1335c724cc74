"""A run ends with a verdict; a damaged file is named in one line."""

import csv
import io
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from pipelines import verdict
from tests.apps import ROOT
from tests.refusals import assert_refused

COLUMNS = (
    *("claim", "verdict", "what", "model", "sentence", "holds", "estimate", "unit"),
    *("trainings", "spread", "seeds"),
)
# a spread of 0.1 nats over 3 trainings: two single trainings are within 0.61 nats, or × 1.84
SPREAD = ("1", "0.1", "3")
ELU, LONG = ("elu", "elu × 0.5 (0.4 to 0.6)"), ("long", "long −2.00 points")
ROWS = [
    ("one", "holds", "A against B (7 keys)", *ELU, "yes", "0.5", "ratio", *SPREAD),
    ("one", "holds", "A against B", *LONG, "yes", "-2", "points", "1", "", ""),
    ("one", "holds", "largest error", "elu", "elu 2e-06", "yes", "", "", "1", "", ""),
    ("other", "not measured", "", "", "", "", "", "", "1", "", ""),
]


def written(*changes):
    """Writes rows as CSV; a change has a row's number, a column's name and its value."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
    for number, column, value in changes:
        rows[number][column] = value
    text = io.StringIO()
    file = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    file.writeheader()
    file.writerows(rows)
    return text.getvalue()


FILES = {
    "report/findings.csv": written(),
    "results/laptop/findings.csv": written(),
    "results/laptop/seconds.json": json.dumps({"report": 7}),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", ".")
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    return tmp_path


def test_a_run_ends_with_its_verdict_and_page(run: Path) -> None:
    same, page = verdict.lines()
    assert same == SAME.format(claims=2, changed=0, within=0)
    assert page.endswith("report/index.html")
    shutil.rmtree("results")
    first, _ = verdict.lines()
    assert "paper: 1 holds, 1 not measured; no run of scale laptop" in first


SAME = (
    "{claims} of 2 claims as published; {changed} of 3 comparisons changed their mark, {within} of "
    "these within training noise"
)
FARTHER = [(0, "estimate", "0.91"), (0, "what", "A against B (8 keys)")]
BEFORE = "published × 0.5 (0.4 to 0.6) ✓"


@pytest.mark.parametrize(
    ("changes", "counts", "named"),
    [
        (
            [(0, "holds", ""), *FARTHER],
            (2, 1, 1),
            [f"A against B, elu × 0.5 (0.4 to 0.6) ?, {BEFORE}; within training noise"],
        ),
        ([(0, "estimate", "0.91")], (2, 0, 0), []),
        ([(1, "estimate", "0")], (2, 0, 0), []),  # points, of which no logarithm is taken
        (
            [(0, "estimate", "0.93"), (0, "sentence", "elu × 0.93")],
            (2, 0, 0),
            [f"A against B, elu × 0.93 ✓, {BEFORE}; beyond training noise"],
        ),
        (
            [(0, "estimate", "0.93"), (0, "trainings", "3"), (0, "holds", "no")],
            (2, 1, 0),
            [f"A against B, elu × 0.5 (0.4 to 0.6) ✗, {BEFORE}; beyond training noise"],
        ),
        (
            [(1, "holds", "")],
            (2, 1, 0),
            ["A against B, long −2.00 points ?, published −2.00 points ✓; unknown training noise"],
        ),
        (
            [(number, "verdict", "open") for number in range(3)],
            (1, 0, 0),
            ["open, published holds: one"],
        ),
    ],
)
def test_comparisons_are_held_against_the_noise_of_training(
    run: Path, changes: list[tuple[int, str, str]], counts: tuple[int, ...], named: list[str]
) -> None:
    Path("report/findings.csv").write_text(written(*changes))
    first, *others, _ = verdict.lines()
    assert first == SAME.format(**dict(zip(("claims", "changed", "within"), counts, strict=True)))
    assert others == [f"  {line}" for line in named]


def test_the_noise_of_means_of_three_trainings_is_smaller(run: Path) -> None:
    """By 0.34 nats the runs differ; of three trainings each 0.35 is noise."""
    first = verdict.findings(Path("report/findings.csv"), "").iloc[:1]

    def noise(ours: pd.DataFrame, theirs: pd.DataFrame) -> str:
        return str(verdict.paired(ours, theirs)["noise"].item())

    three = first.assign(trainings=3.0)
    assert noise(three, three.assign(estimate=0.7)) == "within"
    assert noise(three, three.assign(estimate=0.72)) == "beyond"
    moved = first.assign(estimate=0.72)
    assert noise(first, moved) == "within"
    none = {"spread": float("nan"), "seeds": float("nan")}
    assert noise(moved, first.assign(**none)) == noise(moved.assign(**none), first) == "within"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("report/findings.csv", None, "is missing: make it again"),
        ("report/findings.csv", ",".join(COLUMNS), "is damaged .it holds no claim.: make it"),
        ("results/laptop/findings.csv", "claim,x\n1,2\n", "is damaged .*'verdict'.*: restore"),
    ],
)
def test_a_file_of_another_form_is_named(run: Path, name: str, text: str, line: str) -> None:
    Path(name).unlink()
    if text is not None:
        Path(name).write_text(text)
    assert_refused(f"^error: {name} {line}", verdict.main, error=SystemExit)


def test_seconds_are_numbers(run: Path) -> None:
    seconds = Path("results/laptop/seconds.json")
    assert verdict.numbers(seconds) == {"report": 7} and not verdict.numbers(run / "none.json")
    seconds.write_text('{"report": "x"}')
    assert_refused(r"^results/laptop/seconds\.json is damaged .*'x'", verdict.numbers, seconds)
