"""Attention through feature maps in O(L): kappa(q, k) ~ <Phi(q), Phi(k)>, also under a causal mask.

The sums over keys of Phi(k) v and of Phi(k) serve every query (Katharopoulos et al., 2020). Under a
causal mask the sequence is cut into chunks: within a chunk all pairs are scored, everything before
it is in the running sums. Features are kept as logarithms times a bounded factor, and the sums are
kept relative to the largest feature *so far*: no later key enters, and nothing over- or underflows.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.approximation import (
    Approximation,
    Inputs,
    numbers_at_once,
)
from value_aware_attention.attention import check_inputs
from value_aware_attention.kernels import Kernel

__all__ = ["FeatureAttention", "Features"]

CHUNK = 64
"""Positions whose pairs are scored directly under a causal mask."""
ROWS_IN_CACHE = 4096
"""Positions, over all heads, whose features a CPU holds together."""


@dataclass(frozen=True)
class Features:
    """Phi(x) = factor * exp(log) for a sequence of L positions; factor None = 1."""

    log: Float[Tensor, "*batch L #F"]
    factor: Float[Tensor, "*batch L F"] | None = None

    def scaled(self, shift: Float[Tensor, "*#batch #L #F"]) -> Float[Tensor, "*batch L F"]:
        """Phi(x) exp(shift)."""
        # A feature that no key has is -inf in both: their sum is -inf, never NaN.
        size = (self.log + shift).exp()
        return size if self.factor is None else size * self.factor


@dataclass(frozen=True)
class KeySums:
    """sum_j Phi(k_j) v_j and sum_j Phi(k_j), both divided by exp(largest)."""

    largest: Float[Tensor, "*batch 1 #F"]
    values: Float[Tensor, "*batch F V"]
    total: Float[Tensor, "*batch F 1"]

    def with_keys(self, sums: "KeySums") -> "KeySums":
        """The sums over the keys of both."""
        largest = torch.maximum(self.largest, sums.largest)
        kept, added = (
            (part.largest - _finite(largest)).exp().transpose(-2, -1) for part in (self, sums)
        )
        return KeySums(
            largest,
            kept * self.values + added * sums.values,
            kept * self.total + added * sums.total,
        )

    def read(self, query: Features) -> "Sums":
        """Their product with each query's features."""
        log_size = (query.log + self.largest).detach().amax(dim=-1, keepdim=True)
        features = query.scaled(self.largest - _finite(log_size))
        return Sums(log_size, features @ self.values, features @ self.total)


@dataclass(frozen=True)
class Sums:
    """Weighted values and their weights' total for each query, both divided by exp(log_size)."""

    log_size: Float[Tensor, "*batch N 1"]
    values: Float[Tensor, "*batch N V"]
    total: Float[Tensor, "*batch N 1"]

    def plus(self, other: "Sums") -> "Sums":
        """The sums over the keys of both."""
        log_size = torch.maximum(self.log_size, other.log_size)
        mine, others = ((part.log_size - _finite(log_size)).exp() for part in (self, other))
        return Sums(
            log_size,
            mine * self.values + others * other.values,
            mine * self.total + others * other.total,
        )


FeatureMap = Callable[[Float[Tensor, "*batch L D"]], Features]


