"""The probe measures tiny models, as an API and as an app on folders and files."""

import gzip
import json
import math
import re
import shutil
import subprocess
import sys
import zlib
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from markupsafe import escape
from probed import LENGTH, MODELS, SMALL, VOCABULARY, model, tokenizer, words
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    DebertaV2Config,
    DebertaV2Model,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTModel,
)

from pipelines.app import file_hash
from tests.apps import refusal, run_app
from tests.models.gguf_files import llama, write_gguf
from tests.refusals import assert_refused
from value_aware_attention import kernels, probe
from value_aware_attention.measurement import Record
from value_aware_attention.measurement.measure import measure_own
from value_aware_attention.measurement.task import Task, Text, UnitSums
from value_aware_attention.models import CausalLanguageModel
from value_aware_attention.models.checkpoints import checkpoint_files
from value_aware_attention.models.masked_lm import attend_with, save_masked
from value_aware_attention.models.trained_attention import TrainedAttention
from value_aware_attention.probe import __main__ as command
from value_aware_attention.probe import demo, measuring
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.headline import headline
from value_aware_attention.records.terminal import cache_table, side_by_side, tables
from value_aware_study.explain import explain
from value_aware_study.report.contents import write_probe
from value_aware_study.report.page import OURS

# Warnings of libraries that tests of our own code cannot mend.
pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = words(14 * 6 + 3)
QUICK = {"windows": 2, "length": LENGTH, "rows": 4, "search": "fast", "control": False}
FEW = {**QUICK, "sizes": [1, 4]}
BRIEF = [
    *("--windows", "2", "--rows", "4", "--search", "fast", "--sizes", "1", "4", "--no-control")
]


def probed(name: str = "bert", **options: object) -> probe.Report:
    return probe.probe(model(name), tokenizer(), TEXT, **{**QUICK, "name": name, **options})


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_is_measured_end_to_end(name: str) -> None:
    report = probed(name)
    record, measured = report.record, report.record.attention[0].output_error
    causal = name in ("gpt2", "llama", "our_causal")
    head_dim, heads = (4, 4) if name == "llama" else (8, 2)
    sizes = [1, 2, 4, 5] if name == "llama" else [1, 2, 4, 8, 9]
    assert (measured.layers, measured.heads, measured.head_dim) == (2, heads, head_dim)
    assert measured.causal == causal
    exact, *cells = record.cells
    assert exact.difference == 0 and len(cells) == 5 * len(sizes) + 2
    assert sorted({cell.parameters["r"] for cell in cells[:-2]}) == sizes
    zero, mean = cells[-2:]
    assert (zero.approximation, mean.approximation) == ("zero_output", "mean_of_the_values")
    slots = {c.parameters["r"]: c for c in cells if c.approximation == "mean_value_slot"}
    assert slots[1].unit_totals == mean.unit_totals and slots[1].error == mean.error
    assert zero.error.relative == pytest.approx(1)
    windows = {c.approximation for c in cells if "window" in c.approximation}
    assert windows == {"first_tokens_and_window" if causal else "sliding_window"}
    full = next(
        c for c in cells
        if (c.approximation, c.parameters) == ("optimal_v_aware", {"r": head_dim + 1})
    )  # fmt: skip
    assert full.value == pytest.approx(exact.value, rel=1e-3)
    aware, oblivious = (
        [row.error for row in measured.errors if (row.method, row.layer) == (method, None)]
        for method in ("optimal_v_aware", "optimal_v_oblivious")
    )
    assert aware[-1] < 1e-9 and all(a <= o + 1e-9 for a, o in zip(aware, oblivious, strict=True))
    architecture = type(model(name)).__name__
    assert report.headline.startswith(f"On {name} ({architecture}) at 16 tokens, ")
    assert "Too few windows (2)" in report.headline
    assert "4 value-aware keys match" in report.headline
    assert Record.from_json(record.to_json()) == record


