"""Methods of benchmarks and controls of values; rounds go on until a comparison is decided."""

from collections.abc import Callable
from itertools import combinations, count, cycle, product
from typing import Any

import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor

from benchmarks import joint_oracle, numerics
from benchmarks.mean_candidate import (
    AttentionWeights,
    MeanOfOthers,
    OtherCandidate,
    mean_of_half,
    methods,
    zeros,
)
from benchmarks.peers import PEERS, Given, Pair, built, difference
from benchmarks.permuted_values import permuted
from benchmarks.ratio import Ratio, median_interval
from benchmarks.rounds import in_rounds, ratio, verdict
from value_aware_attention import approximations, caches
from value_aware_attention.approximations import Approximation, OptimalValueAware
from value_aware_attention.attention import attention, attention_weights
from value_aware_attention.call import Call
from value_aware_attention.kernels import Exponential
from value_aware_attention.weights import mean_of_visible


def test_every_cache_method_and_approximation_is_in_the_table() -> None:
    classes = {type(build(4)) for build in numerics.CACHES.values()}
    exported = (getattr(caches, name) for name in caches.__all__)
    methods = {x for x in exported if isinstance(x, type) and issubclass(x, caches.CacheMethod)}
    assert classes == methods - {caches.CacheMethod}
    exported = (getattr(approximations, name) for name in approximations.__all__)
    ours = {x for x in exported if isinstance(x, type) and issubclass(x, Approximation)}
    ours = {x for x in ours if not x.__abstractmethods__}
    assert ours <= {type(case.method) for case in numerics.cases().values()}


def test_errors_shrink_with_the_digits_of_the_dtype() -> None:
    inputs = numerics.inputs_of_every_kind(64, 64)["ordinary"]
    case = numerics.MethodCall(approximations.OptimalValueOblivious(4))
    cells = [numerics.cell("method", case, "ordinary", inputs, dtype) for dtype in numerics.DTYPES]
    assert all(0 < measured.largest < 1e-2 for measured in cells)
    assert cells[0].largest > 1e3 * cells[2].largest > 1e9 * cells[3].largest


def test_rows_that_choose_other_keys_are_counted() -> None:
    """Keys that differ by less than an input's last digits are not told apart in fp32."""
    query, key, value = numerics.inputs_of_every_kind(64, 64)["ordinary"]
    near = key[..., :1, :] + 1e-9 * key
    nearer = near.float().double() + 1e-9 * key.flip(-2)
    for case, together in (
        (numerics.MethodCall(approximations.OptimalValueOblivious(4)), 1),
        (numerics.MethodCall(caches.AfterPrefix(caches.ObservedAttention(4), prefix=None)), 32),
    ):
        other = numerics.other_keys(case, (query, near, value), (query, nearer, value))
        assert other.shape == (1, 4, 32) and other.any() and other.sum() % together == 0
        assert not numerics.other_keys(case, (query, key, value), (query, key, value)).any()


class Overflowing(Approximation):
    """Exact attention that overflows in fp16's range."""

    def approximate(self, call: Call) -> torch.Tensor:
        return call.output() * (1e30 if call.query.dtype == torch.float32 else 1.0)

    def multiply_adds(self, sizes: object) -> float:
        return 0.0


def test_what_is_not_finite_or_far_is_bold() -> None:
    inputs = numerics.inputs_of_every_kind(64, 64)["ordinary"]
    overflow = numerics.cell(
        "overflow", numerics.MethodCall(Overflowing()), "ordinary", inputs, "fp16"
    )
    assert overflow.non_finite_rows == overflow.rows and overflow.far
    far = numerics.cell("far", numerics.MethodCall(Overflowing()), "ordinary", inputs, "fp32")
    assert (
        far.far
        and numerics._text(far).startswith("**")
        and "not finite" in numerics._text(overflow)
    )


# Six steps of the pseudo-inverse's iteration leave what they start from visible.
TOLERANCES = {"Nyströmformer": 3e-2}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", PEERS)
@torch.inference_mode()
def test_ours_and_the_peers_outputs_agree_where_said(method: str) -> None:
    pair = built(method, 256)
    ours, peer = pair.ours(), pair.peer()
    assert ours.shape == peer.shape and peer.std() > 0.01
    if pair.same:
        assert difference(pair, ours, peer) < TOLERANCES.get(method, 1e-5)
        torch.testing.assert_close(pair.peer(), peer)  # which wrote into none of its inputs
    else:
        assert difference(pair, ours, peer) > 1e-3  # said not to be the same


def test_a_projection_that_is_given_costs_nothing_but_where_it_is_written_into() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    assert Given(x)(x).data_ptr() == x.data_ptr()
    copied = Given(x, copied=True)(x)
    assert copied.data_ptr() != x.data_ptr() and torch.equal(copied, x)


def test_difference_is_relative_and_leaves_the_margin_out() -> None:
    peer = torch.full((2, 5, 3), 4.0)
    ours = peer.clone()
    ours[0, 0, 0], ours[1, 2, 1] = 100.0, 5.0
    pair = Pair(lambda: ours, lambda: peer, ("", ""), "all", margin=1)
    assert difference(pair, ours, peer) == 0.25


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


