"""The control of a measurement is the same architecture with random weights, on the same text."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from probed import LENGTH, MODELS, model, tokenizer, words

from tests.refusals import assert_refused
from value_aware_attention import probe
from value_aware_attention.approximations import OptimalValueOblivious
from value_aware_attention.measurement import Record
from value_aware_attention.measurement.control import random_weights
from value_aware_attention.measurement.measure import weights_hash

pytestmark = pytest.mark.filterwarnings("ignore")
FEW = {"windows": 2, "length": LENGTH, "rows": 4, "search": "fast", "sizes": [1, 4], "name": "m"}
FEW["methods"] = {"optimal_v_oblivious": lambda r, layer: OptimalValueOblivious(r)}
TEXT = words(14 * 6)


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_depend_on_their_seed_alone_and_draw_from_no_other_generator(name):
    trained = model(name)
    before = weights_hash(trained)
    torch.manual_seed(1)
    random = random_weights(trained, seed=3)
    torch.manual_seed(2)
    expected = torch.get_rng_state()
    again = random_weights(trained, seed=3)
    assert torch.equal(torch.get_rng_state(), expected)
    assert weights_hash(random) == weights_hash(again) and weights_hash(trained) == before
    assert type(random) is type(trained) and not random.training
    assert weights_hash(random) not in (before, weights_hash(random_weights(trained)))


def test_random_weights_have_the_dtype_of_the_model():
    assert random_weights(model("bert").bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["bert", "our_causal"])
def test_the_control_is_a_probe_of_random_weights(name, tmp_path):
    def measured(weights, **options):
        return probe.probe(weights, tokenizer(), TEXT, **FEW, seed=5, **options).record

    trained = model(name)
    record = measured(trained, cache=tmp_path)
    alone = measured(random_weights(trained, seed=5), control=False)
    assert replace(record.control, text=alone.text) == replace(alone, budgets=(), baselines={})
    assert replace(record, control=None) == measured(trained, control=False)
    files = sorted(tmp_path.iterdir())
    assert measured(trained, cache=tmp_path) == record and sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("why", ["is_quantized", "config"])
def test_a_model_that_cannot_be_built_is_measured_without_a_control(why, caplog, monkeypatch):
    trained = model("bert")
    if why == "is_quantized":
        trained.is_quantized = True
    else:
        unbuilt = Mock(side_effect=RuntimeError("no weights\nfor this config"))
        monkeypatch.setattr("value_aware_attention.measurement.control.deepcopy", unbuilt)
    report = probe.probe(trained, tokenizer(), TEXT, **FEW)
    assert report.record.control is None and "random" not in str(report)
    [warning] = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    reason = "its weights are quantised" if why == "is_quantized" else "no weights for this config"
    assert warning.startswith(f"no control with random weights: {reason}") and "\n" not in warning


def test_a_record_keeps_its_control_and_those_without_one_are_read():
    record = probe.probe(model("bert"), tokenizer(), TEXT, **FEW).record
    assert Record.from_json(record.to_json()) == record
    earlier = json.loads(record.to_json())
    del earlier["control"]
    assert Record.from_json(json.dumps(earlier)) == replace(record, control=None)
    other = replace(record, control=replace(record.control, length=LENGTH + 1))
    assert_refused("control has another length", Record.from_json, other.to_json())
    broken = replace(record, control=replace(record.control, cells=()))
    assert_refused("do not begin with exact", Record.from_json, broken.to_json())
