"""The baselines of value-aware attention equal slow references and hold their claims."""

import sys
from collections.abc import Callable

import pytest
import torch
from hydra.utils import get_class
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import KERNELS, draw
from torch import Tensor

from tests.reference import approximations as reference
from value_aware_attention.approximations import (
    LeaveOneOutKeys,
    MeanValueSlot,
    NormWeightedKeys,
    ObliviousKeysOptimalWeights,
    OptimalValueAware,
    OptimalValueOblivious,
    SampledKeys,
    SparseApproximation,
    UnrenormalisedKeys,
    ValueAwareKeysAttentionWeights,
)
from value_aware_attention.approximations.ranked_keys import RankedKeys
from value_aware_attention.attention import attention, attention_weights
from value_aware_attention.call import Call
from value_aware_attention.error import relative_output_error
from value_aware_attention.kernels import Exponential, Polynomial
from value_aware_attention.measurement.layers import SLOTS, slot_path
from value_aware_attention.weights import top_keys
from value_aware_study.cards import cards

seeds = st.integers(0, 2**31)
BUILD: dict[str, Callable[[int], SparseApproximation]] = {
    "oblivious_keys_optimal_weights": ObliviousKeysOptimalWeights,
    "value_aware_keys_attention_weights": ValueAwareKeysAttentionWeights,
    "kobayashi": NormWeightedKeys,
    "vatp": lambda r: NormWeightedKeys(r, norm=1),
    "sampled_keys": lambda r: SampledKeys(r, seed=5),
    # and whatever ranks keys, against the reference that has its option's name
    **{
        name: get_class(card.target)
        for name, card in cards().items()
        if issubclass(get_class(card.target), RankedKeys) and "norm" not in card.arguments
    },
}

OURS = {name: BUILD[name] for name in list(BUILD)[:5]} | {
    "leave_one_out_keys": LeaveOneOutKeys,
    "optimal_value_aware": OptimalValueAware,
    "optimal_value_oblivious": OptimalValueOblivious,
}
"""Without what is added by a card alone: a method of one's own may depend on the scale."""


def slow(name: str, alpha: Tensor, value: Tensor, visible: Tensor, r: int, row: int) -> Tensor:
    """Computes the reference's weights on every key for one query."""
    if name == "oblivious_keys_optimal_weights":
        return reference.oblivious_keys_optimal_weights(alpha, value, visible, r)
    if name == "optimal_v_oblivious":
        return reference.optimal_value_oblivious(alpha, r)
    if name in ("kobayashi", "vatp"):
        return reference.norm_weighted_keys(alpha, value, r, 1 if name == "vatp" else 2)
    if name == "sampled_keys":
        generator = torch.Generator().manual_seed(5)
        uniforms = torch.rand(len(value), r, generator=generator, dtype=torch.float64)
        return reference.sampled_keys(alpha, uniforms[row].tolist())
    return getattr(reference, name)(alpha, value, r)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=8, deadline=None)
@given(seed=seeds, keys=st.integers(1, 12), r=st.integers(1, 14), mask=st.sampled_from("fcr"))
def test_every_baseline_equals_its_reference(
    name: str, kernel: str, seed: int, keys: int, r: int, mask: str
) -> None:
    """Under a full, a causal and a random mask, whose rows may hide every key."""
    query, key, value = draw(seed, keys, 4)
    options: dict = {"kernel": KERNELS[kernel]}
    visible = torch.ones(keys, keys, dtype=torch.bool)
    if mask == "c":
        visible, options = visible.tril(), options | {"is_causal": True}
    if mask == "r":
        visible = torch.rand(keys, keys, generator=torch.Generator().manual_seed(seed)) > 0.4
        options["attn_mask"] = visible
    chosen = BUILD[name](r).select(query, key, value, **options)
    alpha = attention_weights(query, key, **options)
    dense = chosen.dense(keys)
    assert chosen.indices.shape == (keys, min(r, keys))
    for row in range(keys):
        expected = slow(name, alpha[row], value, visible[row], r, row)
        if name == "oblivious_keys_optimal_weights":  # weights need not be unique, the output is
            torch.testing.assert_close(dense[row] @ value, expected @ value, atol=1e-7, rtol=0)
            assert ((dense[row] == 0) | visible[row]).all()
        else:
            torch.testing.assert_close(dense[row], expected)


