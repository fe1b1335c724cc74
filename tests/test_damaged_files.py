"""Damaged files, a full disk and a second start end an app with one line; outputs stay whole."""

import json
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.apps import ROOT, refusal, run_app, write_run
from tests.refusals import assert_refused
from tests.report.pages import exploration
from tests.report.synthetic import probed, survey_record
from tests.test_distributed import GRID
from value_aware_attention.files import (
    check_checksums,
    held,
    listed,
    with_checksum,
    write_checksums,
)
from value_aware_attention.records.record import Record
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report import records
from value_aware_study.report.contents import survey_section
from value_aware_study.report.frame import Results

pytestmark = pytest.mark.filterwarnings("ignore")
OUT = "outputs/smoke/"
CAUSAL, MODEL = f"{OUT}tokens/causal", f"{OUT}models/causal_elu"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-7],
    "emptied": lambda content: b"",
    "{}": lambda content: b"{}",
    "[]": lambda content: b"[]",
}


METRICS = {
    "metrics/tokens.json": json.dumps({"sources": {"a": {}}, "vocabulary_size": 60}),
    "metrics/train/a.json": json.dumps({"model": "a", "curve": [], "hyperparameters": {}}),
}


def write_outputs(root: Path, texts: dict[str, str]) -> None:
    """Writes files of a run's outputs, and the metrics that a report reads."""
    for name, text in (METRICS | texts).items():
        file = root / OUT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the files that the apps read, as small as can be."""
    root = write_run(tmp_path_factory.mktemp("whole"))
    (root / "text.txt").write_text("some words " * 300)
    shutil.copytree(root / CAUSAL / "tokenizer", root / MODEL, dirs_exist_ok=True)
    write_checksums(root / MODEL)
    texts = {
        "corpus/networkx/train.jsonl": json.dumps({"text": "some words " * 300}),
        "metrics/corpus.json": json.dumps({"networkx": {}}),
        "records/a.json": RECORD,
    }
    write_outputs(root, texts)
    for folder in (root / OUT / "corpus", root / OUT / "tokens"):
        write_checksums(folder)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "root")


RECORD = probed().to_json()
READ = {
    "report": (
        *(f"{OUT}metrics/{name}.json" for name in ("tokens", "train/a")),
        *(f"{OUT}records/{name}.json" for name in ("a", "survey/a", "trained/a", "probe/a/record")),
        f"{OUT}explored/a.json",
    ),
    "tokens": (f"{OUT}metrics/corpus.json", f"{OUT}corpus/networkx/train.jsonl"),
    "train_causal": (
        *(f"{CAUSAL}/{name}.npy" for name in ("train", "evaluation")),
        *(f"{CAUSAL}/tokenizer/{name}.json" for name in ("tokenizer", "tokenizer_config")),
    ),
    "evaluate kernel=elu": (
        *(f"{MODEL}/{name}" for name in ("config.json", "model.safetensors", "SHA256SUMS")),
        f"{CAUSAL}/evaluation.npy",
        f"{CAUSAL}/tokenizer/tokenizer.json",
    ),
    f"probe model={{root}}/{OUT}models/causal_elu text={{root}}/text.txt": (
        *(f"{MODEL}/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
    ),
}
RIGHT = {("{}", "tokenizer_config.json")}
"""Damages after which a file still holds all that is read of it"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command, names in READ.items() for name in names]
)
def test_a_damaged_file_is_named_in_one_line(
    whole: Path, tmp_path: Path, command: str, name: str
) -> None:
    for damage in DAMAGES:
        if (damage, Path(name).name) in RIGHT:
            continue
        root = tmp_path / damage.encode().hex()
        shutil.copytree(whole, root)
        file = root / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(RECORD)
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
        before = contents(root)
        line = refusal(command.format(root=root), root)
        assert str(file) in line, (damage, line)
        assert contents(root / OUT).items() <= before.items()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


