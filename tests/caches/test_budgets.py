"""Keys of heads and layers that share a number of them: orders, counts, sets and refusals."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.caches.methods import METHODS, SEEING
from tests.caches.seen import observed
from value_aware_attention import caches
from value_aware_attention.caches.budgets import Ranking, first_of, pooled_counts
from value_aware_attention.caches.joint_set import Rows

quick = settings(deadline=None, max_examples=20)
M, WIDTH = 8, 7


def layer(seed: int = 0, heads: int = 2, **options: object) -> caches.Observed:
    """Draws a layer of `heads` key-value heads of two query heads each, two texts, and its W_o."""
    seen = observed(M, batch=(2, heads), seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(heads, 2, 3, WIDTH, generator=generator, dtype=torch.float64)
    return replace(seen, projection=weight)


def error_after_projection(seen: caches.Observed, kept: Tensor) -> Tensor:
    """Recomputes sum ||W_o (o - o~)||^2 over group and queries, in parts of the layer's output."""
    log = seen.log_similarity.masked_fill(~kept[..., None, None, :], -torch.inf)
    log = torch.cat([log, seen.log_mass_beside], dim=-1)
    weights = torch.softmax(log, dim=-1).nan_to_num()
    beside = torch.zeros_like(seen.output) if seen.beside is None else seen.beside.output()
    output = weights[..., :-1] @ seen.value[..., None, :, :] + weights[..., -1:] * beside
    lost = (seen.output - output) @ seen.projection
    whole = torch.einsum("bhgnv,hgve->bne", seen.output, seen.projection).square().sum((1, 2))
    return lost.square().sum((-3, -2, -1)) / whole[:, None]


@quick
@given(st.integers(0, 99), st.booleans(), st.sampled_from([0, 2]), st.sampled_from([1.0, 4.0]))
def test_losses_of_an_elimination_are_recomputed_errors(
    seed: int, beside: bool, protected: int, sharpness: float
) -> None:
    seen = layer(seed, beside=beside, protected=protected, sharpness=sharpness)
    order = caches.ValueAware(M, search="exhaustive").rank(seen)
    for r in range(max(1, protected), M):
        full, less = (first_of(order.keys, torch.full((2, 2), n)) for n in (r + 1, r))
        found = error_after_projection(seen, less) - error_after_projection(seen, full)
        torch.testing.assert_close(order.loss[..., r], found, rtol=1e-4, atol=1e-5)
    assert (order.loss[..., :protected] == torch.inf).all()


def test_without_a_projection_errors_are_those_of_the_heads_outputs() -> None:
    seen = replace(layer(), projection=None)
    plain, projected = Rows.of(seen), Rows.of(seen, projected=True)
    assert all(torch.equal(x, vars(projected)[name]) for name, x in vars(plain).items())
    eye = torch.eye(3, dtype=torch.float64).expand(2, 2, 3, 3)
    turned = Rows.of(replace(seen, projection=eye), projected=True)
    kept = torch.rand(4, M) < 0.5
    torch.testing.assert_close(turned.error(kept), plain.error(kept))


def slowly_pooled(orders: list[Ranking], total: int, least: int) -> list[Tensor]:
    """Drops keys of each text until `total` are left, each time the cheapest last one."""
    counts = [torch.full(order.keys.shape[:2], order.keys.shape[-1]) for order in orders]
    for text in range(len(counts[0])):
        while sum(int(count[text].sum()) for count in counts) > total:
            places = [
                (orders[x].loss[text, head, counts[x][text, head] - 1], x, head)
                for x in range(len(orders))
                for head in range(counts[x].shape[1])
                if counts[x][text, head] > least
            ]
            _, x, head = min(places)
            counts[x][text, head] -= 1
    return counts


@quick
@given(st.integers(0, 999), st.integers(5, 30), st.integers(0, 2))
def test_counts_are_those_of_dropping_the_cheapest_key_of_any_head(
    seed: int, total: int, least: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    orders = [
        Ranking(torch.arange(6).expand(2, h, 6), torch.rand(2, h, 6, generator=generator).double())
        for h in (2, 3)
    ]
    total = max(total, 5 * least)
    found = pooled_counts(orders, total, least)
    for mine, slow in zip(found, slowly_pooled(orders, total, least), strict=True):
        assert torch.equal(mine, slow)


@pytest.mark.parametrize("name", sorted(SEEING))
def test_orders_hold_every_key_with_the_protected_first(name: str) -> None:
    seen, method = layer(protected=2, padding=1), METHODS[name](4)
    order = method.rank(seen)
    assert torch.equal(order.keys.sort(dim=-1).values, torch.arange(M).expand(2, 2, M))
    assert (order.loss[..., :2] == torch.inf).all()
    assert (order.loss[0, 0, -1] == -torch.inf) and order.keys[0, 0, -1] == 0
    counts = torch.tensor([[3, 5], [2, 6]])
    kept = method.cut(seen, order, counts)
    used = (kept.log_weight > -torch.inf).sum(-1)
    assert torch.equal(used, counts) and kept.indices.shape[-1] == 6
    with_r = method.cut(seen, order, torch.full((2, 2), 4))
    assert with_r.indices.shape[-1] == 4 and with_r.indices.diff().gt(0).all()
