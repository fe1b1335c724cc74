"""The stage measures caches of a packaged decoder: a tiny one, from a GGUF file in a package."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.apps import refusal, run_app
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.terminal import cache_table
from value_aware_study.report import records
from value_aware_study.report.contents import caches_section
from value_aware_study.report.exhibits import caches

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Named:
    """What a record is of."""

    text: str
    of: str
    begins_with_bos: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))


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
    assert len(exhibit.table.data) == len(record.cells) - 1
    assert exhibit.title.startswith("Running text, 32 tokens, ")
    assert set(
        exhibit.table.data.loc[exhibit.table.data["cache"] == caches.REFERENCE_CACHE, "ratio"]
    ) == {1}


def test_what_a_record_is_of_is_in_its_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("value_aware_attention.probe.loaded", lambda *_: ("", ""))
    monkeypatch.setattr("pipelines.caches.prompts", lambda *_: [])
    monkeypatch.setattr("value_aware_attention.records.terminal.cache_table", lambda _: [])
    monkeypatch.setattr(
        "value_aware_attention.measurement.caches.measure_prompts",
        lambda *_, text, description, **__: Named(text, description),
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
    assert all((one["text"] == "docstrings") == ("docstrings" in one["of"]) for one in written)
    assert {one["of"] for one in written if one["text"] == "mine"} == {"mine, a text of the user"}
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


def test_what_cannot_be_measured_is_named(site: Path) -> None:
    assert refusal(command(site, "group=other"), site).endswith(
        "caches.group is other; it must be one of practical, long, joint"
    )
    assert "keep 0.5 of 32 tokens: r is 16; it counts" in refusal(command(site), site)
    line = refusal(command(site, "group=joint", "prompts=90"), site)
    assert "prompts of 38 tokens; 90 after the first 1 are asked for: give a longer text" in line
    line = refusal(command(site, "group=joint", "kind=needles"), site)
    assert "the tokenizer has no chat template, by which questions are asked" in line