@pytest.mark.parametrize("name", OURS)
@settings(max_examples=8, deadline=None)
@given(
    seed=seeds,
    r=st.integers(1, 6),
    exponent=st.sampled_from([-100, -70, -35, 35, 67, 120]),
    mask=st.sampled_from("fcr"),
)
def test_no_choice_depends_on_the_scale_of_the_values(
    name: str, seed: int, r: int, exponent: int, mask: str
) -> None:
    """Powers of two leave the choice unchanged bit for bit, and errors scale with them."""
    query, key, value = (x.float() for x in draw(seed, 2, 9, 3))
    visible = torch.rand(9, 9, generator=torch.Generator().manual_seed(seed)) > 0.4
    options = {"f": {}, "c": {"is_causal": True}, "r": {"attn_mask": visible}}[mask]
    method, factor = OURS[name](r), 2.0**exponent
    once = method.select(query, key, value, **options)
    scaled = method.select(query, key, value * factor, **options)
    assert torch.equal(once.indices, scaled.indices) and torch.equal(once.weights, scaled.weights)
    assert once.optimal is None or torch.equal(once.optimal, scaled.optimal)
    pairs = [(once.error, scaled.error)]
    if hasattr(method, "path"):
        paths = [method.path(query, key, x, **options) for x in (value, value * factor)]
        pairs.append(tuple(paths))
    for before, after in pairs:
        expected = (before.double() * factor * factor).float()
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-43)
    relative = [
        relative_output_error(method(query, key, x, **options), attention(query, key, x, **options))
        for x in (value, value * factor)
    ]
    torch.testing.assert_close(*relative, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("name", BUILD)
@settings(max_examples=8, deadline=None)
@given(seed=seeds, r=st.integers(1, 12), sharpness=st.sampled_from([0.0, 1.0, 1e2, 1e5, 1e20]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_are_a_distribution_on_visible_keys(
    name: str, dtype: torch.dtype, seed: int, r: int, sharpness: float
) -> None:
    query, key, value = (x.to(dtype) for x in draw(seed, 2, 9, 3))
    visible = torch.rand(9, 9, generator=torch.Generator().manual_seed(seed)) > 0.5
    visible[0] = False
    chosen = BUILD[name](r).select(query * sharpness, key, value, attn_mask=visible)
    assert (chosen.weights >= 0).all() and chosen.error.isfinite().all()
    assert ((chosen.indices >= 0) & (chosen.indices < 9)).all()
    assert (chosen.dense(9)[:, ~visible] == 0).all()
    sums = visible.any(-1).to(chosen.weights.dtype).expand(2, 9)
    torch.testing.assert_close(chosen.weights.sum(-1), sums, atol=1e-5, rtol=0)
    assert (chosen.support() <= r).all() and chosen.optimal is None


def test_a_key_with_all_the_weight_comes_first() -> None:
    """alpha / (1 - alpha) ||o - v|| is 0 / 0 there; alpha ||v|| is 0 where that value is 0."""
    query, key, value = draw(0, 8, 4, dtype=torch.float32)
    value[3] = 0.0
    inputs, options = (40 * query, 40 * key, value), {"kernel": Exponential(1.0)}
    alpha = attention_weights(*inputs[:2], **options)
    assert (alpha.amax(-1) == 1).any()
    for method in (LeaveOneOutKeys(1), ValueAwareKeysAttentionWeights(1)):
        chosen = method.select(*inputs, **options)
        assert torch.equal(chosen.indices[..., 0], alpha.argmax(-1))
        assert (chosen.weights == 1).all()
    for method in (NormWeightedKeys(1), NormWeightedKeys(1, norm=1)):
        assert (method.select(*inputs, **options).weights == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_key_with_nearly_all_the_weight_is_kept(dtype: torch.dtype) -> None:
    """As alpha nears 1, rounding leaves no digit of 1 - alpha, of o - v, and of their quotient."""
    query, key, value = draw(3, 4, 300, 64)
    key = torch.nn.functional.normalize(key, dim=-1)
    query = key * torch.linspace(5.0, 60.0, 300, dtype=key.dtype)[:, None]  # alpha up to 1 - 1e-26
    inputs = tuple(x.to(dtype) for x in (query, key, value))
    alpha = attention_weights(*inputs[:2], kernel=Exponential(1.0))
    dense = LeaveOneOutKeys(2).select(*inputs, kernel=Exponential(1.0)).dense(300)
    likely = alpha.amax(-1) > 0.5
    assert (1 - alpha.amax(-1)).lt(1e-7).any() and likely.any()
    assert (dense.argmax(-1) == alpha.argmax(-1))[likely].all()


def test_equal_scores_go_to_the_lowest_index_and_hidden_keys_last() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    allowed = torch.tensor([[True, True, True, True, False], [False, True, False, False, True]])
    everything = top_keys(scores, None, 3)
    assert [sorted(row) for row in everything.tolist()] == [[0, 1, 4], [0, 1, 2]]
    assert [set(row) for row in top_keys(scores, allowed, 2).tolist()] == [{0, 1}, {1, 4}]
    assert [set(row) for row in top_keys(0 * scores, allowed, 2).tolist()] == [{0, 1}, {1, 4}]
    assert top_keys(scores, allowed, 9).shape == (2, 5)
    query, key, value = draw(0, 40, 4)
    chosen = ObliviousKeysOptimalWeights(7).select(query, key, value, kernel=Polynomial(0))
    assert (chosen.dense(40)[:, 7:] == 0).all()  # degree 0: every key weighs the same


def test_far_from_the_origin_the_same_keys_are_chosen() -> None:
    query, key, value = (x.float() for x in draw(4, 60, 8))
    value = (value * 256).round() / 256  # so that the shift itself loses no digit
    for name in ("value_aware_keys_attention_weights", "leave_one_out_keys"):
        near = BUILD[name](6).select(query, key, value).dense(60)
        far = BUILD[name](6).select(query, key, value + 4096.0).dense(60)
        assert (near - far).abs().sum(-1).gt(1e-3).float().mean() < 0.1, name


def test_the_path_of_value_aware_keys_is_what_every_size_leaves() -> None:
    query, key, value = draw(7, 2, 12, 5)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()  # rows with few keys to choose from
    mask[4] = False
    path = ValueAwareKeysAttentionWeights(14).path(query, key, value, attn_mask=mask)
    assert path.shape == (2, 12, 12) and (path[:, 4] == 0).all()
    for r in range(1, 13):
        chosen = ValueAwareKeysAttentionWeights(r).select(query, key, value, attn_mask=mask)
        torch.testing.assert_close(path[..., r - 1], chosen.error, atol=1e-20, rtol=1e-6)


def test_draws_come_from_the_seed_the_head_and_the_position_alone() -> None:
    query, key, value = (x.expand(2, 3, 12, 4) for x in draw(7, 12, 4))
    drawn = SampledKeys(4, 1).select(query, key, value).dense(12)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0, 0], drawn[0, 1])
    assert not torch.equal(drawn, SampledKeys(4, 2).select(query, key, value).dense(12))
    longer = [torch.cat([x, x.flip(-2)], dim=-2) for x in (key, value)]
    mask = torch.arange(24) < 12
    padded = SampledKeys(4, 1).select(query, *longer, attn_mask=mask[None]).dense(24)
    torch.testing.assert_close(padded[..., :12], drawn)
    few = SampledKeys(4, 1).select(query[..., :7, :], key, value).dense(12)
    torch.testing.assert_close(few, drawn[..., :7, :])


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_visible_keys(
    u: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.full((50, 3), u, dtype=torch.float64)
    monkeypatch.setattr(SampledKeys, "_uniforms", lambda self, shape: rows)
    visible = torch.tensor([False, False, True, True, True, False])[None]
    query, key, value = (x.float() for x in draw(9, 50, 4))
    chosen = SampledKeys(3, 0).select(query, key[:6], value[:6], attn_mask=visible)
    assert (chosen.dense(6)[:, 4 if u else 2] == 1).all()


def test_queries_taken_in_blocks_give_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(10, 2, 30, 4)
    module = sys.modules[ValueAwareKeysAttentionWeights.__module__]
    whole = ValueAwareKeysAttentionWeights(5).select(*inputs, is_causal=True)
    monkeypatch.setattr(module, "SOLVED_AT_ONCE", 7)
    blocks = ValueAwareKeysAttentionWeights(5).select(*inputs, is_causal=True)
    torch.testing.assert_close(whole.dense(30), blocks.dense(30))


# The keys that are dropped: as a slot of their mean, or left out


KEYS, WIDTH = 9, 4
MASKS = ("none", "causal", "padding", "padding and causal", "rows")
masses = st.sampled_from(sorted(SLOTS))
kernels = st.sampled_from(sorted(KERNELS))


def slot_inputs(seed: int, outlier: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, KEYS, WIDTH, generator=generator) for _ in range(3))
    value[0, 2] *= outlier
    return [query, key, value]


def masked(kind: str, seed: int) -> tuple[dict[str, object], Tensor]:
    """Draws the options of a call with a mask of some kind, and the visible pairs."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.ones(2, KEYS, KEYS, dtype=torch.bool)
    options: dict[str, object] = {"is_causal": "causal" in kind}
    if "causal" in kind:
        visible = visible.tril()
    if kind == "rows" or "padding" in kind:
        shape = (2, KEYS if kind == "rows" else 1, KEYS)
        mask = torch.rand(shape, generator=generator) > 0.4
        options["attn_mask"] = mask
        visible = visible & mask
    return options, visible


@settings(max_examples=60, deadline=None)
@given(
    kernel=kernels, kind=st.sampled_from(MASKS), r=st.integers(1, KEYS + 1), mass=masses,
    seed=seeds, outlier=st.sampled_from([1.0, 1e5]),
)  # fmt: skip
def test_the_slot_equals_its_reference(
    kernel: str, kind: str, r: int, mass: str, seed: int, outlier: float
) -> None:
    inputs = slot_inputs(seed, outlier)
    options, visible = masked(kind, seed)
    output = MeanValueSlot(r, mass)(*inputs, kernel=KERNELS[kernel], **options)
    query, key, value = (x.double() for x in inputs)
    similarity = getattr(reference, kernel)
    for head in range(2):
        scale = value[head].abs().max()
        for row in range(KEYS):
            expected = reference.mean_value_slot(
                query[head, row], key[head], value[head], similarity, visible[head, row], r, mass
            )
            error = (output[head, row] - expected).abs().max()
            assert error <= 3e-4 * (scale if visible[head, row, 2] and head == 0 else 10)


@settings(max_examples=40, deadline=None)
@given(kernel=kernels, kind=st.sampled_from(MASKS), mass=masses, seed=seeds)
def test_one_sort_gives_the_errors_of_every_r(kernel: str, kind: str, mass: str, seed: int) -> None:
    options, visible = masked(kind, seed)
    mask = options.pop("attn_mask", None)
    tensors = [x[:, None] for x in slot_inputs(seed)]
    call = Call.of(
        *tensors, kernel=KERNELS[kernel], attn_mask=None if mask is None else mask[:, None],
        **options,
    )  # fmt: skip
    rows = call.at(torch.arange(KEYS).expand(2, 1, KEYS), torch.float64)
    errors, exact, seeing = slot_path(rows, mass), rows.output(), visible.any(-1)[:, None]
    for r in range(1, KEYS + 1):
        expected = (MeanValueSlot(r, mass)(**rows.arguments()) - exact).square().sum(-1)
        torch.testing.assert_close(
            errors[..., r - 1][seeing], expected[seeing], atol=1e-9, rtol=1e-6
        )


@pytest.mark.parametrize("mass", SLOTS)
def test_gradients_reach_every_key_and_value_that_is_seen(mass: str) -> None:
    inputs = [x.double().requires_grad_() for x in slot_inputs(3)]
    assert torch.autograd.gradcheck(
        lambda *x: MeanValueSlot(3, mass)(*x, is_causal=True), inputs, atol=1e-6
    )


def test_weights_that_are_not_renormalised_leave_the_missing_mass_out() -> None:
    inputs = slot_inputs(1)
    mass = attention_weights(*inputs[:2]).topk(3).values.sum(-1, keepdim=True)
    expected = mass * OptimalValueOblivious(3)(*inputs)
    torch.testing.assert_close(UnrenormalisedKeys(3)(*inputs), expected)
    torch.testing.assert_close(UnrenormalisedKeys(KEYS)(*inputs), attention(*inputs))
