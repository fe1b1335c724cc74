"""Defines composable attention patterns: functions (query position, key position) -> bool.

    big_bird = window(1, 1) | random_keys(2, seed=0, keys=64) | global_positions((0,))
    causal = big_bird & past()

Positions are integer tensors that broadcast. A pattern also groups its pairs for computation: it is
a union of disjoint pieces, and `|` and `&` preserve this.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Relation = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Piece:
    """Holds pairs of a query and a key that are computed together.

    Attributes:
        period: A divisor of the distance between the two positions of every pair.
        queries: The queries that occur in pairs, if they are few; None = all queries.
        listed: The keys of each query (negative = none), set if neighbouring queries share no keys.
    """

    sees: Relation
    period: int = 1
    queries: tuple[int, ...] | None = None
    listed: Int[Tensor, "M R"] | None = None

    @property
    def kind(self) -> tuple[int, tuple[int, ...] | None, int]:
        """Returns how the pairs are grouped; pieces of the same kind can be merged."""
        return self.period, self.queries, id(self.listed)


@dataclass(frozen=True, eq=False)
class Pattern:
    """Defines which keys each query may see; `a | b` and `a & b` unite and intersect the pairs."""

    pieces: tuple[Piece, ...]

    def __call__(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Returns whether the query at one position may see the key at the other."""
        return reduce(torch.logical_or, (piece.sees(query, key) for piece in self.pieces))

    def __or__(self, other: "Pattern") -> "Pattern":
        return _union(self, other)

    def __and__(self, other: "Pattern") -> "Pattern":
        return _intersection(self, other)

    def mask(self, queries: int, keys: int) -> Bool[Tensor, "N M"]:
        """Returns the pattern of the last `queries` of `keys` positions as an `attn_mask`."""
        position = torch.arange(keys)
        return self(position[keys - queries :, None], position).expand(queries, keys)


# Cached like the factories: equal arguments give the same object, the cache key of its layout.
@lru_cache(maxsize=256)
def _union(first: Pattern, second: Pattern) -> Pattern:
    pieces: dict[object, Piece] = {}
    # Listed keys come last: they are few, so removing pairs of earlier pieces is cheap.
    for piece in sorted((*first.pieces, *second.pieces), key=lambda p: p.listed is not None):
        like = pieces.pop(piece.kind, None)
        sees = reduce(_without, (other.sees for other in pieces.values()), piece.sees)
        pieces[piece.kind] = replace(piece, sees=_either(like.sees, sees) if like else sees)
    return Pattern(tuple(pieces.values()))


@lru_cache(maxsize=256)
def _intersection(first: Pattern, second: Pattern) -> Pattern:
    return Pattern(tuple(_common(a, b) for a in first.pieces for b in second.pieces))


def _common(a: Piece, b: Piece) -> Piece:
    queries = a.queries if b.queries is None else b.queries
    if a.queries is not None and b.queries is not None:
        queries = tuple(sorted({*a.queries} & {*b.queries}))
    listed = a.listed if b.listed is None else b.listed
    return Piece(_both(a.sees, b.sees), math.lcm(a.period, b.period), queries, listed)


def _either(a: Relation, b: Relation) -> Relation:
    return lambda query, key: a(query, key) | b(query, key)


def _both(a: Relation, b: Relation) -> Relation:
    return lambda query, key: a(query, key) & b(query, key)


def _without(a: Relation, b: Relation) -> Relation:
    return lambda query, key: a(query, key) & ~b(query, key)


@lru_cache(maxsize=256)
def past() -> Pattern:
    """Keeps the query's own position and those before it: j <= i."""
    return Pattern((Piece(lambda query, key: key <= query),))


@lru_cache(maxsize=256)
def window(left: int, right: int, dilation: int = 1) -> Pattern:
    """Keeps the query, `left` keys before it and `right` after it, `dilation` apart."""

    def sees(query: Tensor, key: Tensor) -> Tensor:
        lag = query - key
        near = (lag <= left * dilation) & (lag >= -right * dilation)
        return near & (lag % dilation == 0) if dilation > 1 else near

    return Pattern((Piece(sees, period=dilation),))


@lru_cache(maxsize=256)
def shifted_window(r: int, dilation: int, keys: int) -> Pattern:
    """Keeps the query, r // 2 keys before it and the rest after it; shifted inwards at the edges.

    Every query sees r of the `keys` keys, or all at multiples of `dilation` if there are fewer.
    """

    def sees(query: Tensor, key: Tensor) -> Tensor:
        step, phase = query // dilation, query % dilation
        last = ((keys - 1 - phase) // dilation + 1 - r).clamp_min(0)
        place = key // dilation - torch.minimum((step - r // 2).clamp_min(0), last)
        near = (place >= 0) & (place < r)
        return near & (key % dilation == phase) if dilation > 1 else near

    return Pattern((Piece(sees, period=dilation),))


@lru_cache(maxsize=256)
def stripes(stride: int) -> Pattern:
    """Keeps every `stride`-th key, counted from the query: (i - j) mod s = 0."""
    return Pattern((Piece(lambda query, key: (query - key) % stride == 0, period=stride),))


@lru_cache(maxsize=256)
def same_block(size: int) -> Pattern:
    """Keeps the keys in the query's block: floor(j / s) = floor(i / s)."""
    return Pattern((Piece(lambda query, key: query // size == key // size),))


@lru_cache(maxsize=256)
def summaries(stride: int, summary: int) -> Pattern:
    """Keeps the last `summary` keys of every block of `stride`: j mod s >= s - c."""

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return (key % stride >= stride - summary) & (query >= 0)

    return Pattern((Piece(sees),))


@lru_cache(maxsize=256)
def first_keys(count: int) -> Pattern:
    """Keeps the first `count` keys of the sequence: attention sinks."""
    return Pattern((Piece(lambda query, key: (key < count) & (query >= 0)),))


@lru_cache(maxsize=256)
def global_positions(positions: tuple[int, ...]) -> Pattern:
    """Keeps all pairs with one of `positions`, as query or as key (symmetric, Longformer)."""

    def among(position: Tensor) -> Tensor:
        return reduce(torch.logical_or, (position == p for p in positions), position < 0)

    keys = Piece(lambda query, key: among(key) & (query >= 0))
    queries = Piece(lambda query, key: among(query) & (key >= 0), queries=positions)
    return Pattern((keys,)) | Pattern((queries,))


@lru_cache(maxsize=32)
def random_keys(r: int, seed: int, keys: int, causal: bool = False) -> Pattern:
    """Draws r distinct keys per query uniformly from `keys`, or from its past if causal."""
    listed = _draw(r, seed, keys, causal)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return (listed.to(query.device)[query] == key[..., None]).any(dim=-1)

    return Pattern((Piece(sees, listed=listed),))


def _draw(r: int, seed: int, keys: int, causal: bool) -> Int[Tensor, "M R"]:
    """Samples without replacement (Floyd) for all queries at once; negative if keys run out.

    Each query has its own random numbers, so causal draws stay the same in a longer sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(keys, r, generator=generator, dtype=torch.float64)
    choices = torch.arange(1, keys + 1) if causal else torch.full((keys,), keys)
    listed = torch.full((keys, r), -1)
    for place in range(r):
        last = choices - r + place
        drawn = (uniform[:, place] * (last + 1)).long()
        taken = (listed == drawn[:, None]).any(dim=-1)
        listed[:, place] = torch.where(taken, last, drawn).where(last >= 0, -1)
    return listed[:, max(0, r - keys) :]
