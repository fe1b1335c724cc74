"""A run is published as the page of report/ with its files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.apps import ROOT, run_app
from tests.refusals import assert_refused
from tests.report.pages import exploration
from tests.report.surveyed import survey_record
from tests.report.synthetic import probed
from value_aware_attention.files import check_checksums, listed, write_checksums
from value_aware_attention.records.record import Record
from value_aware_study.report import records
from value_aware_study.report.contents import survey_section
from value_aware_study.report.frame import Results

pytestmark = pytest.mark.filterwarnings("ignore")
SUMMARY, TIMES = "summary.json", "seconds.json"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a report with a probed model's section, and then one without it."""
    root = tmp_path_factory.mktemp("reported")
    texts = {
        "metrics/tokens.json": json.dumps({"sources": {"a": {}}, "vocabulary_size": 60}),
        "metrics/train/a.json": json.dumps({"model": "a", "curve": [], "hyperparameters": {}}),
        "records/a.json": replace(probed(), scale="smoke", attention=()).to_json(),
        "records/probe/a/record.json": probed().to_json(),
        "explored/a.json": exploration().to_json(),
    }
    for name, text in texts.items():
        file = root / "outputs/smoke" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    with pytest.MonkeyPatch.context() as patch:  # drawing pictures takes most of the time
        patch.setattr("value_aware_study.report.page.png", lambda *_: b"")
        run_app("report", root)
        assert (root / "report/model_layers.png").exists()
        shutil.rmtree(root / "outputs/smoke/records/probe")
        run_app("report", root)
    return root


@pytest.fixture
def root(reported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(reported, tmp_path / "root")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_an_earlier_report_wrote_is_not_published(root: Path) -> None:
    (root / "report/mine.csv").write_text("mine")
    run_app("publish", root)
    (root / "results/smoke" / TIMES).write_text('{"report": 7}')
    write_checksums(root / "results/smoke")
    run_app("publish", root)  # which keeps the times
    kept = {name for name in names(root / "report") if name.endswith(".csv")} - {"mine.csv"}
    kept |= {"claims.md", "findings.md"}  # which README links
    assert names(root / "results/smoke") == kept | {SUMMARY, TIMES, "index.html", "SHA256SUMS"}
    check_checksums(root / "results/smoke", "publish again")
    assert not list(root.glob("*/**/model_*"))
    (root / "report/grid.md").unlink()
    assert_refused(
        r"report/grid\.md is missing: make the report again",
        run_app,
        "publish",
        root,
        error=SystemExit,
    )


def test_a_report_without_a_list_of_its_files_is_not_published(root: Path) -> None:
    (root / "report/SHA256SUMS").unlink()
    assert_refused(
        r"report has no SHA256SUMS, .*: make the report again",
        run_app,
        "publish",
        root,
        error=SystemExit,
    )
    assert not (root / "results").exists()


def test_a_report_of_another_scale_is_not_published(root: Path) -> None:
    record = root / "outputs/smoke/records/a.json"
    record.write_text(replace(probed(), scale="laptop", attention=()).to_json())
    shutil.move(root / "outputs/smoke", root / "outputs/laptop")
    line = "report is of scale smoke; scale is laptop: make the report again"
    assert_refused(line, run_app, "publish scale=laptop", root, error=SystemExit)


def test_of_a_run_to_compare_with_the_numbers_are_published_without_a_page(root: Path) -> None:
    run_app("publish what=numbers", root)
    tables = {name for name in names(root / "report") if name.endswith(".csv")}
    assert names(root / "results/smoke") == tables | {SUMMARY, "SHA256SUMS"}


def test_the_records_of_a_page_are_packed_and_equal_ones_are_equal_bytes(root: Path) -> None:
    archive = root / "results/records/smoke/records.zip"
    run_app("publish what=trainings", root)
    before = archive.read_bytes()
    run_app("publish what=trainings", root)
    assert archive.read_bytes() == before
    with ZipFile(archive) as packed:
        assert {Path(name).name for name in packed.namelist()} == {"a.json", "tokens.json"}
    shutil.rmtree(root / "outputs/smoke/records")
    line = "holds no records; run dvc repro first"
    refused = "publish what=trainings"
    assert_refused(line, run_app, refused, root, error=SystemExit)


def test_a_published_survey_is_shown_by_a_run_without_one(root: Path) -> None:
    """Its section says of which models it is; a survey of the run's own takes its place."""
    ours, published = root / "outputs/smoke/records", root / "results/records"
    surveyed = replace(survey_record(), scale="laptop")
    (ours / "survey").mkdir()
    (ours / "survey/elu.json").write_text(surveyed.to_json())
    for name in ("survey", "trained"):
        (published / name).mkdir(parents=True)
        (published / name / "of_another_scale.json.xz").write_bytes(b"")
        write_checksums(published / name)
    run_app("publish what=survey", root)
    assert names(published) == {"survey"}
    assert names(published / "survey") == {"elu.json.xz", "SHA256SUMS"}
    assert records.survey(ours, published) == ([surveyed], [], "")
    shutil.rmtree(ours / "survey")
    shown, _, scale = records.survey(ours, published)
    assert shown == [surveyed] and scale == "laptop"
    lead = survey_section(Results.of([], surveyed=shown, survey_of=scale)).lead
    assert "published run of scale laptop" in lead and "Left out" not in lead


def test_a_published_probe_is_shown_by_a_run_without_one(root: Path) -> None:
    """It has the path of the run's own, which takes its place; published ones of others stay."""
    roots = root / "outputs/smoke/records", root / "results/records"
    probe, pattern = roots[0] / "probe/a", "probe/*/record.json"
    probe.mkdir(parents=True)
    (probe / "record.json").write_text(probed().to_json())
    (probe / "explorer.json").write_text(exploration().to_json())
    run_app("publish what=probe", root)
    paths = {"a/record.json.xz", "a/explorer.json.xz"}
    assert set(listed(roots[1] / "probe")) == paths
    probe.rename(probe.with_name("b"))
    run_app("publish what=probe", root)
    assert set(listed(roots[1] / "probe")) == paths | {name.replace("a/", "b/") for name in paths}
    shutil.rmtree(probe.parent)
    assert records.read_all(Record.from_json, pattern, *roots) == {
        "probe/a/record.json": probed(),
        "probe/b/record.json": probed(),
    }
    shown = records.explorations(root / "none", *roots)
    assert [other.sizes for other in shown] == [exploration().sizes] * 2
    again = replace(probed(), scale="again")
    probe.mkdir(parents=True)
    (probe / "record.json").write_text(again.to_json())
    (probe / "explorer.json").write_text(replace(exploration(), sizes=(3,)).to_json())
    assert records.read_all(Record.from_json, pattern, *roots)["probe/a/record.json"] == again
    shown = records.explorations(root / "none", *roots)  # the published ones have other sizes
    assert [other.sizes for other in shown] == [(3,)]
    (roots[1] / "probe/b/record.json.xz").write_bytes(b"")
    line = r"b/record\.json\.xz is damaged .*: restore it \(git restore results\), or remove it"
    assert_refused(line, records.read_all, Record.from_json, pattern, *roots)


def test_one_page_is_published() -> None:
    assert [page.parent.name for page in ROOT.glob("results/*/index.html")] == ["hours"]
