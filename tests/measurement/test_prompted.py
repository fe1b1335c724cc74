"""Caches on prompts have the losses that one pass over prompt and continuation has."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.hugging_face.models import sharp
from tests.refusals import assert_refused
from value_aware_attention.caches import AfterPrefix, LeaveOneOut, ObservedAttention
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.measurement import caches as measuring
from value_aware_attention.measurement.caches import Prompt, measure_prompts
from value_aware_attention.measurement.store import RecordCache
from value_aware_attention.records.cache_record import CacheRecord

PREFIX, QUESTION, ANSWER = 24, 3, 4
CACHES: dict[str, Callable[[int, int], AfterPrefix]] = {
    "last": lambda r, prefix: AfterPrefix(ObservedAttention(r), prefix=prefix),
    "all, one budget": lambda r, prefix: AfterPrefix(
        LeaveOneOut(r), prefix=prefix, observed="continued", pool="model"
    ),
    "repeat": lambda r, prefix: AfterPrefix(LeaveOneOut(r), prefix=prefix, observed="repeat"),
}


def prompt(seed: int, prefix: int = PREFIX) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 40, (prefix + QUESTION + ANSWER,), generator=generator)
    return Prompt(tokens, prefix, prefix + QUESTION)


def measured(folder: Path, prompts: list[Prompt]) -> CacheRecord:
    store = RecordCache(folder, {"weights": "none"})
    return measure_prompts(
        sharp("llama"), prompts, CACHES, keep=[0.5, 0.25], store=store, name="tiny", task="needles"
    )


@torch.no_grad()
def slow(prompt: Prompt, after: AfterPrefix | None) -> tuple[float, float, float, Tensor]:
    """Reads the whole text, row by row of its answer; without a cache by exact attention."""
    model, text = sharp("llama"), prompt.tokens[None]
    exact = model(input_ids=text, use_cache=False).logits[0].log_softmax(dim=-1)
    logs = exact
    if after is not None:
        with replace_attention(model, after):
            logs = model(input_ids=text, use_cache=False).logits[0].log_softmax(dim=-1)
    kl, nats, right = [], [], []
    for place in range(prompt.answer, len(prompt.tokens)):
        here, there, token = logs[place - 1], exact[place - 1], int(prompt.tokens[place])
        kl.append(float((there.exp() * (there - here)).sum()))
        nats.append(-float(here[token]))
        right.append(int(here.argmax()) == token)
    return sum(kl) / ANSWER, sum(nats) / ANSWER, sum(right) / ANSWER, logs


def test_losses_are_those_of_one_pass(tmp_path: Path) -> None:
    prompts = [prompt(0), prompt(1)]
    record = measured(tmp_path, prompts)
    assert [(cell.cache, cell.keep) for cell in record.cells] == [
        ("full cache", 1.0), *((name, keep) for keep in (0.5, 0.25) for name in CACHES)
    ]  # fmt: skip
    for cell in record.cells:
        for number, text in enumerate(prompts):
            build = CACHES.get(cell.cache)
            after = build(round(cell.keep * PREFIX), PREFIX) if build else None
            kl, nats, right, _ = slow(text, after)
            assert cell.kl[number] == pytest.approx(kl, rel=1e-3, abs=1e-6)
            assert cell.nats[number] == pytest.approx(nats, rel=1e-3)
            assert cell.right[number] == right
    assert min(record.cells[1].kl) > 1e-4


def test_measured_prompts_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured(tmp_path, [prompt(0)])

    def read(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(measuring, "SharedReading", read)
    assert measured(tmp_path, [prompt(0)]) == first
    with pytest.raises(AssertionError, match="read again"):
        measured(tmp_path, [prompt(0), prompt(1)])


def test_ratios_are_geometric_means_paired_over_prompts(tmp_path: Path) -> None:
    record = measured(tmp_path, [prompt(seed) for seed in range(3)])
    cell, other = record.cells[2], record.cells[1]
    ratio = record.ratio(cell, other)
    each = [math.log(a / b) for a, b in zip(cell.kl, other.kl, strict=True)]
    assert ratio.value == pytest.approx(math.exp(np.mean(each)))
    assert ratio.low < ratio.value < ratio.high
    assert record.ratio(other, other).value == 1
    assert CacheRecord.from_json(record.to_json()) == record


def test_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    assert_refused(
        r"prompts have \[20, 24\] tokens; they must have one",
        measured,
        tmp_path,
        [prompt(0), prompt(0, prefix=20)],
    )
    assert_refused(
        r"last, keep 0\.25 of 16 tokens: r is 4; it counts 2",
        measured,
        tmp_path,
        [prompt(0, prefix=16)],
    )
    record = measured(tmp_path, [prompt(0)])
    for cells, message in (
        (record.cells[1:], "its first cell is not of the full cache"),
        (
            (record.cells[0], replace(record.cells[1], kl=(1.0, 2.0))),
            r"cells have \[1, 2\] prompts",
        ),
    ):
        assert_refused(message, CacheRecord.from_json, replace(record, cells=cells).to_json())
