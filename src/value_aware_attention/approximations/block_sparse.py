"""Kernel attention over a pattern in plain torch: pairs that the pattern leaves out cost nothing.

Queries are taken block by block, and a block is scored against the keys that any of its queries
may see. The pieces of a pattern are grouped differently and computed one after the other; their
un-normalised sums are merged at the end. Nothing here holds as many numbers as there are pairs of
a query and a key in all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from value_aware_attention.approximations.approximation import Inputs, numbers_at_once
from value_aware_attention.approximations.patterns import Pattern, Piece
from value_aware_attention.attention import attention_over
from value_aware_attention.kernels import Kernel

__all__ = ["block_sparse_attention", "pairs"]

QUERIES_AT_ONCE = 64
DENSE = 16
"""Listed keys are gathered where they are less than a 16th of all: a gathered pair takes a CPU as
long as a hundred pairs of the fused kernel."""

Index = slice | Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries, the keys any of them sees, and the pairs that are hidden all the same."""

    queries: Index
    keys: Index
    hidden: Bool[Tensor, "B C"] | None


@dataclass(frozen=True, eq=False)
class Layout:
    """A piece cut into blocks; `rows` are the queries in the order of the blocks."""

    blocks: tuple[Block, ...]
    rows: Int[Tensor, " Q"]
    complete: bool
    """Whether the blocks' outputs, one after the other, are those of all queries."""


@dataclass(frozen=True, eq=False)
class Sums:
    """sum kappa v and sum kappa, both divided by exp(largest)."""

    values: Float[Tensor, "*batch N V"]
    weights: Float[Tensor, "*batch N 1"]
    largest: Float[Tensor, "*batch N 1"]

    def __add__(self, other: "Sums") -> "Sums":
        largest = torch.maximum(self.largest, other.largest)
        mine, theirs = (self.largest - largest).exp(), (other.largest - largest).exp()
        return Sums(
            self.values * mine + other.values * theirs,
            self.weights * mine + other.weights * theirs,
            largest,
        )

    def normalised(self) -> Float[Tensor, "*batch N V"]:
        """The output; zeros for a query that saw nothing."""
        return self.values / self.weights.clamp_min(torch.finfo(self.weights.dtype).tiny)

    def placed(self, rows: Int[Tensor, " Q"], queries: int) -> "Sums":
        """These sums of some queries, among all queries of which the others saw nothing."""
        nothing = (0.0, 0.0, torch.finfo(self.largest.dtype).min)
        return Sums(
            *(
                x.new_full((*x.shape[:-2], queries, x.shape[-1]), fill).index_copy(-2, rows, x)
                for x, fill in zip(self._parts(), nothing, strict=True)
            )
        )

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.weights, self.largest

    @staticmethod
    def cat(sums: list["Sums"]) -> "Sums":
        """The sums of blocks of queries as those of all of them."""
        return Sums(*(torch.cat(x, dim=-2) for x in zip(*(s._parts() for s in sums), strict=True)))


def block_sparse_attention(inputs: Inputs, pattern: Pattern) -> Float[Tensor, "*batch N V"]:
    """Eq. 1 over the pairs of the pattern that `inputs.visible` does not hide."""
    pieces = pattern.pieces
    if len(pieces) == 1 and not _is_gathered(pieces[0], inputs.keys):
        return _alone(inputs, pieces[0])
    sums = [total for piece in pieces if (total := _sums(inputs, piece)) is not None]
    return reduce(Sums.__add__, sums).normalised() if sums else inputs.zeros()


def pairs(pattern: Pattern, queries: int, keys: int) -> int:
    """How many pairs of a query and a key the pattern keeps, for the last N of M positions."""
    return sum(_count(piece, queries, keys) for piece in pattern.pieces)


def _count(piece: Piece, queries: int, keys: int) -> int:
    if piece.listed is not None:
        return int(_listed(piece, queries, keys)[1].sum())
    return sum(int(_seen(piece, *some).sum()) for some in _candidates(piece, queries, keys))


def _alone(inputs: Inputs, piece: Piece) -> Float[Tensor, "*batch N V"]:
    """A pattern of one piece: nothing is merged, so every block is attention of its own."""
    layout = _layout(piece, inputs.query.shape[-2], inputs.keys, inputs.query.device)
    if not layout.blocks:
        return inputs.zeros()
    blocks = (_cut(inputs, block) for block in layout.blocks)
    outputs = torch.cat([_attention(*block) for block in blocks], dim=-2)
    if layout.complete:
        return outputs
    return inputs.zeros().index_copy(-2, layout.rows, outputs)


def _sums(inputs: Inputs, piece: Piece) -> Sums | None:
    queries = inputs.query.shape[-2]
    if _is_gathered(piece, inputs.keys):
        parts = list(_each_its_own(inputs, piece))
        return Sums.cat(parts) if parts else None
    layout = _layout(piece, queries, inputs.keys, inputs.query.device)
    if not layout.blocks:
        return None
    sums = Sums.cat([_attend(*_cut(inputs, block)) for block in layout.blocks])
    return sums if layout.complete else sums.placed(layout.rows, queries)


def _is_gathered(piece: Piece, keys: int) -> bool:
    """Whether each query reads its own few keys, instead of a block of queries reading all."""
    return piece.listed is not None and piece.listed.shape[-1] * DENSE < keys