def test_a_stopped_probe_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = probed("roberta").record, Task.run
    windows: list[int] = []

    def stopped(task: Task, method: object, window: int) -> UnitSums:
        windows.append(window)
        if len(windows) == 10:
            raise KeyboardInterrupt
        return run(task, method, window)

    monkeypatch.setattr(Task, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        probed("roberta", cache=tmp_path)
    measuring = import_module("value_aware_attention.measurement.measure")
    monkeypatch.setattr(measuring, "layer_errors", lambda *_, **__: pytest.fail("measured again"))
    assert probed("roberta", cache=tmp_path).record == whole
    assert len(windows) - 1 == 2 * (1 + 5 * 5 + 1 + 3 * 4)  # the mean is r = 1
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Probes once; returns the folder of the numbers."""
    folder = tmp_path_factory.mktemp("cache")
    probed(cache=folder, sizes=[1, 4])
    return folder


@pytest.mark.parametrize(
    "change", [{"search": "default"}, {"rows": 5}, {"kernel": kernels.Elu()}, {"length": 12}]
)
def test_the_cache_knows_what_a_number_depends_on(cached: Path, change: dict) -> None:
    options = {**FEW, **change}
    assert probed(cache=cached, **options).record == probed(**options).record


def test_a_report_prints_what_was_shown_and_counts_keys_of_a_measured_share() -> None:
    lines: list[str] = []
    report = probed(sizes=[1, 4], show=lines.append)
    assert "\n".join([*lines, "", report.headline]) == str(report)
    needed = report.keys_needed(0.05, layer=1)
    assert needed["optimal_v_aware"] <= needed["optimal_v_oblivious"] <= LENGTH
    assert needed != report.keys_needed(0.01, layer=1)
    assert report.keys_by_head(1 - 0.95) == report.keys_by_head(0.05) != report.keys_by_head(0.1)
    assert report.keys_needed(1 - 0.9) == report.keys_needed(0.1)
    for share in (0.02, 5, 0):
        line = f"share is {share}; it must be one of 0.01, 0.05"
        assert_refused(line, report.keys_by_head, share)
        assert_refused(line, report.keys_needed, share)
    window = "sliding_window"
    assert_refused(f"method is '{window}'; it must be", report.keys_by_head, 0.05, window)
    assert_refused("layer is 2; it must be None or one of 0, 1", report.keys_needed, 0.05, layer=2)


def probed_caches(**options: object) -> CacheRecord:
    given = {"windows": 2, "length": LENGTH, **options}
    return probe.probe_caches(model("bert"), tokenizer(), TEXT, **given)


@pytest.mark.parametrize(
    ("measure", "options", "named"),
    [
        (probed, {"length": 40}, "length is 40; the model has 16 positions"),
        (partial(probed, "roberta"), {"length": 17}, "length is 17; the model has 16 positions"),
        (probed, {"sizes": [1, 17]}, "sizes has 17; it must lie between 1 and the length, 16"),
        (probed, {"sizes": [0]}, "sizes has 0"),
        (probed, {"rows": 0}, "rows is 0"),
        (probed, {"search": "slow"}, "fast, default, best"),
        (probed, {"sizes": []}, "sizes is empty"),
        (probed, {"sizes": 4}, "sizes is 4; it must be a list of integers"),
        (probed, {"methods": {}}, "methods is empty"),
        (probed, {"length": 0}, "length is 0; it must be an integer >= 1"),
        (probed, {"length": 16.0}, "length is 16.0; it must be an integer"),
        (probed, {"windows": 2.5}, "windows is 2.5; it must be an integer"),
        (probed, {"seed": 2**64}, "seed is 18446744073709551616; it must be"),
        (probed_caches, {"parts": ()}, "parts is"),
        (probed_caches, {"parts": (8, 0)}, "parts is"),
        (probed_caches, {"rows": 0}, "rows is 0"),
        (probed_caches, {"methods": {}}, "methods is empty"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    measure: Callable[..., object], options: dict, named: str
) -> None:
    assert_refused(named, measure, **options)


@pytest.mark.parametrize("count", [99, 100, 1000])
def test_blanks_before_a_text_change_no_window(count: int) -> None:
    options = {"windows": 2, "length": LENGTH, "kernel": None, "seed": 0, "draw": False}
    _, plain = probe.window_task(model("bert"), tokenizer(), TEXT, **options)
    for text in (" " * count + TEXT, ["", "\n" * count + TEXT]):
        _, read = probe.window_task(model("bert"), tokenizer(), text, **options)
        assert read.tokens.equal(plain.tokens) and read.special_tokens == plain.special_tokens > 0


def test_of_a_model_with_a_head_for_labels_the_encoder_is_measured() -> None:
    made = BertForSequenceClassification(BertConfig(**SMALL)).eval()
    whole, encoder = (
        probe.probe(network, tokenizer(), TEXT, **FEW, name="bert").record
        for network in (made, made.bert)
    )
    assert whole.cells == encoder.cells and whole.metric == "cosine"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "name", ["roberta", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "bert"))]
)
def test_one_window_has_no_intervals_and_a_page(name: str, tmp_path: Path) -> None:
    report = probed(name, windows=1, control=True, sizes=[1, 4])
    assert report.record.control and report.record.cells[0].low is None
    write_probe(report.record, tmp_path / "page")
    page = (tmp_path / "page/model_control.csv").read_text()
    assert "random_keys" in page and (tmp_path / "page/index.html").exists()


def with_other_mask() -> PreTrainedTokenizerFast:
    larger = tokenizer()
    larger.add_special_tokens({"mask_token": "[NEW]"})
    return larger


def deberta() -> DebertaV2Model:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DebertaV2Config(**small, intermediate_size=16, vocab_size=VOCABULARY)
    return DebertaV2Model(config)


def of_few_tokens() -> CausalLanguageModel:
    return CausalLanguageModel(
        vocabulary_size=20, layers=1, width=8, heads=1, feedforward=8, kernel=kernels.Elu(),
        dropout=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (lambda: "bert", "model is a str"),
        (lambda: BertModel, "model is a type"),
        (lambda: torch.nn.Linear(2, 2), "model is a Linear"),
        (lambda: ViTModel(ViTConfig(**SMALL, image_size=4, patch_size=2)), "ViTModel reads no"),
        (
            lambda: CLIPModel(CLIPConfig(text_config=SMALL, vision_config=SMALL)),
            "CLIPModel reads no",
        ),
        (lambda: model("bert").half(), "float16 on a CPU"),
        (deberta, "DebertaV2Model has no attention"),
        (of_few_tokens, "the model knows 20: it is another model's"),
    ],
)
def test_models_that_cannot_be_measured_are_refused(made: Callable, line: str) -> None:
    for call in (partial(probe.probe, **QUICK), partial(probe.probe_caches, length=LENGTH)):
        assert_refused(line, call, made(), tokenizer(), TEXT)


def test_a_causal_model_needs_two_tokens() -> None:
    bare = tokenizer(closes=False)
    assert_refused(
        r"length is 1; a causal model .* at least 2",
        probe.probe,
        model("gpt2"),
        bare,
        TEXT,
        **{**QUICK, "length": 1},
    )
    assert probe.probe(model("gpt2"), bare, TEXT, **{**FEW, "length": 2, "sizes": [1]}).record


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_whose_scores_overflow_is_named(layer: int) -> None:
    made = model("llama")
    attention = made.model.layers[layer].self_attn
    attention.q_proj.weight.data *= 1e25
    attention.k_proj.weight.data *= 1e25
    for call in (partial(probe.probe, **QUICK), partial(probe.probe_caches, length=96)):
        assert_refused(
            f"not a number from layer {layer} on: scores", call, made, tokenizer(), words(200)
        )


def silenced(layers: range, rows: slice) -> BertModel:
    """Builds a model whose values are 0 in these rows and layers, as in pruned heads."""
    made = model("bert")
    for layer in layers:
        value = made.encoder.layer[layer].attention.self.value
        value.weight.data[rows], value.bias.data[rows] = 0, 0
    return made


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_first_layer_whose_values_are_0_is_measured() -> None:
    report = probe.probe(silenced(range(1), slice(None)), tokenizer(), TEXT, **FEW)
    errors = [cell.error for cell in report.record.cells]
    assert {error.by_layer[0] for error in errors} == {None} and errors[-1].by_layer[1] > 0
    assert [error.largest_error is not None for error in errors] == [
        cell.approximation in ("optimal_v_aware", "optimal_v_aware_mean")
        for cell in report.record.cells
    ]
    assert Record.from_json(report.record.to_json()) == report.record and "none" in str(report)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_a_perplexity_that_no_float_holds_is_told_as_the_largest(size: float) -> None:
    made = model("llama")
    made.lm_head.weight.data *= size
    report = probe.probe(made, tokenizer(), TEXT, **FEW)
    exact = report.record.cells[0]
    assert exact.value == exact.low == exact.high == math.exp(700) and exact.difference == 0
    assert Record.from_json(report.record.to_json()) == report.record
    assert "1e+304 is no better than chance" in report.headline and "1e+304" in str(report)


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (partial(probe.probe, **FEW), {"sizes": [99]}),
        (partial(probe.probe_caches, windows=1, length=LENGTH), {"methods": {"none": str}}),
    ],
)
def test_a_model_is_given_back_in_the_mode_that_it_came_in(call: Callable, wrong: dict) -> None:
    made = model("bert").train()
    made.encoder.layer[0].eval()
    modes = [module.training for module in made.modules()]
    call(made, tokenizer(), TEXT)
    assert [module.training for module in made.modules()] == modes
    with pytest.raises((ValueError, AttributeError)):
        call(made, tokenizer(), TEXT, **wrong)
    assert [module.training for module in made.modules()] == modes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "none"), [(slice(8), {(1, 0)}), (slice(None), {(1, None), (1, 0), (1, 1)})]
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_head_or_a_layer_whose_values_are_0_has_no_relative_error(
    tmp_path: Path, rows: slice, none: set
) -> None:
    options = {**FEW, "between": True, "skewness_gap": True}
    for windows in (1, 2):
        report = probe.probe(
            silenced(range(1, 2), rows), tokenizer(), TEXT, **{**options, "windows": windows}
        )
        measured = report.record.attention[0].output_error
        assert {(row.layer, row.head) for row in measured.errors if row.error is None} == none
        assert {(row.layer, row.head) for row in measured.keys_needed if row.keys is None} == none
    assert Record.from_json(report.record.to_json()) == report.record
    assert (report.keys_needed(layer=1)["optimal_v_aware"] is None) == ((1, None) in none)
    assert ("none" in str(report)) == ((1, None) in none) and "match" in report.headline
    caches = probe.probe_caches(
        silenced(range(1, 2), rows), tokenizer(), TEXT, windows=2, length=16
    )
    write_probe(report.record, tmp_path, caches)
    assert "| none" in (tmp_path / "model_keys_by_head.md").read_text()


@pytest.mark.parametrize(
    ("network", "made", "text", "line"),
    [
        (partial(model, "roberta"), tokenizer, None, "text is None; give a string, or several"),
        (partial(model, "roberta"), tokenizer, Path("a.txt"), "text is of type PosixPath; give a"),
        (partial(model, "roberta"), tokenizer, ["a", 2], "text holds one 2; give strings"),
        (partial(model, "roberta"), tokenizer, "unheard " * 100, "no token of the text can be hid"),
        (partial(model, "roberta"), with_other_mask, TEXT, r"gives token \d+, the model knows \d+"),
        (partial(model, "roberta"), lambda: None, TEXT, "tokenizer is a NoneType"),
        (
            partial(silenced, range(2), slice(None)),
            tokenizer,
            TEXT,
            "every layer's attention gives 0",
        ),
    ],
)
def test_models_and_texts_that_do_not_go_together_are_refused(
    network: Callable, made: Callable, text: object, line: str
) -> None:
    assert_refused(line, probe.probe, network(), made(), text, **QUICK)


# The app.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves checkpoints, with and without a tokenizer, and texts."""
    made = tmp_path_factory.mktemp("probe")
    for name in ("roberta", "gpt2", "llama", "bert"):
        model(name).save_pretrained(made / name)
        tokenizer().save_pretrained(made / name)
    torch.manual_seed(0)
    CausalLanguageModel(
        vocabulary_size=VOCABULARY, layers=2, width=16, heads=2, feedforward=16,
        kernel=kernels.Elu(), dropout=0.0,
    ).save_pretrained(made / "our_causal")  # fmt: skip
    save_masked(model("our_masked"), made / "our_masked")
    model("bert").save_pretrained(made / "bare")
    (made / "text.txt").write_text(TEXT)
    (made / "short.txt").write_text("w1 w2 w3")
    (made / "texts").mkdir()
    (made / "texts/test.jsonl").write_text("".join(f'{{"text": "{TEXT}"}}\n' for _ in range(2)))
    (made / "empty.txt").write_text(" \n")
    (made / "zero.txt").write_text("w1", "utf-16-le")
    (made / "wide.json").write_text("{}", "utf-16")
    text = Text.of_tokens(torch.arange(3, 3 + LENGTH)[None])
    unlayered = measure_own(Task(model("gpt2"), [text], "perplexity"), name="own")
    (made / "own.json").write_text(unlayered.to_json())
    return made


def small(folder: Path, command: str) -> str:
    """Names the files of the folder, and a probe that is as small as can be."""
    given = {"control": "false", "windows": 2, "rows": 4, "search": "fast", "length": LENGTH}
    fewer = (f"probe.{name}={value}" for name, value in given.items() if f"{name}=" not in command)
    return " ".join(["probe", re.sub(r"{([\w.]+)}", rf"{folder}/\1", command), *fewer])


def run(folder: Path, command: str, root: Path) -> None:
    run_app(small(folder, command), root)


def written(root: Path, name: str) -> tuple[str, Record]:
    """Reads the page and the record of a probe."""
    folder = root / "outputs/smoke/records/probe" / name
    return (folder / "index.html").read_text(), Record.from_json(
        (folder / "record.json").read_text()
    )


def test_the_app_writes_a_page_with_everything_it_names(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "probe.control=true caches=true probe.sizes=[1,4]"
    run(folder, f"model={{roberta}} text={{text.txt}} {options}", tmp_path)
    page, record = written(tmp_path, "roberta")
    folder = tmp_path / "outputs/smoke/records/probe/roberta"
    printed = capsys.readouterr().out
    assert headline(record) in printed and str(folder / "index.html") in printed
    assert record.run_on.versions and str(tmp_path) not in record.to_json()
    assert not list(tmp_path.rglob("*.partial"))
    names = ("model_error_by_head.png", "model_keys_by_head.png", "model_layers.csv", "heads.csv")
    assert all((folder / name).stat().st_size for name in names)
    assert str(escape(headline(record))) in page and 'id="model_control"' in page
    compressed = CacheRecord.from_json((folder / "caches.json").read_text())
    assert "\n".join(cache_table(compressed)) in printed
    assert {cell.cache for cell in compressed.cells[1:]} == set(probe.default_cache_methods())
    assert {cell.r for cell in compressed.cells[1:]} == {2, 4} and compressed.prefix is None


def test_a_causal_model_is_judged_after_half_of_each_window() -> None:
    record = probe.probe_caches(
        model("llama"), tokenizer(), words(200), windows=3, length=32, rows=8, parts=(2,)
    )
    full, *cells = record.cells
    assert (record.prefix, record.length, len(full.kl)) == (16, 32, 3)
    assert {(cell.r, cell.keep) for cell in cells} == {(8, 0.5)}
    assert {gap.cache for gap in record.gaps} == {"SnapKV"}
    queries = {(cell.observed, cell.rows) for cell in cells}
    assert queries == {("last", 8), ("noncausal", 8), ("repeat", 8), ("hindsight", 8)}
    (shared,) = (cell for cell in record.cells if cell.pool)
    keys = torch.tensor(shared.keys)
    assert (shared.cache, shared.observed) == ("value-aware", "repeat")
    assert keys.shape == (2, 2)
    assert keys.mean().item() == pytest.approx(8)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "our_causal", "gpt2", "llama", "our_masked"])
