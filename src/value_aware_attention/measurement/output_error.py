"""How far the output is from exact attention's as more keys are kept: curves of every method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from value_aware_attention.approximations import (
    LeaveOneOutKeys,
    NormWeightedKeys,
    ObliviousKeysOptimalWeights,
    OptimalValueAware,
    SparseApproximation,
    ValueAwareKeysAttentionWeights,
)
from value_aware_attention.call import max_elements
from value_aware_attention.distributed import shared_map
from value_aware_attention.measurement.keys_needed import matching_keys, matching_keys_of_queries
from value_aware_attention.measurement.sampled_rows import SampledRows, sample_rows
from value_aware_attention.measurement.task import LayerCall

__all__ = ["oblivious_path", "output_error", "rounded"]

Array = NDArray[np.float64]
MATCHED = (1, 2, 4, 8, 16, 32)
"""Numbers of value-aware keys that keys by weight are counted for."""

SELECTIONS: Mapping[str, Callable[[int], SparseApproximation]] = {
    "oblivious_keys_optimal_weights": ObliviousKeysOptimalWeights,
    "norm_weighted_keys_2": partial(NormWeightedKeys, norm=2),
    "norm_weighted_keys_1": partial(NormWeightedKeys, norm=1),
    "leave_one_out_keys": LeaveOneOutKeys,
}


@dataclass(frozen=True)
class _LayerErrors:
    """What the rows of a layer leave; by unit: summed over its heads and rows."""

    curves: Mapping[str, Mapping[int, float]]
    """Mean squared error of every method by the number of keys kept."""
    squared_norm: Array
    """||o||^2, (units,)"""
    oblivious: Array
    """||o - o~||^2 of the top r keys for r = 1 to M, (units, M)"""
    aware: Array
    """The same of value-aware keys for every size measured, (units, R)"""
    matches: Mapping[int, NDArray[np.int64]]
    """By r, `matching_keys_of_queries` of every row"""


@torch.inference_mode()
def output_error(
    calls: Sequence[LayerCall], *, rows: int = 256, search: str = "default"
) -> dict[str, Any]:
    """The record of ||o - o~||^2 against the number of keys, of every layer with its own kernel.

    Means over `rows` queries a layer, spread over its units and heads and rounded to six digits:
    attention's top keys (Eq. 2) at every size, the value-aware choice at every size to
    value_dim + 1 (proved optimal at the ends, best found between, see `OptimalValueAware`),
    value-aware keys with attention's weights, the other methods between the two at powers of two,
    and Maurey's bound Var_alpha / r, the expected error of r keys drawn from alpha. A relative
    error is a ratio of these means, so of sums. `matching_keys` has, pooled and for each layer, how
    many keys by weight match r value-aware ones, with its 95% interval over units and the quartiles
    of single queries (`evaluation.keys_needed`).
    """
    first = sample_rows(calls[0], rows)
    layers = shared_map(lambda call: _layer_errors(sample_rows(call, rows), search), calls)
    curves = [layer.curves for layer in layers]
    return {
        "search": search,
        "rows": first.count,
        "units": first.query.shape[0],
        "keys": first.key.shape[-2],
        "head_dim": first.value.shape[-1],
        "kernel": type(first.kernel).__name__.lower(),
        "squared_norm": [rounded(layer.squared_norm.sum() / first.count) for layer in layers],
        "methods": {
            name: {
                "sizes": list(curves[0][name]),
                "layers": [[rounded(error) for error in curve[name].values()] for curve in curves],
            }
            for name in curves[0]
        },
        "matching_keys": [
            {"layer": layer, "r": r, **_matching(pool, r)}
            for layer, pool in ((None, layers), *((i, [one]) for i, one in enumerate(layers)))
            for r in layers[0].matches
        ],
    }


def _layer_errors(rows: SampledRows, search: str) -> _LayerErrors:
    keys = rows.key.shape[-2]
    largest = min(rows.value.shape[-1] + 1, keys)
    oblivious = oblivious_path(rows)
    aware = rows.given_to(OptimalValueAware(largest, search).path)
    return _LayerErrors(
        curves=_curves(rows, oblivious, aware),
        squared_norm=_by_unit((rows.weights() @ rows.value).square()).sum(axis=1),
        oblivious=_by_unit(oblivious),
        aware=_by_unit(aware),
        matches=_matches(rows, oblivious, aware),
    )


def _by_unit(numbers: Float[Tensor, "B H N R"]) -> Array:
    sums: Array = numbers.sum(dim=(1, 2)).cpu().numpy()
    return sums


def _matches(
    rows: SampledRows, oblivious: Float[Tensor, "B H N M"], aware: Float[Tensor, "B H N R"]
) -> dict[int, NDArray[np.int64]]:
    """Of every row and each of `MATCHED` that is a size below all keys."""
    keys, largest = oblivious.shape[-1], aware.shape[-1]
    every = torch.full(oblivious.shape[:-1], keys)
    seen = every if rows.visible is None else rows.visible.sum(dim=-1)
    by_weight, few = (x.flatten(0, 2).cpu().numpy() for x in (oblivious, aware))
    return {
        r: matching_keys_of_queries(by_weight, few[:, r - 1], seen.flatten().cpu().numpy())
        for r in MATCHED
        if r <= largest and r < keys
    }


def _matching(layers: Sequence[_LayerErrors], r: int) -> dict[str, Any]:
    """The pooled match of these layers with its interval, and the quartiles over their queries."""
    oblivious, norm = (
        np.sum([getattr(layer, name) for layer in layers], axis=0)
        for name in ("oblivious", "squared_norm")
    )
    aware = np.sum([layer.aware[:, r - 1] for layer in layers], axis=0)
    counts = np.concatenate([layer.matches[r] for layer in layers])
    quartiles = np.quantile(counts, (0.25, 0.5, 0.75), method="inverted_cdf")
    names = ("lower_quartile", "median", "upper_quartile")
    return matching_keys(oblivious, aware, norm) | dict(
        zip(names, map(int, quartiles), strict=True)
    )


def _curves(
    rows: SampledRows, oblivious: Float[Tensor, "B H N M"], aware: Float[Tensor, "B H N R"]
) -> dict[str, dict[int, float]]:
    """Mean squared error of every method by the number of keys kept."""
    keys, largest = oblivious.shape[-1], aware.shape[-1]
    keys_only = rows.given_to(ValueAwareKeysAttentionWeights(largest).path)
    curves = {
        "optimal_v_oblivious": _by_size(oblivious),
        "optimal_v_aware": _by_size(aware),
        "value_aware_keys_attention_weights": _by_size(keys_only),
    }
    for name, method in SELECTIONS.items():
        curves[name] = {
            r: rows.given_to(method(r).select).error.mean().item() for r in _powers(largest)
        }
    curves["maurey_bound"] = {r: _variance(rows) / r for r in _powers(keys)}
    return curves


def _by_size(path: Float[Tensor, "B H N R"]) -> dict[int, float]:
    return dict(enumerate(path.flatten(0, -2).mean(dim=0).tolist(), start=1))


def _powers(largest: int) -> list[int]:
    """1, 2, 4, ... up to `largest`."""
    return [1 << power for power in range(largest.bit_length())]


def oblivious_path(rows: SampledRows, largest: int | None = None) -> Float[Tensor, "B H N R"]:
    """||o - o~||^2 of the top r keys by alpha, renormalised (Eq. 2), for r = 1..`largest`.

    None = every size to M. It is sum_S alpha_i (v_i - o) / sum_S alpha_i over growing S, so one
    sort serves all of them. Ties are taken in the order of the keys.
    """
    weights = rows.weights()
    ranked = weights.sort(dim=-1, descending=True, stable=True)
    kept, order = (x[..., :largest].flatten(0, 2) for x in ranked)
    output = (weights @ rows.value).flatten(0, 2)
    value = rows.value.flatten(0, 1)
    number = torch.arange(len(order), device=order.device)
    head = number // weights.shape[-2]
    errors = []
    held = max_elements() // 4  # fp64 gathered: half of what a matrix of fp32 may take
    for part in number.split(max(1, held // (order.shape[-1] * value.shape[-1]))):
        offset = value[head[part, None], order[part]] - output[part, None]
        error = (kept[part, :, None] * offset).cumsum(dim=-2).square().sum(dim=-1)
        errors.append(error / kept[part].cumsum(dim=-1).square())
    return torch.cat(errors).view(*weights.shape[:-1], -1)


def _variance(rows: SampledRows) -> float:
    """Mean of Var_alpha = sum_i alpha_i ||v_i||^2 - ||o||^2, with the values centred per head."""
    value = rows.value - rows.value.mean(dim=-2, keepdim=True)
    weights = rows.weights()
    second = (weights @ value.square().sum(dim=-1)[..., None])[..., 0]
    return (second - (weights @ value).square().sum(dim=-1)).clamp_min(0).mean().item()


def rounded(number: float) -> float:
    """Six significant digits: what a mean over a few hundred rows can bear, and a small record."""
    return float(f"{number:.6g}")
