"""At r = 2 the best search finds the closest combination of any two values."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.approximations.instances import ENGINES, TEMPERATURES, VALUES
from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.approximations.closest_combination import pairs
from value_aware_attention.attention import attention_weights
from value_aware_attention.kernels import KERNELS, Exponential, Kernel


def smallest_error(value: Tensor, output: Tensor) -> float:
    """Computes the error of the best pair in fp64, one pair after the other."""
    best = float((value - output).square().sum(dim=-1).amin())
    for i, j in combinations(range(len(value)), 2):
        apart = value[i] - value[j]
        if (squared := apart @ apart) > 0:
            share = ((output - value[j]) @ apart / squared).clamp(0, 1)
            best = min(best, float((value[j] + share * apart - output).square().sum()))
    return best


def check(inputs: list[Tensor], kernel: Kernel, mask: Tensor | None, engine: str | None) -> Tensor:
    """Holds every row against `smallest_error`; returns which rows are called optimal."""
    chosen = OptimalValueAware(2, "best", engine).select(*inputs, kernel=kernel, attn_mask=mask)
    query, key, value = (x.double() for x in inputs)
    alpha = attention_weights(query, key, kernel=kernel, attn_mask=mask)
    for row, weights in enumerate(alpha):
        seen = torch.ones_like(weights) > 0 if mask is None else mask[row]
        points = value[seen] - weights[seen] @ value[seen]
        if not seen.any():
            assert chosen.weights[row].sum() == 0
            continue
        optimum = smallest_error(points, torch.zeros_like(points[0]))
        spread = float(weights[seen] @ points.norm(dim=-1)) + float(value.abs().max())
        resolved = max((100 * torch.finfo(inputs[2].dtype).eps) ** 2, 1e-15) * spread**2
        reached = weights.new_zeros(len(weights)).index_add(
            0, chosen.indices[row], chosen.weights[row].double()
        )
        assert (reached[~seen] == 0).all() and reached.sum() == pytest.approx(1, abs=1e-6)
        error = float((reached[seen] @ points).square().sum())
        assert error == pytest.approx(optimum, rel=2e-5, abs=resolved)
        assert float(chosen.error[row]) == pytest.approx(optimum, rel=2e-5, abs=resolved)
    assert chosen.optimal is not None
    return chosen.optimal


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    keys=st.integers(1, 14),
    values=st.sampled_from(sorted(VALUES)),
    scale=st.sampled_from(sorted(TEMPERATURES.values())),
    engine=st.sampled_from(ENGINES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    masked=st.booleans(),
    outlier=st.sampled_from([0.0, 1e2, 1e6]),
)
def test_no_pair_is_closer(
    seed: int,
    keys: int,
    values: str,
    scale: float,
    engine: str,
    dtype: torch.dtype,
    masked: bool,
    outlier: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (5, keys, keys)
    )
    value = VALUES[values](value)
    value[0] += outlier
    mask = torch.rand(5, keys, generator=generator) < 0.6 if masked else None
    check([query.to(dtype), (key / scale).to(dtype), value.to(dtype)], Exponential(), mask, engine)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ordinary_rows_are_proved_with_every_kernel(kernel: type[Kernel]) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(12, 8, generator=generator) for _ in range(3)]
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    assert check(inputs, kernel(), mask, None).float().mean() > 0.9


@pytest.mark.parametrize("engine", ENGINES)
def test_the_path_holds_the_optimum_at_two_and_no_more_beyond(engine: str) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(2, 40, 8, generator=generator) for _ in range(3)]
    path = OptimalValueAware(4, "best", engine).path(*inputs, is_causal=True)
    two = OptimalValueAware(2, "best", engine).select(*inputs, is_causal=True)
    assert two.optimal is not None and two.optimal.all()
    torch.testing.assert_close(path[..., 1], two.error, rtol=1e-4, atol=1e-10)
    assert (path[..., 1:].diff() <= 0).all()


def test_above_512_keys_nothing_is_proved_by_pairs() -> None:
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(n, 8, generator=generator) for n in (2, 513, 513)]
    for keys, proved in ((pairs.PAIR_KEYS, True), (pairs.PAIR_KEYS + 1, False)):
        query, key, value = inputs[0], inputs[1][:keys], inputs[2][:keys]
        chosen = OptimalValueAware(2, "best").select(query, key, value)
        assert chosen.optimal is not None and bool(chosen.optimal.all()) is proved
