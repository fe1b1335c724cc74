"""A run ends with a verdict; a damaged file is named in one line."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from pipelines import verdict
from tests.apps import ROOT

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
    "report/strength.csv": "model,errs\na,more than counting\na,undecided\nb,undecided\n",
    "results/laptop/findings.csv": written(),
    "results/laptop/seconds.json": json.dumps({"report": 7}),
    "outputs/laptop/seconds.json": json.dumps(
        {"train_causal@elu": 130.0, "train_in_context@recall": 800.0, "report": 900.0}
    ),
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
    same, worse, page = verdict.lines()
    assert same == "2 of 2 claims as published; none of 3 comparisons changed its mark"
    assert worse == "worse than counts of their own text, trained for 3 minutes at most: a"
    assert page.endswith("report/index.html")
    assert verdict.published_seconds() == {"report": 7}
    shutil.rmtree("results")
    first, *_ = verdict.lines()
    assert "paper: 1 holds, 1 not measured; no run of scale laptop" in first


TWO = "2 of 2 claims as published; 2 of 3 comparisons changed their marks"
CHANGED = "2 of 2 claims as published; 1 of 3 comparisons changed its mark"
FARTHER = [(0, "estimate", "0.91"), (0, "what", "A against B (8 keys)")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([(0, "holds", ""), *FARTHER], [f"{CHANGED}, all within training noise"]),
        ([(0, "estimate", "0.91")], [CHANGED.replace("1 of 3", "none of 3")]),
        (
            [(0, "estimate", "0.93"), (0, "sentence", "elu × 0.93")],
            [
                CHANGED.replace("1 of 3", "none of 3"),
                "  A against B (7 keys), elu: × 0.93 ✓, published × 0.5 (0.4 to 0.6) ✓; "
                "beyond training noise",
            ],
        ),
        (
            [(0, "estimate", "0.93"), (0, "trainings", "3"), (0, "holds", "no")],
            [
                f"{CHANGED}, none within training noise",
                "  A against B (7 keys), elu: × 0.5 (0.4 to 0.6) ✗, published × 0.5 (0.4 to 0.6) "
                "✓; beyond training noise",
            ],
        ),
        (
            [(0, "holds", ""), (1, "holds", "")],
            [
                f"{TWO}, 1 within training noise",
                "  A against B, long: −2.00 points ?, published −2.00 points ✓; no training spread "
                "is known",
            ],
        ),
        (
            [(2, "model", "polynomial")],
            [
                "2 of 2 claims as published; none of 2 comparisons changed its mark; 2 are in "
                "one of the runs alone"
            ],
        ),
        (
            [(number, "verdict", "in part") for number in range(3)],
            [
                "1 of 2 claims as published; none of 3 comparisons changed its mark",
                "  in part, published holds: one",
            ],
        ),
    ],
)
def test_comparisons_are_held_against_the_noise_of_training(
    run: Path, changes: list[tuple[int, str, str]], said: list[str]
) -> None:
    Path("report/findings.csv").write_text(written(*changes))
    *found, _, _ = verdict.lines()
    assert found == said


def test_the_noise_of_means_of_three_trainings_is_smaller(run: Path) -> None:
    first, *_ = verdict.findings(Path("report/findings.csv"), "")
    moved = first | {"estimate": "0.7"}  # by 0.34 nats; of three trainings each 0.35 is noise
    three = {"trainings": "3"}
    assert verdict.Pair(first | three, moved | three).within
    assert not verdict.Pair(first | three, moved | three | {"estimate": "0.72"}).within
    assert verdict.Pair(first, moved | {"estimate": "0.72"}).within
    none = {"seeds": ""}
    assert (
        verdict.Pair(moved, first | none).within
        and not verdict.Pair(moved | none, first | none).within
    )


def test_findings_published_in_an_older_form_are_compared_by_claims_alone(run: Path) -> None:
    old = "claim,verdict,what\none,not at this scale,x\nother,not measured,\n"
    Path("results/laptop/findings.csv").write_text(old)
    same, other, *_ = verdict.lines()
    assert same == ("1 of 2 claims as published; its comparisons have an older form (make publish)")
    assert other == "  holds, published not at this scale: one"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("report/findings.csv", None, "is missing: make it again"),
        ("report/findings.csv", "", "is damaged .it holds no claim.: make it again"),
        ("report/findings.csv", "claim,verdict\n", "is damaged .it holds no claim.: make it again"),
        (
            "report/findings.csv",
            "claim,x\n1,2\n",
            "is damaged .it has no 'verdict'.: make it again",
        ),
        ("report/strength.csv", "x\n1\n", "is damaged .it has no 'errs'.: make it again"),
        ("results/laptop/findings.csv", "", "is damaged .it holds no claim.: restore"),
    ],
)
def test_a_file_of_another_form_is_named(run: Path, name: str, text: str, line: str) -> None:
    Path(name).unlink()
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(SystemExit, match=f"^error: {name} {line}"):
        verdict.main()


def test_params_without_a_scale_and_seconds_of_texts_are_named(run: Path) -> None:
    Path("results/laptop/seconds.json").write_text('{"report": "x"}')
    with pytest.raises(ValueError, match=r"^results/laptop/seconds\.json is damaged .report is 'x"):
        verdict.published_seconds()
    lines = Path("params.yaml").read_text().splitlines(keepends=True)
    Path("params.yaml").write_text("".join(one for one in lines if not one.startswith("scale")))
    with pytest.raises(SystemExit, match=r"^error: params\.yaml lacks scale; it must be"):
        verdict.main()
