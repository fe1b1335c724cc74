"""A single step tells whether a size trains on this machine."""

import math

import pytest
import torch

from tests.refusals import assert_refused
from tests.training.tiny import causal_batch, masked_batch, masked_module, module_for
from value_aware_study.training.plan import one_step


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_a_step_of_that_module(masked: bool) -> None:
    module = module_for(masked)
    before = [p.detach().clone() for p in module.parameters()]
    result = one_step(module, masked_batch(0) if masked else causal_batch(0))
    assert math.isfinite(result["loss"])
    assert result["seconds"] > 0
    assert 0.05 < result["peak_memory_gib"] < 100
    moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    # BERT's warm-up begins at a rate of exactly zero, fairseq's does not
    assert any(moved) is not masked


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    module = masked_module()
    module.model.lm_head.bias.data[0] = float("nan")
    assert_refused("the loss is nan", one_step, module, masked_batch(0))
