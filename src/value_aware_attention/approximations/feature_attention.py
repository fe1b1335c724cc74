"""Computes attention by feature maps, kappa(q, k) ~ <Phi(q), Phi(k)>, in O(L), also causally.

All queries share the sums over keys of Phi(k) v and of Phi(k) (Katharopoulos et al., 2020). Under a
causal mask the sequence is cut into chunks: pairs within a chunk are scored directly, and running
sums hold everything before it. Features are stored as a logarithm and a bounded factor, and sums
relative to the largest feature *so far*: no later key enters, and nothing over- or underflows.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.attention import AttentionState, attention_state, finite
from value_aware_attention.call import Call, max_elements
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Elu

CHUNK_SIZE = 64
"""Positions in a chunk; under a causal mask, pairs within a chunk are scored directly"""
ROWS_IN_CACHE = 4096
"""Positions of a block over all heads, so that their features stay in a CPU's cache"""


@dataclass(frozen=True)
class Features:
    """Represents Phi(x) = factor * exp(log) for a sequence of L positions; factor None = 1."""

    log: Float[Tensor, "*batch L #F"]
    factor: Float[Tensor, "*batch L F"] | None = None

    def scaled(self, shift: Float[Tensor, "*#batch #L #F"]) -> Float[Tensor, "*batch L F"]:
        """Returns Phi(x) exp(shift)."""
        # If no key has a feature, both terms are -inf, and their sum is -inf, not NaN.
        size = (self.log + shift).exp()
        return size if self.factor is None else size * self.factor


FeatureMap = Callable[[Float[Tensor, "*batch L D"]], Features]


class FeatureAttention(Approximation):
    """Approximates the kernel by the inner product of features of queries and keys.

    Attributes:
        smallest_total: Least magnitude of the normaliser, relative to the largest visible key.
    """

    smallest_total: float = 0.0

    @abstractmethod
    def feature_maps(self, call: Call) -> tuple[FeatureMap, FeatureMap]:
        """Returns the feature maps of queries and of keys."""

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        if call.attn_mask is not None and call.attn_mask.shape[-2] > 1:
            states = self._pairwise(call)
        elif call.is_causal:
            states = self._causal(call)
        else:
            states = self._bidirectional(call)
        return torch.cat([state.output(self.smallest_total) for state in states], dim=-2)

    def _bidirectional(self, call: Call) -> Iterator[AttentionState]:
        """Reads the sums over all keys for every query, in blocks that fit in the cache."""
        query_map, key_map = self.feature_maps(call)
        rows = (
            max(CHUNK_SIZE, ROWS_IN_CACHE // max(1, torch.Size(call.batch).numel()))
            if call.key.is_cpu
            else max(call.keys, call.query.shape[-2])
        )

        def sums_over(some: slice) -> AttentionState:
            key, value = key_map(call.key[..., some, :]), call.value[..., some, :]
            return _key_sums(key, value, _padding(call, some))

        sums = reduce(AttentionState.merge, map(sums_over, _blocks(call.keys, rows)))
        for some in _blocks(call.query.shape[-2], rows):
            yield _read(query_map(call.query[..., some, :]), sums)

    def _causal(self, call: Call) -> Iterator[AttentionState]:
        """For each chunk, adds the pairs within it to the sums over all earlier keys."""
        query_map, key_map = self.feature_maps(call)
        past = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=call.key.device).tril()
        earlier: AttentionState | None = None
        for chunk in _blocks(call.keys, CHUNK_SIZE):
            value, padding = call.value[..., chunk, :], _padding(call, chunk)
            query, key = query_map(call.query[..., chunk, :]), key_map(call.key[..., chunk, :])
            visible = past[: value.shape[-2], : value.shape[-2]]
            visible = visible if padding is None else visible & padding
            within = _pair_state(query, key, value, visible)
            yield _read(query, earlier).merge(within) if earlier else within
            here = _key_sums(key, value, padding)
            earlier = earlier.merge(here) if earlier else here

    def _pairwise(self, call: Call) -> Iterator[AttentionState]:
        """Computes the similarity of every pair, so that under any mask no hidden key enters."""
        query_map, key_map = self.feature_maps(call)
        key = key_map(call.key)
        for block in call.blocks():
            assert block.visible is not None
            yield _pair_state(query_map(block.query), key, block.value, block.visible)