EVALUATE = " ".join(["evaluate", "kernel=elu", *GRID])
WRITTEN = {
    "corpus": "corpus",
    "tokens": "tokens",
    "train_causal kernel=elu": "models/causal_elu",
    EVALUATE: "records",
    "report": "../../report",
}
"""Command of a stage -> the folder of its outputs"""


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("command", WRITTEN)
def test_without_room_for_its_largest_file_a_stage_leaves_what_was_there(
    root: Path, command: str
) -> None:
    if command == "tokens":  # needs as many different words as its vocabulary
        text = " ".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
        for split in ("train", "evaluation"):
            file = root / OUT / f"corpus/networkx/{split}.jsonl"
            file.write_text(json.dumps({"text": text}))
        write_checksums(root / OUT / "corpus")
    run_app(command, root)
    written = contents((root / OUT / WRITTEN[command]).resolve())
    before, largest = contents(root / OUT), max(map(len, written.values()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, limits[1]))
    try:
        line = refusal(command, root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "files may not grow as large in" in line and str(root) in line
    assert contents(root / OUT) == before
    run_app(command, root)
    assert contents((root / OUT / WRITTEN[command]).resolve()) == written


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("tokens", f"{OUT}tokens"),
        ("train_causal kernel=elu", ".cache/checkpoints/causal_elu"),
        ("report", "report"),
    ],
)
def test_a_stage_that_is_started_twice_is_refused_the_second_time(
    root: Path, command: str, folder: str
) -> None:
    before = contents(root / OUT)
    with held(root / folder):
        line = refusal(command, root)
    assert re.match(f"error: {root / folder} belongs to a .*still going", line)
    assert contents(root / OUT) == before


TOKENS = '{"sources": %s, "vocabulary_size": %s}'
TRAINING = '{"model": %s, "curve": %s, "hyperparameters": %s}'


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("tokens", TOKENS % ("{}", 60), "it has no sources"),
        ("tokens", TOKENS % ('{"a": {}}', '"x"'), "vocabulary_size is 'x'; it must be a int"),
        ("tokens", TOKENS % ('{"a": {"train": 3}}', 60), "sources.a.train is 3; it must be a Map"),
        ("train/a", TRAINING % ('"a"', '"abc"', "{}"), "curve is 'abc'; it must be a list"),
        ("train/a", TRAINING % ('"a"', '[{"loss": 1}]', "{}"), "it has no 'step'"),
        ("train/a", TRAINING % ("7", "[]", "{}"), "model is 7; it must be a str"),
        ("train/a", TRAINING % ('"a"', "[]", "[1]"), r"hyperparameters is \[1\]; it must be a Map"),
    ],
)
def test_metrics_of_another_form_are_named(root: Path, name: str, text: str, line: str) -> None:
    file = root / OUT / f"metrics/{name}.json"
    file.write_text(text)
    assert_refused(f"^error: {file} is damaged .{line}", run_app, "report", root, error=SystemExit)


@pytest.mark.usefixtures("undrawn")
def test_the_page_names_files_that_hold_no_checksum(root: Path) -> None:
    record = replace(probed(), attention=()).to_json()
    (root / OUT / "records/a.json").write_text(with_checksum(record))
    run_app("report", root)
    page = (root / "report/index.html").read_text()
    line = "These files have no checksum and are read as they are: metrics/tokens.json, train/a.js"
    assert line in page.split('id="how"')[1]


def test_a_model_with_two_records_is_refused_by_their_names(root: Path) -> None:
    (root / OUT / "records/b.json").write_text(RECORD)
    assert_refused(
        r"records/a\.json and .*records/b\.json are both records",
        run_app,
        "report",
        root,
        error=SystemExit,
    )


LAST = b"the last bit"


