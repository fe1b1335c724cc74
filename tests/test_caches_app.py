"""Stages measure a packaged decoder and its caches: a tiny one, from a GGUF file in a package."""

import json
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from tests.apps import refusal, run_app
from tests.models.gguf_files import llama, write_gguf
from value_aware_attention.measurement import Record
from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.terminal import cache_table
from value_aware_study.report import records
from value_aware_study.report.contents import caches_section, pretrained_section
from value_aware_study.report.exhibits import caches, pretrained
from value_aware_study.report.records import pretrained as read

pytestmark = pytest.mark.filterwarnings("ignore")


def command(site: Path, *more: str) -> str:
    options = [
        "pretrained.weights=package:tiny_decoder/tiny.gguf",
        "pretrained.name=tiny", "pretrained.model=tiny",
        f"text={site}/text.txt", "text_name=made", "description=words", "length=32", "prompts=2",
        "caches.skip=1", "caches.continuation=6", "keep=[0.5]",
    ]  # fmt: skip
    return " ".join(["caches", *options, *more])


def test_the_record_is_shown_and_measured_once(site: Path) -> None:
    options = ["group=joint"]
    run_app(command(site, *options), site)
    folder = site / "outputs/smoke/records/caches"
    (file,) = folder.glob("*.json")
    assert file.name.startswith("tiny-joint-running_text-made-32-")
    record = CacheRecord.from_json(file.read_text())
    assert (record.model, record.task, record.text, record.prefix) == (
        "tiny",
        "running_text",
        "made",
        32,
    )
    assert not record.begins_with_bos and "begins_with_bos" not in file.read_text()
    assert {len(cell.kl) for cell in record.cells} == {2} and str(site) not in file.read_text()
    measured = {path: path.stat().st_mtime_ns for path in (site / ".cache").rglob("*.json")}
    run_app(command(site, *options), site)
    assert CacheRecord.from_json(file.read_text()) == record
    assert measured == {path: path.stat().st_mtime_ns for path in (site / ".cache").rglob("*.json")}
    run_app(command(site, *options, "caches.skip=0", "prompts=3"), site)
    file.rename(site / "fewer.json")
    (file,) = folder.glob("*.json")
    assert "-prompts_3-skip_0-" in file.name
    whole = CacheRecord.from_json(file.read_text())
    for cell, longer in zip(record.cells, whole.cells, strict=True):
        assert cell.kl == longer.kl[1:]  # the first prompt was left out
    (exhibit,) = caches_section(records.caches(folder.parent)).exhibits
    assert len(exhibit.table.data) == len(record.cells)
    assert exhibit.title.startswith("Running text, 32 tokens, ")
    assert set(
        exhibit.table.data.loc[exhibit.table.data["cache"] == caches.REFERENCE_CACHE, "ratio"]
    ) == {1}


@pytest.mark.slow
def test_what_a_record_is_of_is_in_its_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("value_aware_attention.probe.loaded", lambda *_: ("", ""))
    monkeypatch.setattr("pipelines.caches.prompts", lambda *_: [])
    monkeypatch.setattr("value_aware_attention.records.terminal.cache_table", lambda _: [])
    monkeypatch.setattr(
        "value_aware_attention.measurement.caches.measure_prompts",
        lambda *_, **named: CacheRecord(
            model="tiny",
            task="running_text",
            text=named["text"],
            description=named["description"],
            prefix=32,
            run_on=run_on(),
            cells=(),
        ),
    )
    monkeypatch.setattr("value_aware_attention.measurement.windows.adds_bos", lambda _: False)
    card = "caches pretrained.weights=package:tiny_decoder/tiny.gguf pretrained.name=tiny"
    text, more = f"text={site}/text.txt", ("poems.md", "a/poems.md", "docstrings.txt")
    for name in more:
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(name)
    commands = [
        "", "caches.skip=0", "keep=[0.5,0.25]", "prompts=4 seed=3", "length=32",
        "pretrained.name=other", "caches.compared.practical.mine={card:random,observed:last}",
        text, f"{text} text_name=mine", *(f"text={site}/{name}" for name in more[:2]),
    ]  # fmt: skip
    for given in commands:
        run_app(f"{card} {given}".replace("caches.compared", "+caches.compared"), site)
    folder = site / "outputs/smoke/records/caches"
    names = {file.stem.removeprefix("tiny-practical-running_text-") for file in folder.iterdir()}
    assert len(names) == len(commands)
    docstrings = {"docstrings-512", "docstrings-32"}
    assert docstrings | {"docstrings-512-seed_3-prompts_4", "mine-512"} <= names
    assert {"docstrings-512-keep_0.5+0.25", "docstrings-512-skip_0"} <= names
    written = [json.loads(file.read_text()) for file in folder.iterdir()]
    named = {(record["text"], record["description"]) for record in written}
    assert all((text == "docstrings") == ("docstrings" in given) for text, given in named)
    assert {given for text, given in named if text == "mine"} == {"mine, a text of the user"}
    for given in (
        f"{text} text_name=Docstrings-512", f"text={site}/docstrings.txt", "description=mine",
    ):  # fmt: skip
        assert "docstrings is the name of the default text" in refusal(f"{card} {given}", site)
    assert len([*folder.iterdir()]) == len(commands)