def test_the_app_reads_every_kind_of_checkpoint(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer_of = " tokenizer={gpt2}" if name.startswith("our") else ""
    run(folder, f"model={{{name}}} text={{text.txt}} probe.sizes=[1,9]{tokenizer_of}", tmp_path)
    _, record = written(tmp_path, name)
    metric = {"bert": "cosine", "our_masked": "error"}.get(name, "perplexity")
    assert record.metric == metric
    assert {cell.parameters.get("r") for cell in record.cells[1:]} == {1, 9, None}
    assert record.kernel == ("elu" if name == "our_causal" else "exponential")
    assert not record.attention[0].post_hoc and "warning" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("suffix", "texts"), [("", 2), (":test[:1]:text", 1)])
def test_a_text_may_be_a_data_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, texts: int
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run(folder, f'model={{bert}} text="hub:{{texts}}{suffix}" probe.sizes=[1]', tmp_path)
    _, record = written(tmp_path, "bert")
    assert record.text.tokens == texts * len(TEXT.split())


@pytest.mark.usefixtures("undrawn")
def test_another_kernel_is_warned_about(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "model={our_causal} tokenizer={gpt2} text={text.txt} probe.sizes=[1] kernel="
    run(folder, command + "polynomial probe.name=other", tmp_path)
    assert "warning: the model was trained with Elu(), not Polynomial" in capsys.readouterr().err
    page, _ = written(tmp_path, "other")
    assert "post hoc" in page and "polynomial kernel" in page
    assert_refused(
        "caches=true measures the model's own kernel",
        run,
        folder,
        command + "polynomial probe.name=other caches=true",
        tmp_path,
        error=SystemExit,
    )


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("model=no-such-org/no-such-model text={text.txt}", "no-such-model cannot be loaded"),
        ("model={bert} text=hub:", "text is hub:; a data set is hub:NAME[:SPLIT[:COLUMN]]"),
        ("model={bert} text=hub:{texts}:train", "texts"),
        ("model={bert} text=hub:{texts}:test:words", "no texts in 'words', only text"),
        ("model={bert} text={empty.txt}", "the text is empty"),
        ("text={text.txt}", "probe.model"),
        ("model=/ tokenizer={bert} text={text.txt}", "model is /; its folder has no name"),
        ("model={llama} text={text.txt} caches=true", "at least 96"),
        (
            "model={bert} text={text.txt} +probe.methods.own={_target_:torch.nn.Identity}",
            "torch.nn.Identity makes no approximation",
        ),
    ],
)
def test_bad_input_ends_with_one_line_and_nothing_written(
    folder: Path, tmp_path: Path, command: str, named: str
) -> None:
    assert named in refusal(small(folder, command), tmp_path)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_folder_is_of_one_checkpoint(folder: Path, tmp_path: Path) -> None:
    for name in ("bert", "roberta"):
        shutil.copytree(folder / name, tmp_path / name / "final")
    file = tmp_path / "outputs/smoke/records/probe/final/record.json"
    command = f"text={folder}/text.txt probe.sizes=[1] model={tmp_path}/"
    run(folder, f"{command}bert/final", tmp_path)
    first = file.read_bytes()
    message = refusal(small(folder, f"{command}roberta/final"), tmp_path)
    assert "final holds final of another checkpoint: give probe.name=<another name>" in message
    assert file.read_bytes() == first


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"architecture": "GPT2LMHeadModel"}, "of another checkpoint"),
        ({"model": "bart"}, "holds bart of another checkpoint"),
        (None, "record.json is damaged"),
    ],
)
def test_a_record_of_before_is_replaced_by_one_of_its_model_alone(
    folder: Path, tmp_path: Path, change: dict | None, named: str | None
) -> None:
    command = "model={bert} text={text.txt} probe.sizes=[1]"
    run(folder, command, tmp_path)
    file = tmp_path / "outputs/smoke/records/probe/bert/record.json"
    earlier = json.loads(file.read_text()) | {"hashes": {}} | (change or {})
    del earlier["content_sha256"]
    file.write_text("{" if change is None else json.dumps(earlier))
    if named is None:
        run(folder, command, tmp_path)
        assert Record.from_json(file.read_text()).hashes
    else:
        assert_refused(
            f"{named}.*give probe.name=", run, folder, command, tmp_path, error=SystemExit
        )


