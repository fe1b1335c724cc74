"""The table of low precision holds every method, and says what is far from fp64."""

import json
from typing import Any

import torch

from benchmarks import numerics
from benchmarks.numerics import CACHES, Case, Cell, cell, inputs_of_every_kind, page
from tests.benchmarking.test_tables import HEADER
from value_aware_attention import approximations, caches
from value_aware_attention.approximations import Approximation
from value_aware_attention.call import Call


def table(cells: list[Cell]) -> str:
    record: dict[str, Any] = HEADER | {"cells": [vars(cell) for cell in cells]}
    return page(json.loads(json.dumps(record)))


def test_every_cache_method_and_approximation_is_in_the_table() -> None:
    classes = {type(build(4)) for build in CACHES.values()}
    exported = (getattr(caches, name) for name in caches.__all__)
    methods = {x for x in exported if isinstance(x, type) and issubclass(x, caches.CacheMethod)}
    assert classes == methods - {caches.CacheMethod}
    exported = (getattr(approximations, name) for name in approximations.__all__)
    ours = {x for x in exported if isinstance(x, type) and issubclass(x, Approximation)}
    ours = {x for x in ours if not x.__abstractmethods__}
    assert ours <= {type(case.method) for case in numerics.cases().values()}


def test_a_row_of_the_table() -> None:
    inputs = inputs_of_every_kind(64, 64)["ordinary"]
    case = Case(approximations.OptimalValueOblivious(4))
    cells = [cell("method", case, "ordinary", inputs, dtype) for dtype in numerics.DTYPES]
    assert all(0 < one.largest < 1e-2 for one in cells)
    assert cells[0].largest > 1e3 * cells[2].largest > 1e9 * cells[3].largest
    text = table(cells)
    assert "| method" in text and text.count("e-") >= 4 and "others" not in text.split("## ")[1]


def test_rows_that_choose_other_keys_are_counted() -> None:
    """Keys that differ by less than an input's last digits tell rows of fp32 apart no longer."""
    query, key, value = inputs_of_every_kind(64, 64)["ordinary"]
    near = key[..., :1, :] + 1e-9 * key
    nearer = near.float().double() + 1e-9 * key.flip(-2)
    for case, together in (
        (Case(approximations.OptimalValueOblivious(4)), 1),
        (Case(caches.AfterPrefix(caches.ObservedAttention(4), prefix=None)), 32),
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
    one = cell("overflow", Case(Overflowing()), "ordinary", inputs, "fp16")
    assert one.non_finite_rows == one.rows and one.far
    far = cell("far", Case(Overflowing()), "ordinary", inputs, "fp32")
    assert far.far and "**" in table([far]).split("## ")[1] and "not finite" in table([one])