def test_a_model_of_the_user_is_measured_with_its_layers_and_decoding(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model={site}/site/tiny_decoder/tiny.gguf"
    assert "give a text for it, caches.text=<file>" in refusal(f"caches {model}", site)
    options = ["group=joint", "gaps=true", "decoding=true", "prompts=1"]
    run_app(command(site, model, *options), site)
    (file,) = (site / "outputs/smoke/records/caches").glob("tiny.gguf-joint-*.json")
    record = CacheRecord.from_json(file.read_text())
    assert "\n".join(cache_table(record)) in capsys.readouterr().out
    full, *cells = record.cells
    assert full.agreed == (1.0,) and all(0 <= cell.agreed[0] <= 1 for cell in cells)
    assert all(cell.error is not None and cell.seconds[0] > 0 for cell in cells)
    assert {gap.cache for gap in record.gaps} == {cell.cache for cell in cells if not cell.pool}


def evaluation(site: Path, *more: str) -> str:
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
    run_app(evaluation(site), site)
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
    run_app(evaluation(site), site)
    assert Record.from_json(file.read_text()) == record
    assert cached == {path: path.stat().st_mtime_ns for path in (site / ".cache").rglob("*.json")}
    check_exhibits(record, folder.parent, site / "published")


@pytest.mark.slow
def test_windows_begin_with_bos_where_the_tokenizer_adds_it(site: Path) -> None:
    keys = {"tokenizer.ggml.add_bos_token": True}
    write_gguf(llama(), site / "site/tiny_decoder/tiny.gguf", keys=keys)
    (site / "text.txt").write_text("the thing " * 13)
    refused = refusal(evaluation(site), site)  # 32 tokens for 31 of the text
    assert "the text fills 3 windows of 32 tokens; 4 are needed" in refused
    (site / "text.txt").write_text(40 * "the thing that they thought of then was with them ")
    run_app(evaluation(site), site)
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
    assert {"few_keys", "predictions", "gap_closed", "pretrained_cells"} <= names
    few = pretrained.few_keys(records)
    exact, aware = record.cells[0], pretrained.find(record, ("optimal_v_aware", {"r": 4}))
    assert few is not None and few.table is not None and aware is not None
    row = few.table.data.set_index("name").loc["chosen for the output (OVA)"]
    assert row["value"] == pytest.approx(aware.value / exact.value)
    assert f"{aware.value / exact.value:.2f}" in few.title
    data = pretrained.gap_closed(records).table.data.set_index("rule")["value"]
    between = pretrained.find(record, pretrained.CORRECTIONS["OVO's keys, best weights"])
    worst = pretrained.find(record, ("optimal_v_oblivious", {"r": 4}))
    cells = [replace(worst, approximation=aware.approximation) if c == aware else c
             for c in record.cells]  # fmt: skip
    others = replace(record, model="another", cells=tuple(cells))
    several = pretrained.few_keys([others, record]).title
    ends = (f"× {cell.value / exact.value:.2f}" for cell in (aware, worst))
    assert several.startswith("2 decoders with 4 keys") and " to ".join(ends) in several
    assert few.title.startswith("tiny with 4 keys")
    unnamed = replace(record, text=replace(record.text, description=""))
    assert pretrained.label(unnamed) == f"{record.model}, {record.length} tokens"
    shares = [sum(cell.unit_totals) for cell in (worst, between, aware)]
    expected = 100 * (shares[0] - shares[1]) / (shares[0] - shares[2])
    assert data["OVO's keys, best weights"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("asked", "change", "named"),
    [
        (command, "", "keep 0.5 of 32 tokens: r is 16; it counts"),
        (command, "group=other", "group is other; it must be one of practical, long, "),
        (command, "group=joint prompts=90", "prompts of 38 tokens; 90 after the first 1 are asked"),
        (evaluation, "pretrained.weights=other.gguf", "other.gguf: no such file"),
        (evaluation, "extent.length=65", "length is 65; the model has 64 positions"),
        (evaluation, "text={site}/short.txt extent.length=64", "fills 1 windows of 64 tokens; 4 "),
        (evaluation, "text_name=a/b", "cannot name a file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    site: Path, asked: Callable[..., str], change: str, named: str
) -> None:
    (site / "short.txt").write_text("the thing " * 12)
    assert named in refusal(asked(site, change.format(site=site)), site)
    assert not (site / "outputs/smoke/records").exists()


VOCABULARY = [
    *("the", "key", "of", "a", "query", "and"),
    *("its", "value", "are", "weighed", "by", "attention"),
]
POSITIONS = 12


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs a package with a tiny encoder, which must be found without an import."""
    folder = tmp_path / "site/tiny_encoder"
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 17}
    model = BertModel(BertConfig(**size, intermediate_size=16, max_position_embeddings=POSITIONS))
    for weight in model.parameters():
        weight.data *= 8 if weight.ndim > 1 else 1  # random attention would be uniform
    model.save_pretrained(folder / "model")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *VOCABULARY]))
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder / "model")
    (folder / "__init__.py").write_text("raise ImportError('it is found, not imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, start in enumerate(("a query", "too short", "the value", "its key", "of a key")):
        words = [start] if number == 1 else [start, *(3 * VOCABULARY)]
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


def probing(texts: Path, *more: str) -> str:
    corpus = f"{{_target_:value_aware_study.data.text.TextFiles,path:{texts}}}"
    options = [
        "pretrained.weights=package:tiny_encoder/model", "~pretrained.texts.networkx",
        f"+pretrained.texts.local={corpus}", "~pretrained.texts.pandas",
        "probe.windows=3", f"probe.length={POSITIONS}", "probe.rows=4", "pretrained.model=tiny",
        "pretrained.description=made_up",
    ]  # fmt: skip
    return " ".join(["probe", "pretrained=minilm", *options, *more])


@pytest.mark.slow
def test_the_app_writes_a_record_and_its_figures(
    package: Path, texts: Path, tmp_path: Path
) -> None:
    target = "{_target_:value_aware_attention.kernels."
    kernels = f"probe.kernels=[{target}Polynomial,degree:2}},{target}Elu}}]"
    run_app(probing(texts, "probe.between=true", "probe.skewness_gap=true", kernels), tmp_path)
    folder = tmp_path / "outputs/smoke/records/probe/tiny"
    text = (folder / "record.json").read_text()
    record = Record.from_json(text)
    assert {"model_output_error.png", "index.html"} <= {path.name for path in folder.iterdir()}
    assert str(tmp_path) not in text
    assert (record.model, record.metric, record.text.description) == ("tiny", "cosine", "made_up")
    assert [(a.kernel, a.post_hoc) for a in record.attention] == [
        ("exponential", False), ("polynomial", True), ("elu", True),
    ]  # fmt: skip
    for attention in record.attention:
        curves = attention.output_error
        assert (curves.layers, curves.heads, curves.head_dim, curves.units) == (2, 2, 8, 3)
        assert curves.keys == POSITIONS and curves.rows == 4 * 2 * 3 and len(curves.methods) == 10
        assert (attention.skewness_gap is not None) == (attention.kernel == "exponential")
    degrees = [cell.degree for cell in record.attention[0].skewness_gap.cells]
    assert degrees == 2 * [None, 0, 2, 4, 6]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("pretrained.weights=package:no_such/a", "no such package, or no such path in it"),
        ("pretrained.weights=./elsewhere", "./elsewhere: no such folder"),
        ("probe.length=13", "the model has 12 positions"),
        ("probe.search=quick", "fast, default, best"),
        ("model=tiny", "probe.model is tiny, pretrained minilm; give one of them"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    package: Path, texts: Path, tmp_path: Path, change: str, named: str
) -> None:
    assert named in refusal(probing(texts, change), tmp_path)
    assert not (tmp_path / "outputs/smoke/records/probe").exists()
