"""Cache methods measured on tiny models agree with errors and losses computed by hand."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from tests.hugging_face.models import logits, sharp
from tests.refusals import assert_refused
from value_aware_attention import caches, hugging_face
from value_aware_attention.hugging_face.recording import recording
from value_aware_attention.measurement import Task, Text, gaps
from value_aware_attention.measurement.caches import (
    Build,
    CacheSetting,
    Prompt,
    _errors,
    cache_settings,
    measure_caches,
    measure_prompts,
)
from value_aware_attention.measurement.recorded import ExactRows
from value_aware_attention.measurement.store import RecordCache
from value_aware_attention.records.cache_record import CacheCell, CacheRecord
from value_aware_attention.records.estimate import ratio_of_sums

DOCS = Path(__file__).parents[2] / "docs"
PREFIX, LENGTH = 10, 18


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=11, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def task(model: LlamaForCausalLM) -> Task:
    tokens = torch.randint(11, (2, 3, LENGTH), generator=torch.Generator().manual_seed(1))
    texts = [Text.of_tokens(rows, seed) for seed, rows in enumerate(tokens)]
    return Task(model, texts, "perplexity")


@pytest.fixture(scope="module")
def record(task: Task) -> CacheRecord:
    methods = {
        "recent": caches.Recent,
        "observed_attention": caches.ObservedAttention,
        "value_aware": caches.ValueAware,
        "value_aware_best": lambda r: caches.ValueAware(r, search="best"),
    }
    settings = cache_settings(
        methods, sizes=[7, PREFIX], observed=["last", "repeat", "hindsight"],
        gaps_of=["observed_attention", "value_aware", "value_aware_best"], prefix=PREFIX, rows=8,
    )  # fmt: skip
    return measure_caches(task, settings, model_name="tiny", task_name="random")


def cell(record: CacheRecord, method: str, observed: str, r: int) -> CacheCell:
    (match,) = (
        candidate
        for candidate in record.cells
        if (candidate.cache, candidate.observed, candidate.r) == (method, observed, r)
    )
    return match


def test_a_record_is_read_back_as_it_was(record: CacheRecord) -> None:
    assert CacheRecord.from_json(record.to_json()) == record
    full, *cells = record.cells
    assert (full.cache, len(full.kl), len(cells[0].by_layer)) == ("full cache", 6, 2)
    assert [cell.observed for cell in cells if cell.cache == "recent"] == ["nothing"] * 2
    assert {(cell.keep, cell.pool) for cell in cells} == {(7 / PREFIX, ""), (1.0, "")}


@torch.no_grad()
def divergences(task: Task, after: caches.AfterPrefix) -> list[float]:
    """Computes the mean KL divergence of each text's later predictions from the exact ones."""
    kl = []
    for text in task.texts:
        exact = task.model(text.inputs).logits[:, PREFIX:].softmax(-1)
        with hugging_face.replace_attention(task.model, after):
            here = task.model(text.inputs).logits[:, PREFIX:].softmax(-1)
        kl += (exact * (exact / here).log()).sum(-1).mean(-1).tolist()
    return kl


def test_errors_and_end_metrics_are_those_computed_by_hand(
    record: CacheRecord, model: LlamaForCausalLM, task: Task
) -> None:
    after = caches.AfterPrefix(caches.ObservedAttention(7), prefix=PREFIX, rows=8)
    error, norm, kl = torch.zeros(2), torch.zeros(2), divergences(task, after)
    for text in task.texts:
        with torch.inference_mode(), recording(model, shares_keys=True) as calls:
            model(text.inputs)
        for layer, call in enumerate(calls):
            measured = ExactRows.served(call, torch.arange(PREFIX, LENGTH))
            error[layer] += measured.squared_error(measured.approximated(after)).sum()
            norm[layer] += measured.squared_norm().sum()
    measured_cell = cell(record, "observed_attention", "last", 7)
    assert measured_cell.error.value == pytest.approx(float((error / norm).mean()), rel=1e-5)
    assert measured_cell.ends["kl"].value == pytest.approx(sum(kl) / 6, rel=1e-4)
    assert measured_cell.kl == pytest.approx(kl, rel=1e-4)