def test_each_query_keeps_its_weights_among_the_keys_it_sees() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 12, 4, generator=generator) for _ in range(3))
    call = Call.of(query, key, value, kernel=Exponential(), is_causal=True)
    mixed = permuted(call)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    assert not mixed.weights[..., ~visible].any()
    torch.testing.assert_close(mixed.weights.sort(dim=-1)[0], call.weights.sort(dim=-1)[0])
    assert not torch.allclose(mixed.weights, call.weights)
    assert mixed.value.equal(call.value)


@pytest.mark.parametrize("size", [6, 7, 8, 11])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_the_interval_misses_the_median_as_seldom_as_it_says(size: int, level: float) -> None:
    """Misses are counted over all signs of values around a median of 0."""
    sizes = [1.0 + number / 100 for number in range(size)]
    signed = [
        [sign * value for sign, value in zip(signs, sizes, strict=True)]
        for signs in product((-1, 1), repeat=size)
    ]
    intervals = [median_interval(values, level) for values in signed]
    if None in intervals:
        assert 2 * 0.5**size > 1 - level
    else:
        assert sum(not low <= 0 <= high for low, high in intervals) / 2**size <= 1 - level


def test_a_ratio_lies_between_bounds_with_its_whole_interval() -> None:
    half = Ratio.of([0.5] * 6)
    assert (half.median, half.low, half.high) == (0.5, 0.5, 0.5)
    assert half.within(0.4, 0.6) and half.within(0.6, 1.0) is False and str(half) == "0.5"
    noisy = Ratio.of([0.8, 0.9, 0.9, 0.9, 0.9, 1.3])
    assert noisy.within(0.0, 1.0) is None and str(noisy) == "0.9 (0.8 to 1.3)"
    assert Ratio.of([0.5] * 5).within(0.0, 1.0) is None  # too few for an interval


def times(*values: float) -> Callable[[], float]:
    seconds = cycle(values)
    return lambda: next(seconds)


def test_rounds_end_when_all_pairs_are_decided() -> None:
    works = {"ours": times(1.0), "slower": times(2.0), "equal": times(1.0, 1.01)}
    spent = in_rounds(works, [("ours", "slower"), ("ours", "equal")], 60.0)
    assert [len(each) for each in spent.values()] == [8] * 3
    assert verdict(ratio(spent, "ours", "slower")) == "faster"
    assert verdict(ratio(spent, "slower", "ours")) == "slower"
    assert verdict(ratio(spent, "ours", "equal")) == "equal"


def test_rounds_of_an_undecided_pair_end_with_the_time_or_at_the_last_look() -> None:
    works = {"ours": times(1.0, 3.0), "peer": times(2.0)}
    spent = in_rounds(works, [("ours", "peer")], 0.0)
    assert len(spent["ours"]) == 3 and verdict(ratio(spent, "ours", "peer")) == "undecided"
    spent = in_rounds(works, [("ours", "peer")], 60.0)
    assert len(spent["ours"]) == 128 and verdict(ratio(spent, "ours", "peer")) == "undecided"


def test_the_first_round_is_not_counted_and_every_other_runs_backwards() -> None:
    order: list[str] = []
    number = count()

    def noted(name: str) -> Callable[[], float]:
        def work() -> float:
            order.append(name)
            return float(next(number))

        return work

    spent = in_rounds({name: noted(name) for name in "ab"}, [("a", "b")], 0.0)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert spent == {"a": [2.0, 5.0, 6.0], "b": [3.0, 4.0, 7.0]}


def test_heads_make_up_for_each_others_errors(inputs: list[Tensor]) -> None:
    """A head's turn comes near the best of all sets; after it no query's joint error is larger."""
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.o_proj = torch.nn.Linear(12, 9, bias=False)
    call = Call.of(*inputs, kernel=Exponential(), **CAUSAL)
    heads = joint_oracle.Heads(call, layer, OptimalValueAware(4, mean=True)(*inputs, **CAUSAL))

    def joint() -> Tensor:
        return torch.einsum("hnv,hve->ne", heads.error, heads.weight)

    others, before = heads.error[1] @ heads.weight[1], joint().square().sum(dim=-1)
    ours = (heads.solved(0, others) @ heads.weight[0] + others).square().sum(dim=-1)
    for row in range(6, 10):
        visible = heads.value[0, : row + 1]
        candidates = torch.cat([visible, visible.mean(dim=0, keepdim=True)])
        atoms = (candidates - heads.exact[0, row]) @ heads.weight[0] + others[row]
        sums_to_one = 1e4 * torch.ones(len(atoms), 1)
        lifted, target = torch.cat([atoms, sums_to_one], dim=-1).numpy(), [0.0] * 9 + [1e4]
        least = min(nnls(lifted[[*s]].T, target)[1] ** 2 for s in combinations(range(row + 2), 4))
        assert least * (1 - 1e-6) <= ours[row] <= least * 1.1
    heads.take_turns()
    after = joint().square().sum(dim=-1)
    assert (after <= before * (1 + 1e-12)).all() and after.sum() < 0.7 * before.sum()