@pytest.mark.usefixtures("undrawn")
def test_a_model_of_the_hub_has_the_hash_of_its_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hub/models--org--bert"
    shutil.copytree(folder / "bert", cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    run(folder, "model=org/bert text={text.txt} probe.sizes=[1]", tmp_path)
    _, record = written(tmp_path, "bert")
    assert record.hashes["checkpoint"] == file_hash(checkpoint_files(str(folder / "bert")))


def test_a_model_trained_with_an_approximation_is_refused(folder: Path, tmp_path: Path) -> None:
    attention = TrainedAttention("value_aware_attention.approximations.SlidingWindow", {"r": 4})
    save_masked(attend_with(model("our_masked"), attention), folder / "windowed")
    assert_refused(
        "was trained with SlidingWindow",
        run,
        folder,
        "model={windowed} tokenizer={bert} text={text.txt}",
        tmp_path,
        error=SystemExit,
    )


STUDY = ("altair", "datasets", "dvc", "hydra", "omegaconf", "pandas", "wandb", "value_aware_study")


def probe_command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["value-aware probe", *map(str, arguments)])
    command.main()


def value_aware(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["value-aware", *map(str, arguments)])
    command.value_aware()


def test_it_prints_the_report_and_writes_the_record(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    records = []
    for name, more in (("bert", ["--caches"]), ("gpt2", [])):
        file = tmp_path / f"{name}.json"
        options = ["--text", folder / "text.txt", "--length", LENGTH, "--json", file]
        probe_command(monkeypatch, folder / name, *options, *BRIEF, *more)
        records.append(Record.from_json(file.read_text()))
        printed = capsys.readouterr().out
        compressed = "a cache that keeps r of 16 keys for all later queries: 1 - cosine"
        caches = {line.split("  ")[0] for line in printed.splitlines()}
        named = {"SnapKV", "DropKV", "value-aware", "value-aware, refitted"}
        assert (compressed in printed) == (named <= caches) == bool(more)
        assert "\n".join(tables(records[-1])) in printed and headline(records[-1]) in printed
        assert printed.startswith(f"{name}\n") and records[-1].model == name
    probe_command(monkeypatch, *(tmp_path / f"{record.model}.json" for record in records))
    printed = capsys.readouterr().out
    assert printed.strip("\n") == "\n".join(side_by_side(records))
    probe_command(monkeypatch, tmp_path / "bert.json")
    assert capsys.readouterr().out.strip("\n") == "\n".join(side_by_side(records[:1]))
    for cell in records[1].budgets:
        if (cell.approximation, cell.parameters["each"]) == ("optimal_v_oblivious", "own"):
            row = f"perplexity with these, {cell.parameters['share']:.0%}"
            [line] = (line for line in printed.splitlines() if line.startswith(row))
            assert f"{cell.value:,.2f}" in line
    assert "not alike: metric is cosine and perplexity" in printed
    named = [replace(record, model=f"{'a' * 40}-{record.model}") for record in records]
    header, *rows = side_by_side(named)
    assert header.split() == [record.model for record in named]
    assert len({len(row) for row in (header, *rows[:-2])}) == 1
    [row] = (line for line in printed.splitlines() if line.startswith("layers, heads, head size"))
    assert row.split()[-6:] == ["2,", "2,", "8", "2,", "2,", "8"]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_explain_writes_one_page_of_the_whole_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file, sentence = tmp_path / "page.html", " ".join(["W1. w2", *words(10).split(), "other."])
    for _ in range(2):  # the page of an earlier run is replaced
        value_aware(monkeypatch, "explain", folder / name, sentence, "--output", file)
    assert capsys.readouterr().out == f"{file}\n" * 2
    page = file.read_text()
    assert OURS in page and page.count(f"“{sentence}”") >= 2 and "PNG" not in page
    (data,) = re.findall(r'id="explorer-data">([^<]*)<', page)
    content = json.loads(zlib.decompress(b64decode(data)))["exploration"]
    (shown,) = json.loads(content)["models"]
    ends = ["<s>", "</s>"] if name == "bert" else ["<s>"]
    assert shown["name"] == name and len(shown["tokens"]) == len(sentence.split()) + len(ends)
    assert "".join(shown["tokens"]).split() == [*ends[:1], *sentence.split(), *ends[1:]]
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a model of 48 positions, whose tokenizer drops what takes no room."""
    folder, tokens = tmp_path_factory.mktemp("masked"), tokenizer()
    tokens.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokens.save_pretrained(folder)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(BertConfig(**sizes, vocab_size=len(tokens))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "sentence",
    [
        "w1 <mask> w2.",
        "w1 </s> w2 <s> .",
        f"W1 {words(40)}. W2 w3.",  # the first sentence could be a passage alone
        "w1. w2! w3? w4",
        words(46),
    ],
)
def test_explain_shows_any_text_whole(masked: Path, tmp_path: Path, sentence: str) -> None:
    page = tmp_path / "page.html"
    explain(str(masked), sentence, page)
    (data,) = re.findall(r'id="explorer-data">([^<]*)<', page.read_text())
    (shown,) = json.loads(json.loads(zlib.decompress(b64decode(data)))["exploration"])["models"]
    written = "".join("".join(shown["tokens"]).split())
    assert written == "".join(f"<s>{sentence}</s>".split())


@pytest.mark.parametrize(("sentence", "count"), [("\u200b", 0), (words(47), 47)])
def test_explain_tells_the_tokens_of_a_text_that_is_none_or_too_long(
    masked: Path, tmp_path: Path, sentence: str, count: int
) -> None:
    line = f"^the text has {count} tokens; .* take 1 to 46, beside"
    assert_refused(line, explain, str(masked), sentence, tmp_path / "page.html")


def test_explain_shows_a_character_of_several_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = {x: n for n, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_bytes = Tokenizer(models.BPE(letters, []))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=by_bytes).save_pretrained(tmp_path / "bytes")
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=1, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "bytes")
    page = tmp_path / "page.html"
    value_aware(monkeypatch, "explain", tmp_path / "bytes", "A key 😀.", "--output", page)
    assert "“A key 😀.”" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("/no/such/model w1", "/no/such/model: no such folder"),
        ("{bert} _", "the sentence is empty"),
        ("{bert} w1 --output {mine.html}", "mine.html; give a new file or an earlier page"),
        ("{bert} w1 --output {bert}", "bert; give a new file or an earlier page"),
        ("{bert} w1 --output {none/a.html}", "a.html; give a new file or an earlier page"),
        ("{bert} " + "w1_" * 15, "the text has 15 tokens; the page and the model take 1 to 14, "),
        ("{gpt2} " + "w1_" * 32, "the text has 32 tokens; the page and the model take 1 to 31, "),
        ("{bare} w1", "has no tokenizer"),
    ],
)
def test_explain_refuses_in_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, line: str
) -> None:
    (folder / "mine.html").write_text("mine")
    words = [folder / word[1:-1] if word.startswith("{") else word for word in arguments.split()]
    monkeypatch.chdir(tmp_path)
    words[1] = str(words[1]).replace("_", " ")
    line = f"^error: .*{re.escape(line)}"
    assert_refused(line, value_aware, monkeypatch, "explain", *words, error=SystemExit)
    assert not list(tmp_path.iterdir()) and (folder / "mine.html").read_text() == "mine"


def test_explain_names_what_a_wheel_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "value_aware_study.explain", None)
    line = r"error: .*in a checkout: pip install -e '\.\[study\]'"
    assert_refused(line, value_aware, monkeypatch, "explain", "model", "w1", error=SystemExit)


def test_a_file_of_llama_cpp_is_named_and_its_bos_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    text.write_text("the thing that they thought of then " * 20)
    lines = (": name tiny, licence not stated; 32.00 bits", "every window begins with BOS: a key")
    for bos in (True, False):
        write_gguf(llama(), file, keys={"tokenizer.ggml.add_bos_token": bos})
        options = ["--text", text, "--length", LENGTH, "--json", tmp_path / "record.json"]
        probe_command(monkeypatch, file, *options, *BRIEF)
        printed = capsys.readouterr().out
        assert [line in printed for line in lines] == [True, bos]
        content = json.loads((tmp_path / "record.json").read_text())
        assert ("begins_with_bos" in content["text"]) == bos and content["bits_a_weight"] == 32


def test_half_precision_is_read_as_another_dtype(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model("bert").half().save_pretrained(tmp_path / "half")
    tokenizer().save_pretrained(tmp_path / "half")
    arguments = [tmp_path / "half", "--text", folder / "text.txt", "--length", LENGTH, *BRIEF]
    line = "the model is float16 on a CPU"
    assert_refused(line, probe_command, monkeypatch, *arguments, error=SystemExit)
    probe_command(monkeypatch, *arguments, "--dtype", "float32")
    assert "On half (BertModel) at 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("{bert}", "--text is missing; "),
        ("{bert} {gpt2} --text {text.txt} --json a.json", "--json keeps the record of one model"),
        ("{no.json} --json a.json", "--json keeps the record of one model that is measured"),
        ("{bert} --text {no.txt}", "no.txt; "),
        ("{bert} --text {bert/model.safetensors}", "model.safetensors: unknown suffix, allowed"),
        ("{bert} --text {zero.txt}", "zero.txt is binary, not text"),
        ("{bert} --text {bert}", "left out: .json (3), .safetensors (1)"),
        ("{bert} --text {text.txt} --cache {text.txt}", "--cache is "),
        ("{bert} --text {text.txt} --cache /proc/x", "--cache is /proc/x; give a folder that"),
        ("{bert} --text {short.txt} --length 16", "the text has 3 tokens, a window of 16 needs 14"),
        (
            "{bare} --text {text.txt}",
            "has no tokenizer: give a folder that has one (option tokenizer)",
        ),
        ("{bert} --text {text.txt} --length 99", "length is 99; the model has 16 positions"),
        ("{no.json}", "No such file or directory"),
        ("{bert/config.json}", "schema version"),
        ("{bert} --text {text.txt} --length 0", "length is 0; it must be"),
        ("{bert} --text {text.txt} --rows 0", "rows is 0; it must be"),
        ("{bert} --text {text.txt} --caches --sizes 999", "sizes has 999"),
        ("{bert} --text {text.txt} --json {bert}", "give a file in a folder that is there"),
        ("{bert} --text {text.txt} --json {none/a.json}", "give a file in a folder that is there"),
        ("{bert} {no.json} --text {text.txt}", "No such file or directory"),
        ("{bert} {wide.json} --text {text.txt}", "wide.json is damaged"),
        ("{own.json}", "own.json has no measured layers; give the record of a probe"),
        ("/no/such/model --text {text.txt}", "/no/such/model: no such folder"),
    ],
)
def test_an_error_of_the_command_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, line: str
) -> None:
    words = [folder / word[1:-1] if word.startswith("{") else word for word in arguments.split()]
    for name in ("measure", "measure_caches"):
        monkeypatch.setattr(measuring, name, lambda *_, **__: pytest.fail("it measures"))
    line = f"^error: .*{re.escape(line)}"
    assert_refused(line, probe_command, monkeypatch, *words, error=SystemExit)


def test_it_reads_texts_as_the_apps_do(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.jsonl").write_text('{"text": "w1"}\n{"text": "w2"}\n')
    with gzip.open(texts / "b.tokens.gz", "wt") as file:
        file.write("w3 w4\r\n")
    (texts / "c.pdf").write_text("w5")
    options = command.parser("").parse_args(["bert", "--text", str(texts)])
    assert command.texts_of(options) == ["w1", "w2", "w3 w4"]
    assert capsys.readouterr().out == f"{texts}: text files read: 2; left out: .pdf (1)\n"


def test_help_and_mistyped_options_do_not_wait_for_torch() -> None:
    code = """
import sys
from value_aware_attention.probe.__main__ import value_aware
statuses = []
for options in sys.argv[1:]:
    sys.argv = ["value-aware", *options.split()]
    try:
        value_aware()
    except SystemExit as stop:
        statuses.append(stop.code)
print(statuses, {"torch", "altair"} & {*sys.modules})
"""
    helped = ["--help", "probe model --help", "explain --help", "demo --help"]
    mistyped = ["probe m --serch=fast", "probe m --search=fats", "explain m", "prob m"]
    command = [sys.executable, "-c", code, *helped, *mistyped]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[0, 0, 0, 0, 2, 2, 2, 2] set()"], done.stderr
    assert "prob is no command; did you mean probe?" in done.stderr
    assert all(name in done.stdout for name in ("GGUF", "smollm2", "gemma3", "qwen", "minilm"))


@pytest.mark.slow
def test_the_demo_has_a_row_for_each_way_with_its_control(capsys: pytest.CaptureFixture) -> None:
    demo.main([])
    *_, header, by_weight, slot, aware, with_mean, window = capsys.readouterr().out.splitlines()
    assert "kept for" in header and slot.endswith("and the mean")
    numbers = {
        row[:28].strip(): [float(number) for number in row[28:68].split()]
        for row in (by_weight, slot, aware, with_mean, window)
    }
    errors, cosines, random_errors, random_cosines = zip(*numbers.values(), strict=True)
    assert errors[3] < errors[2] < min(errors[0], errors[4]) and random_errors[2] < random_errors[0]
    assert cosines[2] > cosines[0] and min(random_cosines) > cosines[2]


@pytest.mark.slow
def test_it_needs_none_of_the_packages_of_the_study(folder: Path) -> None:
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in STUDY)
    run_it = "runpy.run_module('value_aware_attention.probe', run_name='__main__')"
    code = f"import sys, runpy; {hidden}; {run_it}"
    options = [
        str(folder / "bert"),
        "--text",
        str(folder / "text.txt"),
        "--length",
        "16",
        *BRIEF,
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bert\nkeys needed")
