"""The table of low precision holds every method and marks results far from fp64."""

import torch

from benchmarks import numerics
from benchmarks.numerics import CACHES, MethodCall, cell, inputs_of_every_kind
from value_aware_attention import approximations, caches
from value_aware_attention.approximations import Approximation
from value_aware_attention.call import Call


def test_every_cache_method_and_approximation_is_in_the_table() -> None:
    classes = {type(build(4)) for build in CACHES.values()}
    exported = (getattr(caches, name) for name in caches.__all__)
    methods = {x for x in exported if isinstance(x, type) and issubclass(x, caches.CacheMethod)}
    assert classes == methods - {caches.CacheMethod}
    exported = (getattr(approximations, name) for name in approximations.__all__)
    ours = {x for x in exported if isinstance(x, type) and issubclass(x, Approximation)}
    ours = {x for x in ours if not x.__abstractmethods__}
    assert ours <= {type(case.method) for case in numerics.cases().values()}


def test_errors_shrink_with_the_digits_of_the_dtype() -> None:
    inputs = inputs_of_every_kind(64, 64)["ordinary"]
    case = MethodCall(approximations.OptimalValueOblivious(4))
    cells = [cell("method", case, "ordinary", inputs, dtype) for dtype in numerics.DTYPES]
    assert all(0 < measured.largest < 1e-2 for measured in cells)
    assert cells[0].largest > 1e3 * cells[2].largest > 1e9 * cells[3].largest


def test_rows_that_choose_other_keys_are_counted() -> None:
    """Keys that differ by less than an input's last digits are not told apart in fp32."""
    query, key, value = inputs_of_every_kind(64, 64)["ordinary"]
    near = key[..., :1, :] + 1e-9 * key
    nearer = near.float().double() + 1e-9 * key.flip(-2)
    for case, together in (
        (MethodCall(approximations.OptimalValueOblivious(4)), 1),
        (MethodCall(caches.AfterPrefix(caches.ObservedAttention(4), prefix=None)), 32),
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
    inputs = inputs_of_every_kind(64, 64)["ordinary"]
    overflow = cell("overflow", MethodCall(Overflowing()), "ordinary", inputs, "fp16")
    assert overflow.non_finite_rows == overflow.rows and overflow.far
    far = cell("far", MethodCall(Overflowing()), "ordinary", inputs, "fp32")
    assert (
        far.far
        and numerics._text(far).startswith("**")
        and "not finite" in numerics._text(overflow)
    )
