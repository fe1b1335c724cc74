"""Output error of every layer and head against the keys kept, over windows of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.measurement.intervals import ratio_of_sums
from value_aware_attention.measurement.keys_needed import keys_needed, matching_keys
from value_aware_attention.measurement.output_error import oblivious_path, rounded
from value_aware_attention.measurement.sampled_rows import sample_rows
from value_aware_attention.measurement.task import LayerCall

__all__ = ["AWARE", "OBLIVIOUS", "SHARES", "LayerErrors", "layer_error"]

OBLIVIOUS, AWARE = "optimal_v_oblivious", "optimal_v_aware"
SHARES = (0.01, 0.05, 0.1)
"""Relative output errors that keys are counted for."""
Array = NDArray[np.float64]


@torch.inference_mode()
def layer_error(call: LayerCall, *, rows: int, search: str) -> dict[str, Any]:
    """Means over `rows` sampled queries of each head: ||o||^2, and ||o - o~||^2 of every size.

    Attention's top keys (Eq. 2) at every size to M; the value-aware choice at every size to
    value_dim + 1, from one solve. Lists by head, and by head and size.
    """
    sampled = sample_rows(call, rows * call.query.shape[1])
    largest = min(call.value.shape[-1] + 1, call.key.shape[-2])
    output = sampled.weights() @ sampled.value
    return {
        "squared_norm": _by_head(output.square().sum(dim=-1, keepdim=True)),
        OBLIVIOUS: _by_head(oblivious_path(sampled)),
        AWARE: _by_head(sampled.given_to(OptimalValueAware(largest, search).path)),
    }


def _by_head(numbers: Tensor) -> list[list[float]]:
    means = numbers.double().mean(dim=(0, 2)).tolist()
    return [[rounded(number) for number in head] for head in means]


@dataclass(frozen=True)
class LayerErrors:
    """What `layer_error` measured in each layer on each window.

    A relative error is a ratio of sums over heads and windows; its interval is over windows.
    """

    squared_norm: Array
    """(windows, layers, heads, 1)"""
    paths: dict[str, Array]
    """method -> (windows, layers, heads, sizes)"""

    @classmethod
    def of(cls, windows: Sequence[Sequence[dict[str, Any]]]) -> "LayerErrors":
        """From the measurements of every layer of every window."""

        def stacked(name: str) -> Array:
            return np.array([[layer[name] for layer in window] for window in windows])

        methods = {name: stacked(name) for name in (OBLIVIOUS, AWARE)}
        return cls(stacked("squared_norm"), methods)

    def relative(self, method: str, axes: tuple[int, ...] = ()) -> tuple[Array, Array, Array]:
        """||o - o~||^2 / ||o||^2 with its interval: (layers, heads, sizes) without pooled `axes`.

        Axis 1 is layers, axis 2 heads.
        """
        return ratio_of_sums(self.paths[method].sum(axis=axes), self.squared_norm.sum(axis=axes))

    def curves(self) -> dict[str, Any]:
        """Mean errors of each layer, in the form of `output_error.output_error`."""
        return {
            "keys": self.paths[OBLIVIOUS].shape[-1],
            "squared_norm": _rounded(self.squared_norm.mean(axis=(0, 2, 3))),
            "methods": {
                method: {
                    "sizes": list(range(1, path.shape[-1] + 1)),
                    "layers": _rounded(path.mean(axis=(0, 2))),
                }
                for method, path in self.paths.items()
            },
        }

    def at_sizes(self, sizes: Sequence[int], axes: tuple[int, ...] = ()) -> dict[str, Any]:
        """Relative errors of each method at some sizes with their ends, `axes` pooled.

        method -> "error", "low", "high" -> nested lists over layers, heads and sizes.
        """
        record: dict[str, Any] = {}
        for method, path in self.paths.items():
            at = [min(size, path.shape[-1]) - 1 for size in sizes]  # the last one is exact
            ends = zip(("error", "low", "high"), self.relative(method, axes), strict=True)
            record[method] = {name: _rounded(values[..., at]) for name, values in ends}
        return record

    def needed(self) -> list[dict[str, Any]]:
        """Keys needed for each of `SHARES`: all layers pooled (layer None), each one, each head.

        `low` and `high` are the counts at the ends of the error's interval.
        """
        pools: dict[str, tuple[int, ...]] = {"all": (1, 2), "layer": (2,), "head": ()}
        return [
            {"layer": layer, "head": head, "share": share, "method": method}
            | {name: keys_needed(curve, share) for name, curve in ends.items()}
            for axes in pools.values()
            for method in self.paths
            for layer, head, ends in self._each(method, axes)
            for share in SHARES
        ]

    def matching(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """How many keys by weight match r value-aware ones, all layers pooled.

        For each of `sizes` that does not reach the exact output: `matching_keys`.
        """
        norm = self.squared_norm.sum(axis=(1, 2, 3))
        oblivious, aware = (self.paths[name].sum(axis=(1, 2)) for name in (OBLIVIOUS, AWARE))
        below = (r for r in sizes if r < aware.shape[-1])
        return [{"r": r} | matching_keys(oblivious, aware[:, r - 1], norm) for r in below]

    def _each(self, method: str, axes: tuple[int, ...]) -> list[tuple[Any, Any, dict[str, Array]]]:
        """(layer, head, the ends of its curve) for what is left of layers and heads."""
        ends = dict(zip(("keys", "low", "high"), self.relative(method, axes), strict=True))
        found = []
        for place in np.ndindex(ends["keys"].shape[:-1]):
            layer, head = (*place, None, None)[:2]
            found.append((layer, head, {name: curve[place] for name, curve in ends.items()}))
        return found


def _rounded(numbers: Array) -> Any:
    """Nested lists of six significant digits; None where a number is not known."""
    if numbers.ndim:
        return [_rounded(part) for part in numbers]
    return None if np.isnan(numbers) else rounded(float(numbers))