def measured(task: Task, settings: list[CacheSetting]) -> CacheRecord:
    return measure_caches(task, settings, model_name="tiny", task_name="random")


@pytest.mark.parametrize("pool", ["layer", "model", "checked"])
def test_other_budgets_are_measured_as_the_model_serves_them(pool: str, task: Task) -> None:
    settings = cache_settings(
        {"value_aware": caches.ValueAware}, sizes=[8], observed=["continued"], prefix=PREFIX,
        rows=8, pools={"value_aware": {pool: ["continued"]}},
    )  # fmt: skip
    _, first, pooled = measured(task, settings).cells
    assert (first.pool, first.keys, pooled.pool) == ("", (), pool)
    assert np.mean(pooled.keys) == pytest.approx(8)
    assert pooled.kl == pytest.approx(divergences(task, settings[1].after), rel=1e-4)


def test_the_gaps_of_the_best_set_are_one(record: CacheRecord) -> None:
    pooled = {(g.cache, g.observed): g for g in record.gaps if g.r == 7 and g.layer is None}
    for name in ("value_aware", "value_aware_best"):
        for look in ("last", "repeat", "hindsight"):
            assert pooled[name, look].criterion.value == pytest.approx(1, abs=1e-6)
        assert pooled[name, "hindsight"].information.value == pytest.approx(1, abs=1e-6)
        assert pooled[name, "last"].information.value > 1.01
    scored = pooled["observed_attention", "hindsight"]
    assert scored.information.value == pytest.approx(1, abs=1e-6)
    assert scored.criterion.value >= 1 and scored.weights.value >= 1
    product = scored.criterion.value * scored.information.value
    hindsight = cell(record, "observed_attention", "hindsight", 7).error.value
    assert product == pytest.approx(
        hindsight / cell(record, "value_aware", "hindsight", 7).error.value, rel=1e-4
    )


def test_an_oracle_that_observes_fewer_queries_than_are_served_has_gaps_of_one(
    task: Task,
) -> None:
    settings = cache_settings(
        {"value_aware": caches.ValueAware}, sizes=[7], observed=["hindsight 3"],
        gaps_of=["value_aware"], prefix=PREFIX,
    )  # fmt: skip
    gap = measured(task, settings).gaps[0]
    assert (gap.rows, gap.layer) == (3, None)
    assert gap.information.value == pytest.approx(1, abs=1e-6)
    assert gap.sharing.value > 1