class FeatureAttention(Approximation):
    """An approximation given by the features of queries and keys."""

    smallest_total: float = 0.0
    """What the normaliser's magnitude may fall to, in units of the largest visible key's."""

    def inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Inputs:
        """The call, checked; causal or not, `visible` stays one row of keys, so memory is O(L)."""
        check_inputs(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
        if not is_causal or (attn_mask is not None and torch.atleast_2d(attn_mask).shape[-2] > 1):
            return super().inputs(query, key, value, kernel, attn_mask, is_causal)
        return replace(super().inputs(query, key, value, kernel, attn_mask, False), is_causal=True)

    @abstractmethod
    def feature_maps(self, inputs: Inputs) -> tuple[FeatureMap, FeatureMap]:
        """What turns some queries into their features, and some keys."""

    def approximate(self, inputs: Inputs) -> Float[Tensor, "*batch N V"]:
        if inputs.visible is not None and inputs.visible.shape[-2] > 1:
            return self._pairwise(inputs)
        return self._causal(inputs) if inputs.is_causal else self._bidirectional(inputs)

    def _bidirectional(self, inputs: Inputs) -> Float[Tensor, "*batch N V"]:
        """Every query reads the sums over all keys; blocks of positions that fit in the cache."""
        query_map, key_map = self.feature_maps(inputs)
        rows = _rows_in_cache(inputs)
        sums: KeySums | None = None
        for block in _blocks(inputs.keys, rows):
            visible = None if inputs.visible is None else inputs.visible[..., block]
            key, value = (x[..., block, :] for x in (inputs.key, inputs.value))
            here = _key_sums(key_map(key), value, visible)
            sums = sums.with_keys(here) if sums else here
        assert sums is not None
        queries = (inputs.query[..., block, :] for block in _blocks(inputs.query.shape[-2], rows))
        return torch.cat([self._output(sums.read(query_map(q))) for q in queries], dim=-2)

    def _causal(self, inputs: Inputs) -> Float[Tensor, "*batch N V"]:
        """Chunk by chunk: the pairs within it, and the sums over all keys before it."""
        query_map, key_map = self.feature_maps(inputs)
        past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=inputs.key.device).tril()
        earlier: KeySums | None = None
        outputs = []
        for chunk in _blocks(inputs.keys, CHUNK):
            value = inputs.value[..., chunk, :]
            query, key = query_map(inputs.query[..., chunk, :]), key_map(inputs.key[..., chunk, :])
            visible, padding = past[: value.shape[-2], : value.shape[-2]], None
            if inputs.visible is not None:
                padding = inputs.visible[..., chunk]
                visible = visible & padding
            sums = _pair_sums(query, key, value, visible)
            outputs.append(self._output(earlier.read(query).plus(sums) if earlier else sums))
            here = _key_sums(key, value, padding)
            earlier = earlier.with_keys(here) if earlier else here
        return torch.cat(outputs, dim=-2)

    def _pairwise(self, inputs: Inputs) -> Float[Tensor, "*batch N V"]:
        """Under any mask: the similarity of every pair, so nothing hidden enters at all."""
        query_map, key_map = self.feature_maps(inputs)
        key = key_map(inputs.key)
        sums = (
            _pair_sums(query_map(block.query), key, block.value, block.visible)
            for block in inputs.blocks()
            if block.visible is not None
        )
        return torch.cat([self._output(some) for some in sums], dim=-2)

    def _output(self, sums: Sums) -> Float[Tensor, "*batch N V"]:
        """The weighted mean; zeros where no key is visible."""
        size = sums.total.abs().clamp_min(self.smallest_total)
        total = size.where(size > 0, 1.0)
        return sums.values / total.where(sums.total >= 0, -total)


def _key_sums(key: Features, value: Tensor, visible: Tensor | None) -> KeySums:
    """The sums over the visible keys."""
    if visible is not None:
        key = Features(key.log.where(visible.transpose(-2, -1), -torch.inf), key.factor)
    largest = key.log.detach().amax(dim=-2, keepdim=True)
    features = key.scaled(-_finite(largest)).transpose(-2, -1)
    return KeySums(largest, features @ value, features.sum(dim=-1, keepdim=True))


def _pair_sums(query: Features, key: Features, value: Tensor, visible: Tensor) -> Sums:
    """The sums over the visible keys, pair by pair."""
    factor = None
    if query.factor is None or key.factor is None:
        log = _log_similarity(query.log, key.log, visible)
    else:
        log = query.log + key.log.transpose(-2, -1)
        factor = query.factor @ key.factor.transpose(-2, -1)
    log = log.masked_fill(~visible, -torch.inf)
    log_size = log.detach().amax(dim=-1, keepdim=True)
    weights = (log - _finite(log_size)).exp()
    weights = weights if factor is None else weights * factor
    return Sums(log_size, weights @ value, weights.sum(dim=-1, keepdim=True))


def _log_similarity(query: Tensor, key: Tensor, visible: Tensor) -> Float[Tensor, "*batch N M"]:
    """log sum_f exp(query_f + key_f) of each visible pair."""
    largest = query.detach().amax(dim=-1, keepdim=True), key.detach().amax(dim=-1, keepdim=True)
    features = (query - largest[0]).exp(), (key - largest[1]).exp()
    similarity = (features[0] @ features[1].transpose(-2, -1)).where(visible, 1.0)
    if not (similarity < torch.finfo(query.dtype).tiny ** 0.75).any():
        return similarity.log() + largest[0] + largest[1].transpose(-2, -1)
    # Query and key are large in different features: their product is lost, its logarithm is not.
    heads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]).numel()
    rows = max(1, numbers_at_once() // max(1, heads * key.shape[-2:].numel()))
    pairs = [
        (some[..., :, None, :] + key[..., None, :, :]).logsumexp(dim=-1)
        for some in query.split(rows, dim=-2)
    ]
    return torch.cat(pairs, dim=-2)


def _rows_in_cache(inputs: Inputs) -> int:
    """Positions of a block: a CPU is faster when their features stay in its cache."""
    if inputs.key.device.type != "cpu":
        return max(inputs.keys, inputs.query.shape[-2])
    return max(CHUNK, ROWS_IN_CACHE // max(1, torch.Size(inputs.batch).numel()))


def _blocks(length: int, rows: int) -> list[slice]:
    """Positions in order, so many at a time; one empty block where there are none."""
    return [slice(first, first + rows) for first in range(0, max(1, length), max(1, rows))]


def _finite(x: Tensor) -> Tensor:
    """x with -inf, the logarithm of nothing, replaced by 0."""
    return x.where(x > -torch.inf, 0.0)
