"""Caches on prompts have the losses that one pass over prompt and continuation has."""

import math
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.hugging_face.models import logits, sharp
from tests.refusals import assert_refused
from value_aware_attention.caches import AfterPrefix, LeaveOneOut, ObservedAttention
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
def whole(prompt: Prompt, after: AfterPrefix | None) -> tuple[float, float, float]:
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
            kl, nats, right = whole(text, after)
            assert cell.kl[number] == pytest.approx(kl, rel=1e-3, abs=1e-6)
            assert cell.nats[number] == pytest.approx(nats, rel=1e-3)
            assert cell.right[number] == right
    assert min(record.cells[1].kl) > 1e-4


def test_measured_prompts_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured(tmp_path, [prompt(0)])
    monkeypatch.setattr(measuring, "SharedReading", Mock(side_effect=OSError("read again")))
    assert measured(tmp_path, [prompt(0)]) == first
    assert_refused("read again", measured, tmp_path, [prompt(0), prompt(1)], error=OSError)


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
    for line, prompts in (
        (r"prompts have \[20, 24\] tokens; they must have one", [prompt(0), prompt(0, prefix=20)]),
        (r"last, keep 0\.25 of 16 tokens: r is 4; it counts 2", [prompt(0, prefix=16)]),
    ):
        assert_refused(line, measured, tmp_path, prompts)
