"""The stage measures a packaged decoder: a tiny one, from a GGUF file in a package made here."""

import lzma
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.apps import refusal, run_app
from tests.models.gguf_files import llama, write_gguf
from value_aware_attention.measurement import Record
from value_aware_study.report.contents import pretrained_section
from value_aware_study.report.exhibits import pretrained
from value_aware_study.report.records import pretrained as read

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = "the thing that they thought of then was with them "


def command(site: Path, *more: str) -> str:
    """Asks for an evaluation on 32 tokens of a text."""
    options = [
        "pretrained.weights=package:tiny_decoder/tiny.gguf",
        "pretrained.name=tiny", "pretrained.model=tiny",
        "pretrained.parts={early:[0,1]}", f"text={site}/text.txt", "text_name=made",
        "description=words",
        "extent.length=32", "extent.windows=4", "extent.keys=[1,4]", "extent.slots=[1,4]",
        "extent.value_aware_keys=[1,4]", "extent.control_keys=[4]", "extent.parts_keys=[4]",
        "extent.random_seeds=[0,1]",
    ]  # fmt: skip
    return " ".join(["evaluate_pretrained", *options, *more])


@pytest.mark.slow
def test_the_record_has_every_control_and_the_page_shows_it(site: Path) -> None:
    run_app(command(site), site)
    folder = site / "outputs/smoke/records/pretrained"
    (file,) = folder.glob("*.json")
    assert re.fullmatch(r"tiny-made-\w{12}-cut\.json", file.name)  # other values than the option's
    record = Record.from_json(file.read_text())
    text = record.text
    assert (record.model, record.metric, text.description) == ("tiny", "perplexity", "words")
    assert record.bits_a_weight == 32 and "begins_with_bos" not in file.read_text()
    assert text.units == 4 and set(record.hashes) == {"checkpoint", "text"}
    assert str(site) not in file.read_text()
    rules = [*pretrained.FIGURE_ROWS.values(), *pretrained.CORRECTIONS.values()]
    rules.append(("optimal_v_oblivious", {"r": 4, "layers": "early"}))
    assert all(pretrained.find(record, rule) for rule in rules)
    whole, early, none = (
        pretrained.find(record, ("optimal_v_oblivious", {"r": 4, **part}))
        for part in ({}, {"layers": "early"}, {"layers": "late"})  # it has no late layer
    )
    assert none.value == record.cells[0].value and early.value not in (none.value, whole.value)
    assert all(set(cell.predictions) == {"kl", "same_top_token"} for cell in record.cells)
    assert len(record.controls) == 2 and record.controls[0] != record.controls[1]
    assert record.attention[0].output_error.matching_slots
    assert [gap.r for gap in record.search_gaps] == [2, 3] and record.search_gaps[0].proved > 0.9
    cached = {path: path.stat().st_mtime_ns for path in (site / ".cache").rglob("*.json")}
    assert cached
    run_app(command(site), site)
    assert Record.from_json(file.read_text()) == record
    assert cached == {path: path.stat().st_mtime_ns for path in (site / ".cache").rglob("*.json")}
    check_exhibits(record, folder.parent, site / "published")


@pytest.mark.slow
def test_windows_begin_with_bos_where_the_tokenizer_adds_it(site: Path) -> None:
    keys = {"tokenizer.ggml.add_bos_token": True}
    write_gguf(llama(), site / "site/tiny_decoder/tiny.gguf", keys=keys)
    (site / "text.txt").write_text("the thing " * 13)
    refused = refusal(command(site), site)  # 32 tokens for 31 of the text
    assert "the text fills 3 windows of 32 tokens; 4 are needed" in refused
    (site / "text.txt").write_text(40 * WORDS)
    run_app(command(site), site)
    (file,) = (site / "outputs/smoke/records/pretrained").glob("*.json")
    record = Record.from_json(file.read_text())
    assert record.text.begins_with_bos and record.cells[0].count == 4 * 15  # of 16 scored rows
    assert pretrained.label(record) == "tiny, words, 32 tokens, BOS first"


def check_exhibits(record: Record, measured: Path, published: Path) -> None:
    """A published record is shown where no run has measured more than a cut."""
    (published / "pretrained").mkdir(parents=True)
    (published / "pretrained/smollm2-made-tokens_256.json.xz").write_bytes(
        lzma.compress(record.to_json().encode())
    )
    records = read(measured, published)
    assert len(records) == 1 and records[0] == record
    section = pretrained_section(records)
    names = {exhibit.name for exhibit in section.exhibits}
    assert {"predictions", "pretrained_matches", "gap_closed", "first_token"} <= names
    few = pretrained.few_keys(records)
    exact, aware = record.cells[0], pretrained.find(record, ("optimal_v_aware", {"r": 4}))
    assert few is not None and few.table is not None and aware is not None
    row = few.table.data.set_index("name").loc["chosen for the output (OVA)"]
    assert row["value"] == pytest.approx(aware.value / exact.value)
    assert f"{aware.value / exact.value:.2f}" in few.title
    data = pretrained.gap_closed(records).table.data.set_index("rule")["value"]
    between = pretrained.find(record, pretrained.CORRECTIONS["OVO's keys, best weights"])
    worst = pretrained.find(record, ("optimal_v_oblivious", {"r": 4}))
    assert worst is not None
    cells = [replace(worst, approximation=aware.approximation) if c == aware else c
             for c in record.cells]  # fmt: skip
    others = replace(record, model="another", cells=tuple(cells))
    title = pretrained.few_keys([record, others]).title  # of the first decoder alone
    assert title == few.title != pretrained.few_keys([others, record]).title
    unnamed = replace(record, text=replace(record.text, description=""))
    assert pretrained.label(unnamed) == f"{record.model}, {record.length} tokens"
    shares = [sum(cell.unit_totals) for cell in (worst, between, aware)]
    expected = 100 * (shares[0] - shares[1]) / (shares[0] - shares[2])
    assert data["OVO's keys, best weights"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("pretrained.weights=package:no_such/a", "no such package, or no such path in it"),
        ("pretrained.weights=other.gguf", "other.gguf: no such file"),
        ("extent.length=65", "length is 65; the model has 64 positions"),
        ("extent.length=64", "the text fills 1 windows of 64 tokens; 4 are needed"),
        ("extent.windows=2", "the text fills 2 windows"),
        ("text_name=a/b", "cannot name a file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(site: Path, change: str, named: str) -> None:
    (site / "text.txt").write_text("the thing " * 12)
    assert named in refusal(command(site, change), site)
    assert not (site / "outputs/smoke/records/pretrained").exists()
