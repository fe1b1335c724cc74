"""How far the output is from exact attention's as more keys are kept: curves of every method."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.approximations import (
    LeaveOneOutKeys,
    NormWeightedKeys,
    ObliviousKeysOptimalWeights,
    OptimalValueAware,
    SparseApproximation,
    ValueAwareKeysAttentionWeights,
)
from value_aware_attention.approximations.approximation import numbers_at_once
from value_aware_attention.attention import attention_weights
from value_aware_attention.distributed import shared_map
from value_aware_attention.evaluation.task import LayerCall, evenly_spaced
from value_aware_attention.kernels import Kernel

__all__ = [
    "SampledRows",
    "oblivious_path",
    "output_error",
    "rounded",
    "sample_rows",
]

SELECTIONS: Mapping[str, Callable[[int], SparseApproximation]] = {
    "oblivious_keys_optimal_weights": ObliviousKeysOptimalWeights,
    "norm_weighted_keys_2": partial(NormWeightedKeys, norm=2),
    "norm_weighted_keys_1": partial(NormWeightedKeys, norm=1),
    "leave_one_out_keys": LeaveOneOutKeys,
}


@dataclass(frozen=True)
class SampledRows:
    """Some queries of a layer against all their keys, heads apart, in fp64."""

    query: Float[Tensor, "B H N D"]
    key: Float[Tensor, "B H M D"]
    value: Float[Tensor, "B H M V"]
    kernel: Kernel
    visible: Bool[Tensor, "B H N M"] | None

    @property
    def count(self) -> int:
        """Rows in all, over batch and heads."""
        return math.prod(self.query.shape[:-1])

    def weights(self) -> Float[Tensor, "B H N M"]:
        """Their attention distributions alpha."""
        return attention_weights(self.query, self.key, kernel=self.kernel, attn_mask=self.visible)

    def given_to(self, method: Callable[..., Any]) -> Any:
        """What a method's `select` or `path` answers for these rows."""
        inputs = (self.query, self.key, self.value)
        return method(*inputs, kernel=self.kernel, attn_mask=self.visible)


def sample_rows(call: LayerCall, rows: int) -> SampledRows:
    """At least `rows` queries, if there are as many, from `first_row` on and evenly spaced.

    Every head gives equally many; the heads take turns, so that together they cover more positions
    than one of them. What the call masks becomes an explicit mask of the rows taken.
    """
    batch, heads, queries = call.query.shape[:-1]
    groups, available = batch * heads, queries - call.first_row
    per_head = min(math.ceil(rows / groups), available)
    spaced = torch.tensor(evenly_spaced(groups * available, groups * per_head)) // groups
    # row i of head h is number i * groups + h of the evenly spaced ones
    position = call.first_row + spaced.view(per_head, batch, heads).permute(1, 2, 0)
    position = position.to(call.query.device)
    query = call.query.gather(2, position[..., None].expand(-1, -1, -1, call.query.shape[-1]))
    visible = _visible(call, position)
    return SampledRows(query.double(), call.key.double(), call.value.double(), call.kernel, visible)


def _visible(call: LayerCall, position: Int[Tensor, "B H N"]) -> Bool[Tensor, "B H N M"] | None:
    """The keys that the queries at `position` see; None = all."""
    (batch, heads, queries), keys = call.query.shape[:-1], call.key.shape[-2]
    visible = None
    if call.is_causal:
        visible = torch.arange(keys, device=position.device) <= position[..., None]
    if call.attn_mask is not None:
        mask = call.attn_mask.expand(batch, heads, queries, keys)
        rows = mask.gather(2, position[..., None].expand(-1, -1, -1, keys))
        visible = rows if visible is None else visible & rows
    return visible


@torch.inference_mode()
def output_error(
    calls: Sequence[LayerCall], *, rows: int = 256, search: str = "default"
) -> dict[str, Any]:
    """The record of ||o - o~||^2 against the number of keys, of every layer with its own kernel.

    Means over `rows` queries a layer, rounded to six digits: attention's top keys (Eq. 2) at every
    size, the value-aware choice at every size to value_dim + 1 (proved optimal at the ends, best
    found between, see `OptimalValueAware`), value-aware keys with attention's weights, the other
    methods between the two at powers of two, and Maurey's bound Var_alpha / r, the expected error
    of r keys drawn from alpha.
    """
    first = sample_rows(calls[0], rows)
    norms, curves = zip(
        *shared_map(lambda call: _measured(sample_rows(call, rows), search), calls), strict=True
    )
    return {
        "search": search,
        "rows": first.count,
        "keys": first.key.shape[-2],
        "head_dim": first.value.shape[-1],
        "kernel": type(first.kernel).__name__.lower(),
        "squared_norm": [rounded(norm) for norm in norms],
        "methods": {
            name: {
                "sizes": list(curves[0][name]),
                "layers": [[rounded(error) for error in curve[name].values()] for curve in curves],
            }
            for name in curves[0]
        },
    }


def _measured(rows: SampledRows, search: str) -> tuple[float, dict[str, dict[int, float]]]:
    """||o||^2 and the curves of a layer."""
    return _squared_norm(rows), _curves(rows, search)


def _curves(rows: SampledRows, search: str) -> dict[str, dict[int, float]]:
    """Mean squared error of every method by the number of keys kept."""
    keys = rows.key.shape[-2]
    largest = min(rows.value.shape[-1] + 1, keys)
    aware = rows.given_to(OptimalValueAware(largest, search).path)
    keys_only = rows.given_to(ValueAwareKeysAttentionWeights(largest).path)
    curves = {
        "optimal_v_oblivious": _by_size(oblivious_path(rows)),
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
    held = numbers_at_once() // 4  # fp64 gathered: half of what a matrix of fp32 may take
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


def _squared_norm(rows: SampledRows) -> float:
    return (rows.weights() @ rows.value).square().sum(dim=-1).mean().item()


def rounded(number: float) -> float:
    """Six significant digits: what a mean over a few hundred rows can bear, and a small record."""
    return float(f"{number:.6g}")
