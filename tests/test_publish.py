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
from value_aware_attention.files import check_checksums, write_checksums
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
        "probe/a/record.json": probed().to_json(),
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
        shutil.rmtree(root / "outputs/smoke/probe")
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
    archive = root / "results/seeds/smoke/records.zip"
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
    ours = {name: root / "outputs/smoke/records" / name for name in ("survey", "trained")}
    surveyed = replace(survey_record(), scale="laptop")
    ours["survey"].mkdir(parents=True)
    (ours["survey"] / "elu.json").write_text(surveyed.to_json())
    (root / "results/survey").mkdir(parents=True)
    (root / "results/survey/survey-of_another_scale.json.xz").write_bytes(b"")
    write_checksums(root / "results/survey")
    run_app("publish what=survey", root)
    assert names(root / "results/survey") == {"survey-elu.json.xz", "SHA256SUMS"}
    places = {"survey_published": root / "results/survey"} | ours
    assert records.survey(places) == ([surveyed], [], "")
    shutil.rmtree(ours["survey"])
    published, _, scale = records.survey(places)
    assert published == [surveyed] and scale == "laptop"
    lead = survey_section(Results.of([], surveyed=published, survey_of=scale)).lead
    assert "published run of scale laptop" in lead and "Left out" not in lead


def test_a_published_probe_is_shown_by_a_run_without_one(root: Path) -> None:
    """A probe of the run's own takes the place of a published one of its model."""
    probe, published = root / "outputs/smoke/probe", root / "results/probe"
    places = {"probe": probe, "probe_published": published, "explored": root / "none"}
    (probe / "a").mkdir(parents=True)
    (probe / "a/record.json").write_text(probed().to_json())
    (probe / "a/explorer.json").write_text(exploration().to_json())
    run_app("publish what=probe", root)
    assert names(published) == {"record-a.json.xz", "explorer-a.json.xz", "SHA256SUMS"}
    shutil.rmtree(probe)
    assert records.read_probed(probe, published) == [probed()]
    assert [shown.sizes for shown in records.explorations(places)] == [exploration().sizes]
    again = replace(probed(), scale="again")
    others = replace(exploration(), sizes=(3,))
    (probe / "a").mkdir(parents=True)
    (probe / "a/record.json").write_text(again.to_json())
    (probe / "a/explorer.json").write_text(others.to_json())
    assert records.read_probed(probe, published) == [again]
    # the published one has other sizes
    assert [shown.sizes for shown in records.explorations(places)] == [(3,)]


def test_one_page_is_published() -> None:
    assert [page.parent.name for page in ROOT.glob("results/*/index.html")] == ["hours"]
