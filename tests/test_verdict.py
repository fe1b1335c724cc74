"""A run ends with a verdict; a damaged file is named in one line."""

import json
import shutil
from pathlib import Path

import pytest

from pipelines import verdict
from tests.apps import ROOT

CLAIMS = "claim,verdict\none,holds\nother,undecided\n"
FILES = {
    "report/claims.csv": CLAIMS,
    "report/strength.csv": "model,errs\na,more than counting\na,undecided\nb,undecided\n",
    "results/laptop/claims.csv": CLAIMS.replace("undecided", "holds"),
    "results/laptop/summary.json": json.dumps({"a": {"exact": 2.0, "OVO_1": 0}}),
    "results/laptop/seconds.json": json.dumps({"report": 7}),
    "outputs/laptop/summary/a.json": json.dumps({"exact": 2.5, "OVO_1": 3}),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", ".")
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    return tmp_path


def test_a_run_is_compared_with_the_published_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict.main()
    same, other, worse, page = capsys.readouterr().out.splitlines()
    assert same == "1 of them as published; largest difference 25.0% (a, exact)"
    assert worse == "worse than counts of their own text: a"
    assert other == "  undecided, published holds: other" and page.endswith("report/index.html")
    assert verdict.published_seconds() == {"report": 7}
    shutil.rmtree("results")
    verdict.main()
    assert "1 holds, 1 undecided; no run of scale laptop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("report/claims.csv", None, "is missing: make it again"),
        ("report/claims.csv", "", "is damaged .it holds no claim.: make it again"),
        ("report/claims.csv", "claim,verdict\n", "is damaged .it holds no claim.: make it again"),
        ("report/claims.csv", "claim,x\n1,2\n", "is damaged .it has no 'verdict'.: make it again"),
        ("report/strength.csv", "x\n1\n", "is damaged .it has no 'errs'.: make it again"),
        ("results/laptop/claims.csv", "", "is damaged .it holds no claim.: restore"),
        ("results/laptop/summary.json", '{"a": "x"}', "is damaged .it has 'x' in the place of"),
        ("results/laptop/summary.json", '{"a": {"b": "x"}}', "is damaged .b is 'x', not a number"),
        ("results/laptop/summary.json", "7", "is damaged .it holds a int, not an object"),
        ("results/laptop/summary.json", '{"a": {"exac', "is damaged .Unterminated string"),
        (
            "outputs/laptop/summary/a.json",
            '{"exact": [1]}',
            "is damaged .exact is .1., not a number",
        ),
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