def test_references_are_searched_as_the_method_is(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Mock(wraps=caches.ValueAware)
    settings = cache_settings(
        {"every": lambda r: caches.ValueAware(r, search="exhaustive")}, sizes=[7],
        observed=["last"], gaps_of=["every"], prefix=PREFIX,
    )  # fmt: skip
    monkeypatch.setattr(gaps, "ValueAware", spy)
    monkeypatch.setattr(gaps, "alone_errors", lambda each, like: each.squared_norm())
    measured(task, settings)
    assert {call.kwargs["search"] for call in spy.mock_calls} == {"exhaustive"}


def test_settings_of_one_measurement_observe_different_numbers_of_rows(task: Task) -> None:
    def observing(*observed: str, rows: int, prefix: int = PREFIX) -> list[CacheSetting]:
        return cache_settings(
            {"value_aware": caches.ValueAware, "recent": caches.Recent}, sizes=[7],
            observed=observed, prefix=prefix, rows=rows,
        )  # fmt: skip

    _, *together = measured(task, observing("last 3", "last", "causal", rows=8)).cells
    looks = [(cell.observed, cell.rows) for cell in together]
    assert set(looks) == {("last", 3), ("last", 8), ("causal", 8), ("nothing", 0)}
    assert len({cell.error.value for cell in together}) == 4
    for (observed, rows), cell in zip(looks, together, strict=True):
        if rows:
            _, alone, _ = measured(task, observing(observed, rows=rows)).cells
            assert (alone.error, alone.kl) == (cell.error, cell.kl)
    longer = observing("last", rows=8, prefix=PREFIX + 1)
    assert_refused("differ in prefix", measured, task, [*longer, *observing("last", rows=8)])


def test_the_interval_of_an_error_is_that_of_a_ratio_of_sums_in_every_layer() -> None:
    random = np.random.default_rng(0)
    norm = random.gamma(4, size=(60, 2, 3)) * [[[1.0], [100.0]]]
    errors = norm * random.gamma(2, size=(60, 2, 1)) * 0.05
    single = _errors({"method": errors[:, :1], "norm": norm[:, :1]})["error"]
    sums = (x[:, 0].sum(axis=-1) for x in (errors, norm))
    closed = ratio_of_sums(*sums)
    assert (single.value, single.low, single.high) == pytest.approx(tuple(map(float, closed)))
    both = _errors({"method": errors, "norm": norm})["error"]
    e, n = (x.sum(axis=-1) for x in (errors, norm))
    drawn = random.integers(60, size=(4000, 60))
    resampled = (e[drawn].sum(axis=1) / n[drawn].sum(axis=1)).mean(axis=-1)
    assert both.value == pytest.approx((e.sum(axis=0) / n.sum(axis=0)).mean())
    assert (both.high - both.low) / 4 == pytest.approx(resampled.std(), rel=0.05)


def test_an_encoder_is_measured_on_queries_that_were_not_observed() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=11, initializer_range=0.5,
    )  # fmt: skip
    model = BertModel(config).eval()
    settings = cache_settings(
        {"value_aware": caches.ValueAware}, sizes=[4, 12], observed=["noncausal", "hindsight"],
        prefix=None, rows=8,
    )  # fmt: skip
    tokens = torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(0))
    task = Task(model, [Text(tokens, tokens)], "cosine")
    record = measured(task, settings)
    observed, hindsight = (
        cell(record, "value_aware", look, 4) for look in ("noncausal", "hindsight")
    )
    assert observed.error.value > hindsight.error.value > 0
    assert observed.ends["cosine_distance"].value > 0
    assert cell(record, "value_aware", "noncausal", 12).error.value == pytest.approx(0, abs=1e-10)
    after = settings[0].after
    with recording(model, shares_keys=True) as calls:
        model(tokens)
    inputs = after.observe(**calls[0].arguments(), layer=calls[0].layer)
    unseen = [row for row in range(12) if row not in inputs.positions.tolist()]
    exact = ExactRows.served(calls[0], torch.tensor(unseen))
    expected = exact.squared_error(exact.approximated(after)).sum() / exact.squared_norm().sum()
    assert observed.error.value == pytest.approx(expected.item(), rel=1e-5)
    last = cache_settings(
        {"value_aware": caches.ValueAware}, sizes=[4], observed=["last"], prefix=None, rows=8
    )
    assert_refused("^observed is 'last'; of an encoder it must be ", measured, task, last)


@pytest.mark.parametrize(("page", "printed"), [("caches", 0), ("your-cache-method", 6)])
def test_the_examples_of_pages_run(
    page: str, printed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / f"{page}.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    exec("\n".join(blocks), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == printed
    assert sum(line.startswith("yours") for line in lines) == printed // 3


PROMPTED, QUESTION, ANSWER = 24, 3, 4
CACHES: dict[str, Build] = {
    "last": lambda r, prefix: caches.AfterPrefix(caches.ObservedAttention(r), prefix=prefix),
    "all, one budget": lambda r, prefix: caches.AfterPrefix(
        caches.LeaveOneOut(r), prefix=prefix, observed="continued", pool="model"
    ),
    "repeat": lambda r, prefix: caches.AfterPrefix(
        caches.LeaveOneOut(r), prefix=prefix, observed="repeat"
    ),
}
GROWING: dict[str, Build] = {
    "grows": lambda r, prefix: caches.AfterPrefix(
        caches.ObservedAttention(r), prefix=prefix, every=2
    )
}


def prompt(seed: int, prefix: int = PROMPTED) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 40, (prefix + QUESTION + ANSWER,), generator=generator)
    return Prompt(tokens, prefix, prefix + QUESTION)


