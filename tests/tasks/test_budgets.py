"""Settings are found by their cost, and weights are read off a method's output."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recorded import recorded
from value_aware_attention.approximations import (
    LSH,
    Exact,
    Fixed,
    Linformer,
    OptimalValueAware,
    OptimalValueOblivious,
    OrthogonalRandomFeatures,
    RandomKeys,
    SlidingWindow,
    Strided,
)
from value_aware_attention.attention import attention_weights
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes, budget
from value_aware_attention.kernels import Exponential
from value_aware_study.evaluation.budgets import (
    closest_to_budget,
    cost_in_keys,
    effective_weights,
    first_head,
)

LENGTH, WIDTH = 64, 8
BUILD = {
    "oblivious": OptimalValueOblivious,
    "window": SlidingWindow,
    "strided": Strided,
    "fixed": lambda stride: Fixed(stride, 1),
    "lsh": lambda r: LSH(r, 1, 0),
    "linformer": lambda rank: Linformer(rank, 0),
    "orf": lambda features: OrthogonalRandomFeatures(features, 0),
}


def cost(method: torch.nn.Module, *, is_causal: bool = False) -> float:
    return cost_in_keys(method, length=LENGTH, head_dim=WIDTH, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [name for name in BUILD if name not in ("lsh", "linformer")])
@settings(max_examples=8, deadline=None)
@given(keys=st.integers(1, LENGTH))
def test_the_closest_setting_is_the_best_of_all(name: str, is_causal: bool, keys: int) -> None:
    closest = closest_to_budget(
        BUILD[name], keys, length=LENGTH, head_dim=WIDTH, is_causal=is_causal, within=1e9
    )
    costs = [cost(BUILD[name](value), is_causal=is_causal) for value in range(1, LENGTH + 1)]
    assert closest is not None
    assert closest.cost == cost(BUILD[name](closest.parameter), is_causal=is_causal)
    best = min(abs(price - keys) for price in costs)
    # Costs that fall and rise again have two places to look: coarse to fine may miss the better.
    assert abs(closest.cost - keys) <= (
        best if name in ("oblivious", "window", "orf") else best + 4
    )


def test_what_no_setting_reaches_is_none_and_refused_parameters_are_passed_over() -> None:
    options = {"length": LENGTH, "head_dim": WIDTH, "is_causal": False}
    assert closest_to_budget(BUILD["strided"], 4, within=0.1, **options) is None
    even = closest_to_budget(BUILD["lsh"], 20, within=1e9, **options)
    assert even is not None and even.parameter % 2 == 0


def test_a_causal_query_is_charged_for_the_past_alone() -> None:
    sizes = Sizes(queries=4, keys=6, head_dim=2, value_dim=3, is_causal=True)
    assert sizes.kept(100) == (3 + 4 + 5 + 6) / 4 and sizes.kept(4) == (3 + 4 + 4 + 4) / 4
    assert cost(Exact(), is_causal=True) == (LENGTH + 1) / 2 and cost(Exact()) == LENGTH
    square = {"queries": LENGTH, "keys": LENGTH, "head_dim": WIDTH, "value_dim": WIDTH}
    assert budget(Strided(8), **square, is_causal=True) < budget(Strided(8), **square)
    for method in (Strided(8), RandomKeys(8, 0), SlidingWindow(8)):
        for is_causal in (False, True):
            mask = method.pattern(LENGTH, is_causal=is_causal).mask(LENGTH, LENGTH)
            assert cost(method, is_causal=is_causal) == mask.sum().item() / LENGTH


def call(*, is_causal: bool) -> Call:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 20, WIDTH, generator=generator) for _ in range(3))
    return recorded(query, key, value, Exponential(), is_causal, 5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "method", [Exact(), SlidingWindow(4), OptimalValueAware(3), OrthogonalRandomFeatures(16, 0)]
)
def test_the_weights_read_off_give_the_output(method: torch.nn.Module, is_causal: bool) -> None:
    head = first_head(call(is_causal=is_causal), 12)
    assert head.query.shape == head.key.shape == (1, 1, 12, WIDTH)
    weights = effective_weights(method, head)
    options = {"kernel": head.kernel, "is_causal": is_causal}
    output = method(head.query, head.key, head.value, **options)
    torch.testing.assert_close(weights @ head.value[0, 0], output[0, 0], atol=1e-5, rtol=1e-4)
    if is_causal:
        assert weights.triu(1).abs().max() <= 1e-6
    if isinstance(method, Exact):
        exact = attention_weights(head.query, head.key, is_causal=is_causal)
        torch.testing.assert_close(weights, exact[0, 0])
