"""The controls of the mean as a candidate: each against the method that it changes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.mean_candidate import (
    AttentionWeights,
    MeanOfOthers,
    OtherCandidate,
    mean_of_half,
    methods,
    zeros,
)
from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.attention import attention, attention_weights
from value_aware_attention.call import Call
from value_aware_attention.weights import mean_of_visible

CAUSAL: dict[str, Any] = {"is_causal": True}


@pytest.fixture
def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 2, 24, 6, generator=generator) for _ in range(3))
    return [2 * query, key, value + 3]


def error(method: torch.nn.Module, inputs: list[Tensor]) -> Tensor:
    exact = attention(*inputs, **CAUSAL)
    return (method(*inputs, **CAUSAL) - exact).square().sum(dim=-1)


def test_the_mean_as_another_candidate_is_the_mean(inputs: list[Tensor]) -> None:
    def mean(call: Call, value: Tensor) -> Tensor:
        return mean_of_visible(value, call.visible, call.query.shape[-2])

    ours, library = (
        error(method, inputs)
        for method in (OtherCandidate(3, mean), OptimalValueAware(3, mean=True))
    )
    torch.testing.assert_close(ours, library, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("candidate", [zeros, mean_of_half])
def test_another_candidate_never_makes_an_error_larger(
    inputs: list[Tensor], candidate: Any
) -> None:
    without, with_it = (
        error(method, inputs) for method in (OptimalValueAware(3), OtherCandidate(3, candidate))
    )
    assert (with_it <= without * (1 + 1e-4) + 1e-8).all() and with_it.sum() < without.sum()


def test_the_mean_of_the_values_left_out_is_never_worse(inputs: list[Tensor]) -> None:
    of_all, of_others = (
        error(method, inputs) for method in (OptimalValueAware(3, mean=True), MeanOfOthers(3))
    )
    assert (of_others <= of_all * (1 + 1e-4) + 1e-8).all()


def test_attentions_weights_on_the_keys_leave_the_rest_to_the_mean(inputs: list[Tensor]) -> None:
    query, key, value = inputs
    chosen = OptimalValueAware(3, mean=True).select(*inputs, **CAUSAL)
    alpha = attention_weights(query, key, **CAUSAL)
    output = AttentionWeights(3)(*inputs, **CAUSAL)
    for head, row in ((0, 5), (1, 23)):
        keys = chosen.indices[0, head, row][chosen.weights[0, head, row] > 0].tolist()
        others = [k for k in range(row + 1) if k not in keys]
        expected = alpha[0, head, row, keys] @ value[0, head, keys]
        expected = expected + alpha[0, head, row, others].sum() * value[0, head, others].mean(dim=0)
        torch.testing.assert_close(output[0, head, row], expected, rtol=1e-4, atol=1e-5)


def test_every_row_of_the_table_runs(inputs: list[Tensor]) -> None:
    for method in methods(4).values():
        assert method(*inputs, **CAUSAL).isfinite().all()
