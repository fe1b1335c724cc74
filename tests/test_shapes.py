"""Shapes are checked below the public boundary, which raises its own errors."""

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from tests.refusals import assert_refused
from tests.shapes import PUBLIC
from value_aware_attention import approximations as methods
from value_aware_attention import attention, caches, call, error
from value_aware_attention.attention import attention_weights, weights_over
from value_aware_attention.kernels import Exponential

TWO, THREE = torch.zeros(5, 2), torch.zeros(5, 3)


def test_below_the_public_boundary_a_wrong_shape_is_an_error_of_its_annotation() -> None:
    with pytest.raises(BeartypeCallHintViolation, match="D is 3"):
        weights_over(TWO, THREE, Exponential(), None)
    with pytest.raises(BeartypeCallHintViolation, match="V is 3"):
        error.squared_output_error(TWO, THREE)


def test_the_public_boundary_raises_value_errors() -> None:
    aware, exact = methods.OptimalValueAware(1), methods.Exact()
    keys = methods.ValueAwareKeysAttentionWeights(1)
    after = caches.AfterPrefix(caches.Recent(1), prefix=1)
    calls = (attention, aware, aware.select, aware.path, keys.path, exact, after)
    for public in (*calls, lambda *x: call.Call.of(*x, kernel=Exponential())):
        assert_refused(r"same last dimension \(head_dim\)$", public, TWO, THREE, THREE)
    assert_refused(r"same last dimension \(head_dim\)$", attention_weights, TWO, THREE)
    assert_refused("both must have one shape", error.relative_output_error, TWO, THREE)
    assert len(PUBLIC) == len(calls) + 3