class LinearAttention(FeatureAttention):
    """Computes <Phi(q), Phi(k)> attention with Phi(x) = 1 + elu(x) (Katharopoulos et al., 2020).

    It is exact: the output equals that of `Exact` with the elu kernel, in O(L) time and memory,
    also causally (section 3.3). Pass `kernel=kernels.Elu()`: any other kernel, such as the default
    exponential one, raises ValueError.
    """

    kernels = (Elu,)

    def feature_maps(self, call: Call) -> tuple[FeatureMap, FeatureMap]:
        return _elu_features, _elu_features

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts a query's product with the sums, and its share of the keys' outer products."""
        return sizes.head_dim * sizes.value_dim * (1 + sizes.keys / sizes.queries)


def _elu_features(x: Float[Tensor, "*batch L D"]) -> Features:
    """Computes log(1 + elu(x)), which is x below 0 and log(1 + x) above."""
    return Features(x.where(x <= 0, x.clamp_min(0).log1p()))


def _padding(call: Call, keys: slice) -> Bool[Tensor, "*#batch 1 M"] | None:
    """Returns a mask of the keys that are not padding; None = all."""
    return None if call.attn_mask is None else call.attn_mask[..., keys]


def _key_sums(key: Features, value: Tensor, visible: Tensor | None) -> AttentionState:
    """Sums Phi(k_j) v_j and Phi(k_j) over the visible keys; each row is a feature."""
    if visible is not None:
        key = Features(key.log.where(visible.transpose(-2, -1), -torch.inf), key.factor)
    largest = key.log.detach().amax(dim=-2, keepdim=True)
    features = key.scaled(-finite(largest)).transpose(-2, -1)
    return AttentionState(
        features @ value, features.sum(dim=-1, keepdim=True), largest.transpose(-2, -1)
    )


def _read(query: Features, sums: AttentionState) -> AttentionState:
    """Multiplies query features with the sums; returns the queries' states over these keys."""
    largest = sums.log_scale.transpose(-2, -1)
    log_scale = (query.log + largest).detach().amax(dim=-1, keepdim=True)
    features = query.scaled(largest - finite(log_scale))
    return AttentionState(features @ sums.values, features @ sums.total, log_scale)


def _pair_state(query: Features, key: Features, value: Tensor, visible: Tensor) -> AttentionState:
    """Computes the states of queries over the visible keys, pair by pair."""
    if query.factor is None or key.factor is None:
        return attention_state(_log_similarity(query.log, key.log, visible), value, visible)
    factor = query.factor @ key.factor.transpose(-2, -1)
    return attention_state(query.log + key.log.transpose(-2, -1), value, visible, factor)


def _log_similarity(query: Tensor, key: Tensor, visible: Tensor) -> Float[Tensor, "*batch N M"]:
    """Computes log sum_f exp(query_f + key_f) of each visible pair."""
    largest = query.detach().amax(dim=-1, keepdim=True), key.detach().amax(dim=-1, keepdim=True)
    features = (query - largest[0]).exp(), (key - largest[1]).exp()
    similarity = (features[0] @ features[1].transpose(-2, -1)).where(visible, 1.0)
    if not (similarity < torch.finfo(query.dtype).tiny ** 0.75).any():
        return similarity.log() + largest[0] + largest[1].transpose(-2, -1)
    # If query and key are large in different features, the product underflows, but not its log.
    heads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]).numel()
    rows = max(1, max_elements() // max(1, heads * key.shape[-2:].numel()))
    return torch.cat(
        [
            (some[..., :, None, :] + key[..., None, :, :]).logsumexp(dim=-1)
            for some in query.split(rows, dim=-2)
        ],
        dim=-2,
    )


def _blocks(length: int, rows: int) -> list[slice]:
    """Cuts positions into blocks of `rows`; one empty block if there are none."""
    return [slice(first, first + rows) for first in range(0, max(1, length), max(1, rows))]
