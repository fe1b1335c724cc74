"""Computes LSH attention (section A.1, after Reformer): queries attend to keys with a near hash."""

import math
from dataclasses import replace
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.arguments import check_at_least, check_seed
from value_aware_attention.attention import AttentionState, attention_state, in_chunks
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes, power_of_two


class LSH(Approximation):
    """Attends to keys with a near hash (A.1): `rounds` rounds of r = 2B keys, normalised once over
    all.

    In each round H(x) = argmax([-Rx; Rx]) over C = 4M/r buckets, with R of C/2 x D standard
    Gaussians; queries and keys are each sorted by hash, ties by position, and cut into chunks of B.
    A query of chunk i sees the keys of chunks i - 1 (wrapping around) and i. Similarities add up
    over the rounds before the single normalisation. Padded queries and keys sort last, so that
    their content changes no output. r = M is exact for any number of rounds. Chunk boundaries
    depend on later positions, so there is no causal form.

    `share_query_key` is Reformer's attention (Kitaev et al., 2020, section 2): the keys are the
    queries divided by their norm, `key` is ignored, and a token attends to itself only if it sees
    nothing else in any round. Reformer's formula also hides keys of other buckets within the two
    chunks, and divides a pair's similarity by the number of rounds in which the pair meets. This
    class does neither.
    """

    supports_causal = False
    needs_shared_keys = True

    def __init__(self, r: int, rounds: int, seed: int, share_query_key: bool = False) -> None:
        super().__init__()
        self.r = check_at_least(2, r=r)
        if r % 2:
            raise ValueError(f"r is {r}; LSH looks at two chunks of r/2 keys, so r must be even")
        self.rounds = check_at_least(1, rounds=rounds)
        self.seed = check_seed(seed)
        self.share_query_key = share_query_key

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        queries, keys = call.query.shape[-2], call.keys
        if queries != keys:
            raise ValueError(f"LSH got {queries} queries and {keys} keys; it needs as many of both")
        if self.share_query_key:
            unit = power_of_two(call.query.abs().amax(dim=-1, keepdim=True))
            call = replace(
                call, key=normalize(call.query / unit, dim=-1).expand(*call.batch, -1, -1)
            )
        generator = torch.Generator().manual_seed(self.seed)
        # Rounds add unnormalised similarities, as if their keys were distinct.
        state = reduce(
            AttentionState.merge, (self._round(call, generator) for _ in range(self.rounds))
        )
        output = state.output()
        if not self.share_query_key:
            return output
        alone = state.log_scale[..., 0].isneginf()  # tokens that saw no other token in any round
        if call.visible is not None:
            alone = alone & call.visible[..., 0, :]
        return call.value.where(alone[..., None], output)

    def _round(self, call: Call, generator: torch.Generator) -> AttentionState:
        """Computes the attention of one hash round, for each query over its neighbourhood."""
        chunk = min(self.r // 2, math.ceil(call.keys / 2))
        buckets = max(2, 2 * math.ceil(call.keys / chunk))
        rotation = torch.randn(buckets // 2, call.key.shape[-1], generator=generator).to(call.key)
        query_order = _sorted_by_hash(call.query, rotation, call.visible)
        key_order = (
            query_order  # the same vectors, so rounding must not change the order
            if self.share_query_key
            else _sorted_by_hash(call.key, rotation, call.visible)
        )
        query = in_chunks(_take(call.query, query_order), chunk)
        chunks = query.shape[-3]
        key, value, visible = self._neighbourhoods(call, key_order, chunk, chunks)
        if self.share_query_key:
            positions = in_chunks(
                key_order[..., None], chunk
            )  # with one order a query meets itself
            visible = visible & (positions != _with_previous(positions)[..., :chunks, :, :].mT)
        state = attention_state(call.kernel.log_similarity(query, key), value, visible)
        rank = query_order.argsort(dim=-1)
        return state.rearranged(lambda x: _take(x.flatten(-3, -2), rank))

    def _neighbourhoods(
        self, call: Call, order: Int[Tensor, "*batch M"], chunk: int, chunks: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns keys, values and visibility of each chunk i: the sorted chunks i - 1 and i."""
        visible = (
            torch.ones_like(order, dtype=torch.bool)
            if call.visible is None
            else call.visible[..., 0, :].expand_as(order).gather(-1, order)
        )
        key, value, visible = (
            _with_previous(in_chunks(x, chunk))[..., :chunks, :, :]
            for x in (_take(call.key, order), _take(call.value, order), visible[..., None])
        )
        return key, value, visible.mT

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts the attended keys of all rounds, and hashing a query and its share of the keys.

        Shared queries are hashed once.
        """
        attended = min(self.r, sizes.keys) * sizes.one_key
        hashed = 1.0 if self.share_query_key else 1 + sizes.keys / sizes.queries
        return self.rounds * (attended + hashed * 2 * sizes.keys / self.r * sizes.head_dim)


def _sorted_by_hash(
    x: Float[Tensor, "*batch L D"], rotation: Float[Tensor, "C D"], visible: Tensor | None
) -> Int[Tensor, "*batch L"]:
    """Sorts positions by their hash, ties by position, hidden ones last."""
    rotated = x @ rotation.T
    bucket = torch.cat([-rotated, rotated], dim=-1).argmax(dim=-1)
    if visible is not None:
        hidden = ~visible[..., 0, :]
        batch = torch.broadcast_shapes(bucket.shape, hidden.shape)
        bucket = bucket.expand(batch).masked_fill(hidden, 2 * len(rotation))
    return bucket.argsort(dim=-1, stable=True)


def _take(x: Float[Tensor, "*#batch L W"], order: Int[Tensor, "*#batch N"]) -> Tensor:
    """Gathers rows of x in the given order."""
    batch = torch.broadcast_shapes(x.shape[:-2], order.shape[:-1])
    index = order.expand(*batch, -1)[..., None].expand(*batch, -1, x.shape[-1])
    return x.expand(*batch, -1, -1).gather(-2, index)


def _with_previous(chunks: Tensor) -> Tensor:
    """Concatenates each chunk with the one before it, the first with the last."""
    return torch.cat([chunks.roll(1, dims=-3), chunks], dim=-2)
