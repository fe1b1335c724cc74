"""Model cards parse and state every number of the metrics."""

import json
import re
from typing import Any

import pytest
from huggingface_hub import ModelCard

from value_aware_study.training.model_card import model_card

CAUSAL = {
    "model": "causal_elu",
    "parameters": 1317632,
    "steps": 380,
    "tokens": 389120,
    "loss": 5.356531302134196,
    "perplexity": 211.98834614230697,
    "curve": [
        {"step": 100, "loss": 6.372697750727336, "perplexity": 585.6355985817588},
        {"step": 380, "loss": 5.356531302134196, "perplexity": 211.98834614230697},
    ],
    "hyperparameters": {"optimizer": "AdamW", "learning_rate": 5e-06, "warmup_proportion": None},
}
MASKED = {
    key: value for key, value in CAUSAL.items() if key not in ("perplexity", "curve", "model")
} | {
    "model": "masked_long",
    "error_percent": 85.15406162464986,
    "curve": [{"step": 380, "loss": 5.356531302134196, "error_percent": 85.15406162464986}],
}
ABOUT = {"data": "docstrings of numpy", "scale": "laptop", "kernel": "elu"}


@pytest.mark.parametrize("metrics", [CAUSAL, MASKED], ids=["causal", "masked"])
def test_every_number_of_the_metrics_is_stated(metrics: dict[str, Any]) -> None:
    text = ModelCard(model_card(metrics, **ABOUT)).text.replace(",", "")
    stated, expected = (
        [float(word) for word in re.findall(r"\d[\d.]*(?:e-?\d+)?(?=[\s|),}\]])", source)]
        for source in (text, json.dumps(metrics))
    )
    for number in expected:
        assert any(number == pytest.approx(written, rel=1e-5) for written in stated), number
    for words in ("docstrings of numpy", "Scale: laptop", "elu", "exact attention", "AdamW"):
        assert words in text


def test_the_metadata_are_the_hubs() -> None:
    data = ModelCard(model_card(MASKED, **ABOUT)).data
    assert data.pipeline_tag == "fill-mask" and data.library_name == "transformers"
    assert data.model_name == "masked_long" and "elu" in data.tags
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    assert results == {name: MASKED[name] for name in ("loss", "error_percent")}
    assert all("docstrings of numpy" in result.dataset_name for result in data.eval_results)
    assert ModelCard(model_card(CAUSAL, **ABOUT)).data.pipeline_tag == "text-generation"


def test_an_attention_of_its_own_is_named_and_loaded_with_it() -> None:
    attention = {"hyperparameters": MASKED["hyperparameters"] | {"attention": "LSH(r=4)"}}
    card = model_card(MASKED | attention, **ABOUT)
    assert "trained with LSH(r=4)" in card and "exact attention" not in card
    assert 'load_masked("masked_long")' in card