def _cut(inputs: Inputs, block: Block) -> tuple[Tensor, Tensor, Tensor, Kernel, Tensor | None]:
    """A block's queries, keys and values, the kernel, and which of its pairs are hidden."""
    query = _take(inputs.query, block.queries)
    key, value = (_take(x, block.keys) for x in (inputs.key, inputs.value))
    hidden = block.hidden
    if inputs.visible is not None:
        visible = inputs.visible
        if visible.shape[-2] > 1:
            visible = _take(visible, block.queries)
        masked = ~_take(visible.mT, block.keys).mT
        hidden = masked if hidden is None else masked | hidden
    return query, key, value, inputs.kernel, hidden


def _attention(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, hidden: Tensor | None
) -> Float[Tensor, "*batch B V"]:
    return attention_over(query, key, value, kernel, None if hidden is None else ~hidden)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, hidden: Tensor | None
) -> Sums:
    """Dense attention before normalisation; finite, gradients too, where everything is hidden."""
    scores = kernel.log_similarity(query, key)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    largest = scores.detach().amax(dim=-1, keepdim=True)
    largest = largest.clamp_min(torch.finfo(scores.dtype).min)
    weights = (scores - largest).exp()
    return Sums(weights @ value, weights.sum(dim=-1, keepdim=True), largest)


def _each_its_own(inputs: Inputs, piece: Piece) -> Iterator[Sums]:
    """A piece whose queries have no keys in common: keys and values are gathered per query."""
    indices, seen = _listed(piece, inputs.query.shape[-2], inputs.keys)
    indices, seen = indices.to(inputs.query.device), seen.to(inputs.query.device)
    if inputs.visible is not None:
        visible = inputs.visible.expand(*inputs.visible.shape[:-2], len(indices), inputs.keys)
        seen = seen & visible.gather(-1, indices.expand(*visible.shape[:-1], -1))
    heads = max(1, torch.Size(inputs.batch).numel())
    # Keys and values are gathered beside each other, and multiplied: a quarter of what may be held.
    rows = numbers_at_once() // 4 // (heads * max(1, indices[:1].numel() * inputs.key.shape[-1]))
    rows = max(1, rows)
    for first in range(0, len(indices), rows):
        some = slice(first, first + rows)
        kept = indices[some]
        query = inputs.query[..., some, None, :]
        key, value = (
            x.index_select(-2, kept.flatten()).unflatten(-2, kept.shape)
            for x in (inputs.key, inputs.value)
        )
        sums = _attend(query, key, value, inputs.kernel, ~seen[..., some, None, :])
        yield Sums(*(x.squeeze(-2) for x in sums._parts()))


def _listed(piece: Piece, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Listed keys (N, R) and which of them the piece sees."""
    assert piece.listed is not None
    listed = piece.listed[keys - queries :]
    seen = piece.sees(torch.arange(keys - queries, keys)[:, None], listed) & (listed >= 0)
    return listed.clamp_min(0), seen


@lru_cache(maxsize=64)
def _layout(piece: Piece, queries: int, keys: int, device: torch.device) -> Layout:
    """Cached: finding the keys of every block reads the pattern at every pair once."""
    blocks: list[Block] = []
    rows = [torch.arange(0)]
    for query, key in _candidates(piece, queries, keys):
        seen = _seen(piece, query, key)
        some, of_any = seen.any(dim=1), seen.any(dim=0)
        query, key = query[some], key[of_any]
        if len(query):
            hidden = ~seen[some][:, of_any]
            rows.append(query - (keys - queries))
            index = _index(rows[-1], device), _index(key, device)
            blocks.append(Block(*index, hidden.to(device) if hidden.any() else None))
    order = torch.cat(rows)
    complete = len(order) == queries and bool((order.diff() > 0).all())
    return Layout(tuple(blocks), order.to(device), complete)


def _seen(piece: Piece, query: Int[Tensor, " B"], key: Int[Tensor, " C"]) -> Bool[Tensor, "B C"]:
    """Which of some pairs are in the piece; listed keys are written, not searched for."""
    if piece.listed is None:
        return piece.sees(query[:, None], key).expand(len(query), len(key))
    listed = piece.listed[query]
    kept = piece.sees(query[:, None], listed) & (listed >= 0)
    row, _ = kept.nonzero(as_tuple=True)
    seen = torch.zeros(len(query), len(piece.listed), dtype=torch.bool)
    seen[row, listed[kept]] = True
    return seen[:, key]


def _candidates(piece: Piece, queries: int, keys: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of query positions, and the key positions that may be paired with them."""
    for phase in range(min(piece.period, keys)):
        key = torch.arange(phase, keys, piece.period)
        query = key[key >= keys - queries]
        if piece.queries is not None:
            query = query[torch.isin(query, torch.tensor(piece.queries))]
        for some in query.split(QUERIES_AT_ONCE):
            yield some, key


def _index(positions: Int[Tensor, " B"], device: torch.device) -> Index:
    """A slice, which reads without copying, where positions are evenly spaced."""
    first, last = int(positions[0]), int(positions[-1])
    step = max(1, (last - first) // max(1, len(positions) - 1))
    if torch.equal(positions, torch.arange(first, last + 1, step)):
        return slice(first, last + 1, step)
    return positions.to(device)


def _take(x: Shaped[Tensor, "*batch L W"], index: Index) -> Shaped[Tensor, "*batch B W"]:
    return x[..., index, :] if isinstance(index, slice) else x.index_select(-2, index)