@pytest.mark.parametrize(
    ("command", "name", "old", "new"),
    [
        ("tokens", "corpus/networkx/train.jsonl", b"some", b"same"),
        ("tokens", "metrics/corpus.json", b"networkx", b"networks"),
        ("report", "metrics/tokens.json", b"60", b"61"),
        ("report", "metrics/train/a.json", b'"a"', b'"b"'),
        ("report", "records/a.json", b'"length": ', b'"length": 1'),
        ("evaluate kernel=elu", "tokens/causal/evaluation.npy", LAST, b""),
        ("evaluate kernel=elu", "models/causal_elu/model.safetensors", LAST, b""),
    ],
)
def test_another_letter_or_digit_is_refused_where_it_says_what_it_was(
    root: Path, command: str, name: str, old: bytes, new: bytes
) -> None:
    file = root / OUT / name
    if file.suffix == ".json":
        file.write_text(with_checksum(file.read_text()))
    else:
        write_checksums(file.parents[1] if command == "tokens" else file.parent)
    content = file.read_bytes()
    changed = (
        content[:-1] + bytes([content[-1] ^ 1]) if old == LAST else content.replace(old, new, 1)
    )
    file.write_bytes(changed)
    assert_refused(
        f"^error: {file} .*has changed since it was written",
        run_app,
        command,
        root,
        error=SystemExit,
    )


SUMMARY, TIMES = "summary.json", "seconds.json"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a report with a probed model's section, and then one without it."""
    run = tmp_path_factory.mktemp("reported")
    texts = {
        "records/a.json": replace(probed(), scale="smoke", attention=()).to_json(),
        "records/probe/a/record.json": probed().to_json(),
        "explored/a.json": exploration().to_json(),
    }
    write_outputs(run, texts)
    with pytest.MonkeyPatch.context() as patch:  # drawing pictures takes most of the time
        patch.setattr("value_aware_study.report.page.png", lambda *_: b"")
        run_app("report", run)
        assert (run / "report/model_layers.png").exists()
        shutil.rmtree(run / "outputs/smoke/records/probe")
        run_app("report", run)
    return run