def on_prompts(
    folder: Path, prompts: list[Prompt], builds: Mapping[str, Build] = CACHES, **options: Any
) -> CacheRecord:
    store = RecordCache(folder, {"weights": "none"})
    return measure_prompts(
        sharp("llama"), prompts, builds, keep=[0.5, 0.25], store=store, name="tiny", task="needles",
        **options,
    )  # fmt: skip


@torch.no_grad()
def whole(prompt: Prompt, after: caches.AfterPrefix | None) -> tuple[float, float, float]:
    """Reads the text in one pass; returns KL, nats and the share that is right in its answer."""
    text = prompt.tokens[None]
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    exact, here = (
        logits(sharp("llama"), inputs, method)[prompt.answer - 1 : -1].log_softmax(dim=-1)
        for method in (None, after)
    )
    tokens = prompt.tokens[prompt.answer :]
    kl = (exact.exp() * (exact - here)).sum(-1).mean()
    nats = -here[range(ANSWER), tokens].mean()
    return float(kl), float(nats), float((here.argmax(-1) == tokens).double().mean())


@pytest.mark.parametrize(("builds", "gaps"), [(CACHES, False), (GROWING, True)])
def test_losses_are_those_of_one_pass(
    tmp_path: Path, builds: Mapping[str, Build], gaps: bool
) -> None:
    prompts = [prompt(0), prompt(1)]
    record = on_prompts(tmp_path, prompts, builds, gaps=gaps)
    assert [(cell.cache, cell.keep) for cell in record.cells] == [
        ("full cache", 1.0), *((name, keep) for keep in (0.5, 0.25) for name in builds)
    ]  # fmt: skip
    for cell in record.cells:
        for number, text in enumerate(prompts):
            build = builds.get(cell.cache)
            after = build(round(cell.keep * PROMPTED), PROMPTED) if build else None
            kl, nats, right = whole(text, after)
            assert cell.kl[number] == pytest.approx(kl, rel=1e-3, abs=1e-6)
            assert cell.nats[number] == pytest.approx(nats, rel=1e-3)
            assert cell.right[number] == right
    assert min(record.cells[1].kl) > 1e-4


def test_measured_prompts_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = on_prompts(tmp_path, [prompt(0)])
    reading = "value_aware_attention.measurement.caches.SharedReading"
    monkeypatch.setattr(reading, Mock(side_effect=OSError("read again")))
    assert on_prompts(tmp_path, [prompt(0)]) == first
    assert_refused("read again", on_prompts, tmp_path, [prompt(0), prompt(1)], error=OSError)


def test_ratios_are_geometric_means_paired_over_prompts(tmp_path: Path) -> None:
    record = on_prompts(tmp_path, [prompt(seed) for seed in range(3)])
    cell, other = record.cells[2], record.cells[1]
    ratio = record.ratio(cell, other)
    each = [math.log(a / b) for a, b in zip(cell.kl, other.kl, strict=True)]
    assert ratio.value == pytest.approx(math.exp(np.mean(each)))
    assert ratio.low < ratio.value < ratio.high
    assert record.ratio(other, other).value == 1
    assert CacheRecord.from_json(record.to_json()) == record


CHOSEN_ONCE = r"^grows, keep 0\.5 of 24 tokens: every is 2; gaps must then be True and decoded 0$"


@pytest.mark.parametrize(
    ("line", "prefixes", "options"),
    [
        (r"prompts have \[20, 24\] tokens; they must have one", [24, 20], {}),
        (r"last, keep 0\.25 of 16 tokens: r is 4; it counts 2", [16], {}),
        (CHOSEN_ONCE, [24], {"builds": GROWING}),
        (CHOSEN_ONCE, [24], {"builds": GROWING, "gaps": True, "decoded": 2}),
    ],
)
def test_what_cannot_be_measured_is_named(
    tmp_path: Path, line: str, prefixes: list[int], options: dict[str, Any]
) -> None:
    prompts = [prompt(0, prefix=prefix) for prefix in prefixes]
    assert_refused(line, on_prompts, tmp_path, prompts, **options)
