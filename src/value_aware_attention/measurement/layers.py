"""Errors, needed keys and skewness of the attention of single layers and heads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
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
from value_aware_attention.call import Call, max_elements
from value_aware_attention.distributed import shared_map
from value_aware_attention.kernels import Polynomial
from value_aware_attention.measurement.recorded import error_rows, sample_rows
from value_aware_attention.records.estimate import Array, ratio_of_sums
from value_aware_attention.records.record import (
    AWARE,
    OBLIVIOUS,
    SHARES,
    SLOTS,
    Curve,
    ErrorAtSize,
    FirstToken,
    GapCell,
    KeysNeeded,
    MatchingKeys,
    MatchingSlots,
    OutputError,
    SearchGap,
    SkewnessGap,
)


def keys_needed(curve: Array, share: float) -> int | None:
    """Finds the smallest size with a relative error of at most `share`, else the last size.

    The last size is all keys, or value_dim + 1 value-aware ones: both are exact. None for an
    unknown curve (the interval of one unit, errors of a head whose outputs are all 0).
    """
    if np.isnan(curve).any():
        return None
    enough = curve <= share
    return int(enough.argmax()) + 1 if enough.any() else len(curve)


def matching_keys(oblivious: Array, aware: Array, squared_norm: Array) -> dict[str, int | None]:
    """Finds `keys`, the fewest keys by weight with at most the error of r value-aware ones.

    Errors are ||o - o~||^2 summed over the queries of a unit: (units, M) for 1 to M keys by weight,
    (units,) for the r value-aware keys; ||o||^2 likewise. All M keys suffice by definition.

    `low` and `high` are the ends of the 95% interval over units: the numbers of keys whose relative
    error may equal that of the value-aware keys, by the paired interval of `ratio_of_sums` (an
    inverted test, as in Fieller's theorem). None for a single unit.
    """
    return _counts(ratio_of_sums(oblivious - aware[:, None], squared_norm[:, None]), 0.0)


def _counts(ends: Sequence[Array], share: float) -> dict[str, int | None]:
    """Counts the keys that an error and the ends of its interval need, as fields of `KeyCount`."""
    keys, low, high = (keys_needed(curve, share) for curve in ends)
    return {"keys": keys, "low": low, "high": high}


def matching_keys_of_queries(
    oblivious: Array, aware: Array, visible: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Finds, for each query, the fewest keys by weight with at most its value-aware error.

    `oblivious` (queries, M) and `aware` (queries,) are ||o - o~||^2. All of a query's `visible`
    keys suffice by definition.
    """
    enough = oblivious <= aware[:, None]
    enough[np.arange(len(enough)), visible - 1] = True
    return enough.argmax(axis=1) + 1


def skewness(call: Call) -> dict[str, float]:
    """Computes `skewness_of` the rows for measuring a layer's errors, block by block."""
    shapes, rows = zip(
        *((skewness_of(b.weights), b.query.shape[-2]) for b in error_rows(call).blocks()),
        strict=True,
    )
    return {
        name: sum(n / sum(rows) * shape[name] for n, shape in zip(rows, shapes, strict=True))
        for name in shapes[0]
    }


def skewness_of(weights: Float[Tensor, "*batch N M"]) -> dict[str, float]:
    """Averages measures of skewness over rows of attention weights alpha.

    `largest_weight`: max_i alpha_i; `rows_over_half`: share of rows with a weight above 0.5, where
    section 3 expects values to matter least; `effective_keys`: exp(entropy of alpha);
    `keys_for_90_percent`: the fewest keys that hold 90% of the mass.
    """
    largest = weights.amax(dim=-1)
    ordered = weights.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    return {
        "largest_weight": largest.mean().item(),
        "rows_over_half": (largest > 0.5).float().mean().item(),
        "effective_keys": torch.special.entr(weights).sum(dim=-1).exp().mean().item(),
        "keys_for_90_percent": (1 + (ordered < 0.9).sum(dim=-1)).float().mean().item(),
    }


KEYS_ONLY, MAUREY = "value_aware_keys_attention_weights", "maurey_bound"
MATCHED = (1, 2, 4, 8, 16, 32)
"""Numbers of value-aware keys for counting the matching keys by weight"""
BETWEEN: Mapping[str, Callable[[int], SparseApproximation]] = {
    "oblivious_keys_optimal_weights": ObliviousKeysOptimalWeights,
    "norm_weighted_keys_2": partial(NormWeightedKeys, norm=2),
    "norm_weighted_keys_1": partial(NormWeightedKeys, norm=1),
    "leave_one_out_keys": LeaveOneOutKeys,
}
"""Methods between the two optimal ones"""
AT_EVERY_SIZE = (OBLIVIOUS, AWARE, KEYS_ONLY, *SLOTS.values())
"""Methods measured at every number of keys, not only at powers of two"""
AT_FIRST_TOKEN = (1, 4)
"""Numbers of keys with separate errors for queries that attend to the first token and others"""
POOLS: Sequence[tuple[int, ...]] = ((1, 2), (2,), ())
"""Axes of (units, layers, heads) to pool an error over: all, by layer, by head"""


@dataclass(frozen=True)
class LayerErrors:
    """Means over the sampled queries of one layer, by unit and head.

    They are ||o||^2 (units, heads, 1) and every method's ||o - o~||^2 (units, heads, sizes).
    `matches` has, by number of value-aware keys and for each query, the number of keys by weight
    that match them (units, queries).

    Attributes:
        rows: Queries per head and unit.
        first_token: Sums of `_first_token`, by unit (units, .).
    """

    rows: int
    keys: int
    squared_norm: Array
    paths: Mapping[str, Array]
    matches: Mapping[str, NDArray[np.int64]]
    first_token: Mapping[str, Array] = field(default_factory=dict)


@torch.inference_mode()
def layer_errors(
    call: Call, *, rows: int, search: str = "default", between: bool = True,
    matched: Sequence[int] = MATCHED, slots: bool = False,
) -> LayerErrors:  # fmt: skip
    """Measures `rows` sampled queries of each head and unit against all their keys, in fp64.

    It measures attention's top keys (Eq. 2) at every size, and the value-aware choice at every size
    up to value_dim + 1 (proved optimal at the ends, best known between, see `OptimalValueAware`).
    `between` adds value-aware keys with attention's weights at the same sizes, the methods of
    `BETWEEN` at powers of two, and Maurey's bound Var_alpha / r, the expected error of r keys drawn
    from alpha. `slots` adds both masses of `MeanValueSlot` at every size, and the attention to the
    first token.
    """
    sampled = sample_rows(call, rows * len(call.query) * call.query.shape[1])
    largest = min(sampled.value.shape[-1] + 1, sampled.key.shape[-2])
    oblivious = oblivious_path(sampled)
    aware = OptimalValueAware(largest, search).path(**sampled.arguments())
    paths = {OBLIVIOUS: oblivious, AWARE: aware}
    if between:
        paths |= _between(sampled, largest)
    norm = (sampled.weights @ sampled.value).square().sum(dim=-1, keepdim=True)
    first_token = {}
    if slots:
        paths |= {SLOTS[mass]: slot_path(sampled, mass) for mass in SLOTS}
        first_token = _first_token(sampled, paths, norm[..., 0])
    return LayerErrors(
        rows=sampled.query.shape[-2],
        keys=sampled.key.shape[-2],
        squared_norm=_by_unit_and_head(norm),
        paths={name: _by_unit_and_head(path) for name, path in paths.items()},
        matches=_matches(sampled, oblivious, aware, matched),
        first_token=first_token,
    )


def _by_unit_and_head(numbers: Float[Tensor, "B H N R"]) -> Array:
    return numbers.double().mean(dim=2).cpu().numpy()


def _between(rows: Call, largest: int) -> dict[str, Float[Tensor, "B H N R"]]:
    """Computes the errors of methods between the two optimal choices, and Maurey's bound."""
    paths = {KEYS_ONLY: ValueAwareKeysAttentionWeights(largest).path(**rows.arguments())}
    for name, method in BETWEEN.items():
        paths[name] = torch.stack(
            [method(r).select(**rows.arguments()).error for r in _powers(largest)], dim=-1
        )
    sizes = torch.tensor(_powers(rows.key.shape[-2]), device=rows.value.device)
    # Var_alpha = sum_i alpha_i ||v_i||^2 - ||o||^2, with values centred per head
    value = rows.value - rows.value.mean(dim=-2, keepdim=True)
    second = rows.weights @ value.square().sum(dim=-1, keepdim=True)
    variance = second[..., 0] - (rows.weights @ value).square().sum(dim=-1)
    return paths | {MAUREY: variance.clamp_min(0)[..., None] / sizes}


def _matches(
    rows: Call, oblivious: Float[Tensor, "B H N M"], aware: Float[Tensor, "B H N R"],
    matched: Sequence[int],
) -> dict[str, NDArray[np.int64]]:  # fmt: skip
    """Counts `matching_keys_of_queries` of every row, for each size below the exact ones."""
    units, keys = oblivious.shape[0], oblivious.shape[-1]
    by_weight, few = (x.flatten(0, 2).cpu().numpy() for x in (oblivious, aware))
    counts = (
        np.full(len(few), keys)
        if rows.visible is None
        else rows.visible.sum(dim=-1).flatten().cpu().numpy()
    )
    return {
        str(r): matching_keys_of_queries(by_weight, few[:, r - 1], counts).reshape(units, -1)
        for r in matched
        if r <= aware.shape[-1] and r < keys
    }


def oblivious_path(rows: Call, largest: int | None = None) -> Float[Tensor, "B H N R"]:
    """Computes ||o - o~||^2 of the top r keys by alpha, renormalised (Eq. 2), for r = 1..`largest`.

    None = all sizes up to M. The difference is sum_S alpha_i (v_i - o) / sum_S alpha_i over growing
    S, so one sort serves all sizes. Tied keys keep their order.
    """
    weights = rows.weights
    mass, order = (
        x[..., :largest].flatten(0, 2) for x in weights.sort(dim=-1, descending=True, stable=True)
    )
    output = (weights @ rows.value).flatten(0, 2)
    value = rows.value.flatten(0, 1)
    number = torch.arange(len(order), device=order.device)
    head = number // weights.shape[-2]
    errors = []
    # a quarter, gathered in fp64: half of the memory of an fp32 matrix
    for block in number.split(max(1, max_elements() // 4 // (order.shape[-1] * value.shape[-1]))):
        offset = value[head[block, None], order[block]] - output[block, None]
        error = (mass[block, :, None] * offset).cumsum(dim=-2).square().sum(dim=-1)
        errors.append(error / mass[block].cumsum(dim=-1).square())
    return torch.cat(errors).view(*weights.shape[:-1], -1)


def slot_path(rows: Call, mass: str) -> Float[Tensor, "B H N M"]:
    """Computes ||o - o~||^2 of `MeanValueSlot(r, mass)` for r = 1..M, from one sort of the weights.

    The largest r - 1 keys are a prefix of the sorted keys, and the others a suffix. The sums over
    both change by one key per r.
    """
    scores = rows.kernel.log_similarity(rows.query, rows.key).expand(*rows.batch, -1, -1)
    if rows.visible is not None:
        scores = scores.masked_fill(~rows.visible, -torch.inf)
    logs, order = (
        x.flatten(0, 2)
        for x in scores.log_softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    )
    total, query = (x.flatten(0, 2) for x in (scores.logsumexp(dim=-1), rows.query))
    head = torch.arange(len(order), device=order.device) // rows.query.shape[-2]
    errors = []
    # an eighth: keys and values are gathered in fp64
    for block in torch.arange(len(order)).split(
        max(1, max_elements() // 8 // rows.value[0, 0].numel())
    ):
        at, log = (head[block, None], order[block]), logs[block]
        others = log.isfinite().flip(-1).cumsum(dim=-1).flip(-1)  # visible keys from each place on
        value, key = (x.flatten(0, 1)[at] for x in (rows.value, rows.key))
        terms, weight = log.exp()[..., None] * value, log.exp()
        largest = weight.cumsum(dim=-1) - weight
        slot = 1 - largest
        if mass == "mean_key":
            mean_key = _means_of_others(key, others)
            similar = rows.kernel.log_similarity(query[block, None], mean_key)[:, 0]
            slot = (similar + others.clamp_min(1).log() - total[block, None]).exp()
        slot = slot.where(others > 0, 0.0)[..., None]
        sums = terms.cumsum(dim=-2) - terms + slot * _means_of_others(value, others)
        offset = sums / (largest[..., None] + slot) - terms.sum(dim=-2, keepdim=True)
        errors.append(offset.square().sum(dim=-1))
    return torch.cat(errors).view(*rows.query.shape[:-1], -1)


def _means_of_others(
    ranked: Float[Tensor, "Q M D"], others: Int[Tensor, "Q M"]
) -> Float[Tensor, "Q M D"]:
    """Averages vectors from each place of a ranking to the last visible one; `others` of them."""
    visible = ranked.where((others > 0)[..., None], 0.0)
    return visible.flip(1).cumsum(dim=1).flip(1) / others.clamp_min(1)[..., None]


def _first_token(
    rows: Call, paths: Mapping[str, Float[Tensor, "B H N R"]], norm: Float[Tensor, "B H N"]
) -> dict[str, Array]:
    """Sums a unit's data for `FirstToken`, separately for queries that attend to it and others."""
    weights = rows.weights.expand(*rows.batch, -1, -1)
    top = weights.argmax(dim=-1) == 0
    length = rows.value.norm(dim=-1).expand(*rows.batch, -1)
    at_first = torch.stack([top, ~top]).double()

    def summed(numbers: Float[Tensor, "B H N"]) -> list[Tensor]:
        return [(numbers * part).sum(dim=(1, 2)) for part in at_first]

    sums = {
        "queries": torch.stack(summed(torch.ones_like(norm)), dim=-1),
        "mass": weights[..., 0].sum(dim=(1, 2))[:, None],
        "lengths": torch.stack([length[..., 0].mean(1), length.mean(dim=(1, 2))], dim=-1),
        "norm": torch.stack(summed(norm), dim=-1),
    }
    for method, r in product((OBLIVIOUS, AWARE), AT_FIRST_TOKEN):
        error = paths[method][..., min(r, paths[method].shape[-1]) - 1]
        sums[f"{method} {r}"] = torch.stack(summed(error), dim=-1)
    return {name: numbers.double().cpu().numpy() for name, numbers in sums.items()}


def output_error(
    layers: Sequence[LayerErrors], calls: Sequence[Call], *, search: str, unit: str,
    sizes: Sequence[int],
) -> OutputError:  # fmt: skip
    """Makes the record of all layers: curves, and counts on them with intervals over units.

    Means are rounded to six digits. A relative error is a ratio of sums, pooled over all layers, by
    layer and by head, at `sizes`; None if the outputs are all 0. Raises ValueError if the outputs
    of all layers are 0.
    """
    norms = np.stack([layer.squared_norm for layer in layers], axis=1)
    paths = {name: np.stack([layer.paths[name] for layer in layers], 1) for name in layers[0].paths}
    if not norms.any():
        raise ValueError("every layer's attention gives 0: no error is a share of that")
    units, _, heads, _ = norms.shape
    curves = list(_curves(norms, paths))
    return OutputError(
        search=search,
        rows=layers[0].rows * heads * units,
        units=units,
        unit=unit,
        keys=layers[0].keys,
        heads=heads,
        head_dim=calls[0].value.shape[-1],
        causal=calls[0].is_causal,
        squared_norm=tuple(map(rounded, norms.mean(axis=(0, 2, 3)))),
        methods={
            name: Curve(
                sizes=tuple(
                    range(1, path.shape[-1] + 1)
                    if name in AT_EVERY_SIZE
                    else (1 << place for place in range(path.shape[-1]))
                ),
                layers=tuple(tuple(map(rounded, layer)) for layer in path.mean(axis=(0, 2))),
            )
            for name, path in paths.items()
        },
        matching_keys=tuple(_matching(layers)),
        matching_slots=tuple(_matching_slots(layers)),
        first_token=tuple(
            _of_first_token(number, layer.first_token)
            for number, layer in enumerate(layers)
            if layer.first_token
        ),
        keys_needed=tuple(_keys_needed(curves)),
        errors=tuple(_errors(curves, sizes)),
    )


PooledCurve = tuple[int | None, int | None, str, list[Array]]
"""Layer, head (None = pooled), method, and its relative errors with their low and high ends"""


def _curves(norms: Array, paths: Mapping[str, Array]) -> Iterator[PooledCurve]:
    """Pools errors (units, layers, heads, sizes) relative to ||o||^2, which has one size."""
    for axes in POOLS:
        for method in (OBLIVIOUS, AWARE):
            ends = ratio_of_sums(paths[method].sum(axis=axes), norms.sum(axis=axes))
            for place in np.ndindex(ends[0].shape[:-1]):
                layer, head = (*place, None, None)[:2]
                yield layer, head, method, [curve[place] for curve in ends]


def _keys_needed(curves: Sequence[PooledCurve]) -> Iterator[KeysNeeded]:
    """Counts the keys needed for each of `SHARES`."""
    for (layer, head, method, ends), share in product(curves, SHARES):
        yield KeysNeeded(layer=layer, head=head, method=method, share=share, **_counts(ends, share))


def _errors(curves: Sequence[PooledCurve], sizes: Sequence[int]) -> Iterator[ErrorAtSize]:
    """Yields the errors at `sizes`; beyond its largest size a method is exact."""
    for (layer, head, method, ends), r in product(curves, sizes):
        error, low, high = (_known(curve[min(r, len(curve)) - 1]) for curve in ends)
        yield ErrorAtSize(
            layer=layer, head=head, method=method, r=r, error=error, low=low, high=high
        )


def _matching(layers: Sequence[LayerErrors]) -> Iterator[MatchingKeys]:
    """Counts `matching_keys` of all layers pooled, then of each, with quartiles over queries."""
    for layer, pool, _, r, counts in _matched(layers, {"weight": OBLIVIOUS}):
        by_query = np.concatenate([errors.matches[str(r)].ravel() for errors in pool])
        lower, median, upper = map(
            int, np.quantile(by_query, (0.25, 0.5, 0.75), method="inverted_cdf")
        )
        yield MatchingKeys(
            layer=layer, r=r, lower_quartile=lower, median=median, upper_quartile=upper, **counts
        )


def _matching_slots(layers: Sequence[LayerErrors]) -> Iterator[MatchingSlots]:
    """Counts the slots that match value-aware keys, if they were measured."""
    slots = {mass: path for mass, path in SLOTS.items() if path in layers[0].paths}
    for layer, _, mass, r, counts in _matched(layers, slots):
        yield MatchingSlots(layer=layer, r=r, mass=mass, **counts)


def _matched(
    layers: Sequence[LayerErrors], choices: Mapping[str, str]
) -> Iterator[tuple[int | None, Sequence[LayerErrors], str, int, dict[str, int | None]]]:
    """Counts `matching_keys` of each choice (name -> path), in all layers pooled, then in each.

    Yields the layer (None = all), its errors, the choice, the number of value-aware keys, and the
    counts that match.
    """
    pools = [(None, layers), *((number, [layer]) for number, layer in enumerate(layers))]
    for (layer, pool), (name, path) in product(pools, choices.items()):
        few, aware, norm = (
            sum(sums.sum(axis=1) for sums in arrays)
            for arrays in zip(
                *((e.paths[path], e.paths[AWARE], e.squared_norm) for e in pool), strict=True
            )
        )
        for r in map(int, layers[0].matches):
            yield layer, pool, name, r, matching_keys(few, aware[:, r - 1], norm[:, 0])


def _of_first_token(layer: int, sums: Mapping[str, Array]) -> FirstToken:
    """Makes the record of a layer from sums by unit."""
    totals = {name: array.sum(axis=0) for name, array in sums.items()}
    queries = totals["queries"]
    first, mean = totals["lengths"]
    errors: dict[str, dict[str, tuple[float | None, ...]]] = {}
    for method, r in product((OBLIVIOUS, AWARE), AT_FIRST_TOKEN):
        with np.errstate(invalid="ignore"):
            parts = totals[f"{method} {r}"] / totals["norm"]
        errors.setdefault(method, {})[str(r)] = tuple(map(_known, parts))
    return FirstToken(
        layer=layer,
        mass=rounded(totals["mass"][0] / queries.sum()),
        top=rounded(queries[0] / queries.sum()),
        value_norm=rounded(first / mean) if mean else None,
        errors=errors,
    )


def _powers(largest: int) -> list[int]:
    """Lists 1, 2, 4, ... up to `largest`."""
    return [1 << power for power in range(largest.bit_length())]


def rounded(number: float) -> float:
    """Rounds to six digits: the precision of a mean over a few hundred rows, in a small record."""
    return float(f"{number:.6g}")


def _known(number: float) -> float | None:
    return None if np.isnan(number) else rounded(float(number))


@torch.inference_mode()
def skewness_gap(
    calls: Sequence[Call], *, rows: int, search: str = "default", seed: int = 0
) -> SkewnessGap:
    """Measures every layer under several kernels, on `rows` queries of each head and unit.

    The kernels are the layer's own, and post hoc polynomials of degree 0, 2, 4, 6. For each it
    measures the skewness of the rows, and the relative errors (summed squared error / summed
    squared norm of the output) of attention's top r keys and of r value-aware keys. It also counts
    the rows where both keep the same key at r = 1. At degree 0 it also counts how often the
    value-aware key is argmin ||v_i||, as section 3 derives for orthogonal values, and argmin
    ||v_i||^2 - 2 <v_i, mean v>, as Eq. 3 gives for all values.

    Keys come in a random order, different in every head, because tied weights (all are at degree 0)
    are taken in order, and a text's first tokens differ from the others.
    """
    count = rows * len(calls[0].query) * calls[0].query.shape[1]

    def measured(layer: int) -> list[GapCell]:
        model = _shuffled(sample_rows(calls[layer], count), seed + layer)
        post_hoc = [replace(model, kernel=Polynomial(degree)) for degree in (0, 2, 4, 6)]
        return [_cell(layer, rows, search, is_own=rows is model) for rows in (model, *post_hoc)]

    return SkewnessGap(
        rows=sample_rows(calls[0], count).rows.numel(),
        cells=tuple(chain.from_iterable(shared_map(measured, range(len(calls))))),
    )


def _shuffled(rows: Call, seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows.key.shape[:-1], generator=generator).argsort(dim=-1).to(rows.key.device)
    key, value = (
        x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[-1]))
        for x in (rows.key, rows.value)
    )
    visible = (
        None
        if rows.visible is None
        else rows.visible.gather(3, order[:, :, None].expand_as(rows.visible))
    )
    return replace(rows, key=key, value=value, attn_mask=visible)


def _cell(layer: int, rows: Call, search: str, *, is_own: bool) -> GapCell:
    weights = rows.weights
    shape = skewness_of(weights)
    first = OptimalValueAware(1).select(**rows.arguments()).indices[..., 0]
    sizes = [r for r in (1, 4, 16) if r <= rows.key.shape[-2]]
    norm = (weights @ rows.value).square().sum().item()
    aware = OptimalValueAware(sizes[-1], search).path(**rows.arguments())
    degree = rows.kernel.degree if isinstance(rows.kernel, Polynomial) else None
    return GapCell(
        layer=layer,
        kernel=type(rows.kernel).__name__.lower(),
        degree=degree,
        own=is_own,
        largest_weight=rounded(shape["largest_weight"]),
        effective_keys=rounded(shape["effective_keys"]),
        rows_over_half=rounded(shape["rows_over_half"]),
        oblivious=_relative(oblivious_path(rows, sizes[-1]), norm, sizes),
        aware=_relative(aware, norm, sizes),
        same_first_key=_share(first == weights.argmax(dim=-1)),
        **(_uniform(rows, first) if degree == 0 else {}),
    )


def _relative(path: Float[Tensor, "B H N R"], norm: float, sizes: list[int]) -> dict[str, float]:
    # no error can be relative to outputs that are 0
    return {str(r): rounded(path[..., r - 1].sum().item() / norm) for r in sizes} if norm else {}


def _uniform(rows: Call, first: Int[Tensor, "B H N"]) -> dict[str, float]:
    """Compares the value-aware key at degree 0 (alpha = 1 / M) with two predictions, up to ties."""
    weights = rows.weights
    squared = rows.value.square().sum(dim=-1)[:, :, None].expand_as(weights)
    to_mean = squared - 2 * (weights @ rows.value) @ rows.value.transpose(-2, -1)
    return {
        "smallest_norm_key": _share(_smallest(squared, rows.visible, first)),
        "closest_to_mean_key": _share(_smallest(to_mean, rows.visible, first)),
    }


def _smallest(
    score: Float[Tensor, "B H N M"],
    visible: Bool[Tensor, "B H N M"] | None,
    chosen: Int[Tensor, "B H N"],
) -> Bool[Tensor, "B H N"]:
    """Marks queries without a visible key of a score below the chosen key's, up to rounding."""
    if visible is not None:
        score = score.masked_fill(~visible, torch.inf)
    # bounds the difference between sums of these numbers in different orders
    rounding = 1e-12 * score[score.isfinite()].abs().max().item()
    return score.gather(-1, chosen[..., None])[..., 0] <= score.amin(dim=-1) + rounding


def _share(rows: Bool[Tensor, "B H N"]) -> float:
    return rounded(rows.double().mean().item())


def search_gap(calls: Sequence[Call], r: int, search: str, rows: int) -> SearchGap:
    """Compares ||o - o~||^2 of a search with the best search, on `rows` random queries per call."""
    generator = torch.Generator().manual_seed(0)
    rows_of_calls = []
    for call in calls:
        which = torch.randperm(call.query.shape[-2], generator=generator)[:rows].sort().values
        sample = call.take(which.to(call.query.device))
        inputs = sample.arguments() | {"attn_mask": sample.visible, "is_causal": False}
        best = OptimalValueAware(r, "best").select(**inputs)
        error = OptimalValueAware(r, search).select(**inputs).error
        assert best.optimal is not None
        rows_of_calls.append(torch.stack([error, best.error, best.optimal]).double().flatten(1))
    error, optimum, proved = torch.cat(rows_of_calls, dim=1)
    clear = optimum > 1e-9 * optimum.mean()  # smaller errors are rounding
    ratio = error[clear] / optimum[clear]
    return SearchGap(
        r=r,
        search=search,
        excess=float(error.sum() / optimum.sum()) - 1,
        off=float((ratio > 1.001).sum()) / len(error),
        worst=float(ratio.max()),
        proved=float(proved.mean()),
    )