@pytest.fixture
def run(reported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(reported, tmp_path / "run")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_an_earlier_report_wrote_is_not_published(run: Path) -> None:
    (run / "report/mine.csv").write_text("mine")
    run_app("publish", run)
    (run / "results/smoke" / TIMES).write_text('{"report": 7}')
    write_checksums(run / "results/smoke")
    run_app("publish", run)  # which keeps the times
    kept = {name for name in names(run / "report") if name.endswith(".csv")} - {"mine.csv"}
    kept |= {"claims.md", "findings.md"}  # which README links
    assert names(run / "results/smoke") == kept | {SUMMARY, TIMES, "index.html", "SHA256SUMS"}
    check_checksums(run / "results/smoke", "publish again")
    assert not list(run.glob("*/**/model_*"))


def of_another_scale(run: Path) -> None:
    record = run / "outputs/smoke/records/a.json"
    record.write_text(replace(probed(), scale="laptop", attention=()).to_json())
    shutil.move(run / "outputs/smoke", run / "outputs/laptop")


@pytest.mark.parametrize(
    ("spoil", "command", "line"),
    [
        (lambda run: (run / "report/grid.md").unlink(), "publish", r"report/grid\.md is missing"),
        (lambda run: (run / "report/SHA256SUMS").unlink(), "publish", "report has no SHA256SUMS"),
        (of_another_scale, "publish scale=laptop", "report is of scale smoke; scale is laptop"),
    ],
)
def test_a_report_that_is_not_that_of_the_run_is_not_published(
    run: Path, spoil: Callable[[Path], None], command: str, line: str
) -> None:
    spoil(run)
    line = f"{line}.*: make the report again"
    assert_refused(line, run_app, command, run, error=SystemExit)
    assert not (run / "results").exists()


def test_of_a_run_to_compare_with_the_numbers_are_published_without_a_page(run: Path) -> None:
    run_app("publish what=numbers", run)
    tables = {name for name in names(run / "report") if name.endswith(".csv")}
    assert names(run / "results/smoke") == tables | {SUMMARY, "SHA256SUMS"}


def test_the_records_of_a_page_are_packed_and_equal_ones_are_equal_bytes(run: Path) -> None:
    archive = run / "results/records/smoke/records.zip"
    run_app("publish what=trainings", run)
    before = archive.read_bytes()
    run_app("publish what=trainings", run)
    assert archive.read_bytes() == before
    with ZipFile(archive) as packed:
        assert {Path(name).name for name in packed.namelist()} == {"a.json", "tokens.json"}
    shutil.rmtree(run / "outputs/smoke/records")
    line = "holds no records; run dvc repro first"
    assert_refused(line, run_app, "publish what=trainings", run, error=SystemExit)


def test_a_published_survey_is_shown_by_a_run_without_one(run: Path) -> None:
    """Its section says of which models it is; a survey of the run's own takes its place."""
    ours, published = run / "outputs/smoke/records", run / "results/records"
    surveyed = replace(survey_record(), scale="laptop")
    (ours / "survey").mkdir()
    (ours / "survey/elu.json").write_text(surveyed.to_json())
    for name in ("survey", "trained"):
        (published / name).mkdir(parents=True)
        (published / name / "of_another_scale.json.xz").write_bytes(b"")
        write_checksums(published / name)
    run_app("publish what=survey", run)
    assert names(published) == {"survey"}
    assert names(published / "survey") == {"elu.json.xz", "SHA256SUMS"}
    assert records.survey(ours, published) == ([surveyed], [], "")
    shutil.rmtree(ours / "survey")
    shown, _, scale = records.survey(ours, published)
    assert shown == [surveyed] and scale == "laptop"
    lead = survey_section(Results.of([], surveyed=shown, survey_of=scale)).lead
    assert "published run of scale laptop" in lead and "Left out" not in lead


def test_a_published_probe_is_shown_by_a_run_without_one(run: Path) -> None:
    """It has the path of the run's own, which takes its place; published ones of others stay."""
    roots = run / "outputs/smoke/records", run / "results/records"
    probe, pattern = roots[0] / "probe/a", "probe/*/record.json"
    probe.mkdir(parents=True)
    (probe / "record.json").write_text(probed().to_json())
    (probe / "explorer.json").write_text(exploration().to_json())
    run_app("publish what=probe", run)
    paths = {"a/record.json.xz", "a/explorer.json.xz"}
    assert set(listed(roots[1] / "probe")) == paths
    probe.rename(probe.with_name("b"))
    run_app("publish what=probe", run)
    assert set(listed(roots[1] / "probe")) == paths | {name.replace("a/", "b/") for name in paths}
    shutil.rmtree(probe.parent)
    assert records.read_all(Record.from_json, pattern, *roots) == {
        "probe/a/record.json": probed(),
        "probe/b/record.json": probed(),
    }
    shown = records.explorations(run / "none", *roots)
    assert [other.sizes for other in shown] == [exploration().sizes] * 2
    probe.mkdir(parents=True)
    older = replace(exploration(), methods=exploration().methods[:2])
    (probe / "explorer.json").write_text(older.to_json())
    joined = Exploration.of(records.explorations(run / "none", *roots))  # with the published of b
    assert joined.methods == exploration().methods and len(joined.models) == 4
    again = replace(probed(), scale="again")
    (probe / "record.json").write_text(again.to_json())
    (probe / "explorer.json").write_text(replace(exploration(), sizes=(3,)).to_json())
    assert records.read_all(Record.from_json, pattern, *roots)["probe/a/record.json"] == again
    shown = records.explorations(run / "none", *roots)  # the published ones have other sizes
    assert [other.sizes for other in shown] == [(3,)]
    (roots[1] / "probe/b/record.json.xz").write_bytes(b"")
    line = r"b/record\.json\.xz is damaged .*: restore it \(git restore results\), or remove it"
    assert_refused(line, records.read_all, Record.from_json, pattern, *roots)


def test_one_page_is_published() -> None:
    assert [page.parent.name for page in ROOT.glob("results/*/index.html")] == ["hours"]
