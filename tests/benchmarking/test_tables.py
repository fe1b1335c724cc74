"""Every benchmark from its measurement to its page, at tiny sizes; no time is asserted."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import adapter, optimal_value_aware, patterns, tokenization, training_step
from benchmarks.training_step import ALIKE, PEERS, TINY, AsOurs
from value_aware_study.data.tokenization import ByteLevelBPE

pytestmark = pytest.mark.filterwarnings("ignore")
HEADER: dict[str, Any] = {"command": "c", "date": "d", "source": "s"}
HEADER |= {"run_on": {"hardware": "h", "threads": 1, "versions": {}}}


def kept(record: dict[str, Any]) -> dict[str, Any]:
    """As it is read from its file."""
    return json.loads(json.dumps(HEADER | record))


def test_patterns_stand_beside_eager_and_fused_attention() -> None:
    rows = [asdict(row) for row in patterns.measure(64, False, 0.0)]
    text = patterns.page(kept({"heads": 8, "head_dim": 64, "rows": rows}))
    assert len(rows) == 2 * len(patterns.METHODS) and "/ eager" in text and "/ fused" in text
    assert all(row["eager"]["rounds"] == row["fused"]["rounds"] == 3 for row in rows)


def test_the_adapter_stands_beside_eager_and_fused_attention() -> None:
    with torch.inference_mode():
        model = adapter.roberta()
        call = adapter.calls(model, 16)["padded"]
        row = adapter.measure("m", "padded", model, call, 0.0)
    assert row.largest_difference < 1e-4 and set(row.milliseconds) == {"adapter", "eager", "fused"}
    assert model.config._attn_implementation == "eager"
    text = adapter.page(kept({"layers": 2, "tokens": 16, "rows": [asdict(row)]}))
    assert "adapter / fused" in text and "undecided" in text


def test_the_search_stands_beside_eager_and_fused_attention() -> None:
    rows = [asdict(row) for row in optimal_value_aware.measure(32, 1, (1,), 0.0)]
    record = {"inputs": "i", "head_dim": 64, "rows": rows, "peak_memory": {"exact": 1.0}}
    text = optimal_value_aware.page(kept(record | {"one_query_at_a_time": {"x": 2.0}}))
    assert "call / fused" in text and "microseconds" in text and "MiB" in text


def test_gpt2_with_our_loss_has_gpt2s_loss_of_every_target() -> None:
    model = training_step.gpt2(TINY, activation_function="relu")
    rows = torch.randint(TINY.vocabulary, (2, TINY.length + 1))
    ours = training_step._training(AsOurs(model))
    assert ours.count_targets(rows) == 2 * TINY.length
    torch.testing.assert_close(ours.loss(rows), training_step.own_loss(model, rows))
    assert {id(p) for p in ours.parameters()} == {id(p) for p in model.parameters()}


def test_a_step_is_compared_with_gpt2_as_it_comes_and_with_the_same_work() -> None:
    record = training_step.measure(TINY, 0.0)
    assert set(record["seconds"]) == {*training_step.KERNELS, *PEERS}
    text = training_step.page(kept(record))
    assert f"/ {ALIKE} |" in text and "With both GPT-2 does the same work" in text


def test_tokenization_is_compared_with_the_call_that_it_makes(tmp_path: Path) -> None:
    texts = [f"words and numbers {number}, </s> and more" for number in range(70)]
    tokenizer = ByteLevelBPE(vocabulary_size=300, training_characters=1000).build(texts)
    tokenization.write_texts(texts, tmp_path)
    ways = tokenization.ways_to_tokenize(texts, tokenizer, tmp_path)
    assert next(iter(ways)) == tokenization.PEER == "encode_batch_fast"
    stream: Any = ways["token_stream"](tmp_path / "scratch")
    encoded: Any = ways["encode_batch"](tmp_path)
    assert sorted(row.as_py()[:-1] for row in stream["input_ids"]) == sorted(x.ids for x in encoded)
    assert ways[tokenization.PEER](tmp_path) is None
