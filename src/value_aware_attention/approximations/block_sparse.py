"""Computes kernel attention over a pattern in plain torch, without cost for pairs outside it.

A block of queries is scored against the keys that any of its queries may see. Each piece of a
pattern has its own grouping; the pieces are computed in turn and their states merged at the end. No
N x M matrix is held.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from value_aware_attention.approximations.patterns import Pattern, Piece
from value_aware_attention.attention import AttentionState, attention_over, attention_state
from value_aware_attention.call import Call, max_elements
from value_aware_attention.kernels import Kernel

BLOCK_QUERIES = 64
GATHER_RATIO = 16
"""Listed keys are gathered if they are fewer than 1 / DENSE of all keys. On a CPU, gathering a pair
takes as long as computing a hundred in the fused kernel."""

Index = slice | Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Holds some queries, the keys that any of them sees, and the visible pairs (None = all)."""

    queries: Index
    keys: Index
    visible: Bool[Tensor, "B C"] | None


@dataclass(frozen=True, eq=False)
class Layout:
    """Holds a piece cut into blocks; `rows` are the queries in block order.

    Attributes:
        complete: Whether the blocks' outputs, concatenated, are all outputs in order.
    """

    blocks: tuple[Block, ...]
    rows: Int[Tensor, " Q"]
    complete: bool


def block_sparse_attention(call: Call, pattern: Pattern) -> Float[Tensor, "*batch N V"]:
    """Computes Eq. 1 over the pairs of the pattern that `call.attn_mask` does not hide."""
    pieces = pattern.pieces
    if len(pieces) == 1 and not _is_gathered(pieces[0], call.keys):
        return _alone(call, pieces[0])
    states = [state for piece in pieces if (state := _state(call, piece)) is not None]
    return reduce(AttentionState.merge, states).output() if states else call.zeros()


def pairs(pattern: Pattern, queries: int, keys: int) -> int:
    """Counts the (query, key) pairs of the pattern; queries are the last N of M positions."""
    count = 0
    for piece in pattern.pieces:
        if piece.listed is not None:
            count += int(_listed(piece, queries, keys)[1].sum())
        else:
            count += sum(
                int(_pairs(piece, *block).sum()) for block in _candidates(piece, queries, keys)
            )
    return count


def _alone(call: Call, piece: Piece) -> Float[Tensor, "*batch N V"]:
    """Computes a pattern of one piece, with one attention call per block."""
    layout = _layout(piece, call.query.shape[-2], call.keys, call.query.device)
    if not layout.blocks:
        return call.zeros()
    outputs = torch.cat([attention_over(*_cut(call, block)) for block in layout.blocks], dim=-2)
    return outputs if layout.complete else call.zeros().index_copy(-2, layout.rows, outputs)


def _state(call: Call, piece: Piece) -> AttentionState | None:
    """Computes the attention state over the pairs of one piece; None if it has no pairs."""
    queries = call.query.shape[-2]
    if _is_gathered(piece, call.keys):
        parts = list(_each_its_own(call, piece))
        return _concatenated(parts) if parts else None
    layout = _layout(piece, queries, call.keys, call.query.device)
    if not layout.blocks:
        return None
    state = _concatenated([_attend(*_cut(call, block)) for block in layout.blocks])
    return state if layout.complete else _placed(state, layout.rows, queries)


def _concatenated(states: list[AttentionState]) -> AttentionState:
    """Concatenates the states of blocks of queries."""
    tensors = zip(*((s.values, s.total, s.log_scale) for s in states), strict=True)
    return AttentionState(*(torch.cat(blocks, dim=-2) for blocks in tensors))


def _placed(state: AttentionState, rows: Int[Tensor, " Q"], queries: int) -> AttentionState:
    """Scatters the states of some queries to their rows; the other queries get an empty state."""
    nothing = (state.values, 0.0), (state.total, 0.0), (state.log_scale, -torch.inf)
    return AttentionState(
        *(
            x.new_full((*x.shape[:-2], queries, x.shape[-1]), fill).index_copy(-2, rows, x)
            for x, fill in nothing
        )
    )


def _is_gathered(piece: Piece, keys: int) -> bool:
    """Returns whether keys are gathered per query instead of read per block of queries."""
    return piece.listed is not None and piece.listed.shape[-1] * GATHER_RATIO < keys


def _cut(call: Call, block: Block) -> tuple[Tensor, Tensor, Tensor, Kernel, Tensor | None]:
    """Returns the queries, keys, values, kernel and visible pairs of a block."""
    query = _take(call.query, block.queries)
    key, value = (_take(x, block.keys) for x in (call.key, call.value))
    visible, mask = block.visible, call.attn_mask
    if mask is not None:
        mask = _take(mask, block.queries) if mask.shape[-2] > 1 else mask
        mask = _take(mask.mT, block.keys).mT
        visible = mask if visible is None else mask & visible
    return query, key, value, call.kernel, visible


def _attend(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, visible: Tensor | None
) -> AttentionState:
    return attention_state(kernel.log_similarity(query, key), value, visible)


def _each_its_own(call: Call, piece: Piece) -> Iterator[AttentionState]:
    """Computes a piece whose queries share no keys: keys and values are gathered per query."""
    indices, visible = (
        x.to(call.query.device) for x in _listed(piece, call.query.shape[-2], call.keys)
    )
    if call.attn_mask is not None:
        mask = call.attn_mask.expand(*call.attn_mask.shape[:-2], len(indices), call.keys)
        visible = visible & mask.gather(-1, indices.expand(*mask.shape[:-1], -1))
    # The gathered keys and values and their products coexist, so each gets a quarter of the limit.
    heads = max(1, torch.Size(call.batch).numel())
    elements = heads * max(1, indices[:1].numel() * call.key.shape[-1])
    rows = max(1, max_elements() // 4 // elements)
    for first in range(0, len(indices), rows):
        some = slice(first, first + rows)
        keys = indices[some]
        key, value = (
            x.index_select(-2, keys.flatten()).unflatten(-2, keys.shape)
            for x in (call.key, call.value)
        )
        state = _attend(
            call.query[..., some, None, :], key, value, call.kernel, visible[..., some, None, :]
        )
        yield state.rearranged(lambda x: x.squeeze(-2))


def _listed(piece: Piece, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Returns the listed keys (N, R) and a mask of those that the piece sees."""
    assert piece.listed is not None
    listed = piece.listed[keys - queries :]
    visible = piece.sees(torch.arange(keys - queries, keys)[:, None], listed) & (listed >= 0)
    return listed.clamp_min(0), visible


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # cached for later calls; autograd cannot save inference tensors
def _layout(piece: Piece, queries: int, keys: int, device: torch.device) -> Layout:
    """Finds the keys of all blocks; cached, because it evaluates the pattern at every pair."""
    blocks: list[Block] = []
    rows = [torch.arange(0)]
    for query, key in _candidates(piece, queries, keys):
        pairs = _pairs(piece, query, key)
        seeing, of_any = pairs.any(dim=1), pairs.any(dim=0)
        query, key = query[seeing], key[of_any]
        if len(query):
            visible = pairs[seeing][:, of_any]
            rows.append(query - (keys - queries))
            index = _index(rows[-1], device), _index(key, device)
            blocks.append(Block(*index, None if visible.all() else visible.to(device)))
    order = torch.cat(rows)
    complete = len(order) == queries and bool((order.diff() > 0).all())
    return Layout(tuple(blocks), order.to(device), complete)


def _pairs(piece: Piece, query: Int[Tensor, " B"], key: Int[Tensor, " C"]) -> Bool[Tensor, "B C"]:
    """Returns a mask of the pairs in the piece; listed keys are scattered instead of searched."""
    if piece.listed is None:
        return piece.sees(query[:, None], key).expand(len(query), len(key))
    listed = piece.listed[query]
    visible = piece.sees(query[:, None], listed) & (listed >= 0)
    row, _ = visible.nonzero(as_tuple=True)
    pairs = torch.zeros(len(query), len(piece.listed), dtype=torch.bool)
    pairs[row, listed[visible]] = True
    return pairs[:, key]


def _candidates(piece: Piece, queries: int, keys: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields blocks of query positions with the key positions that may be paired with them."""
    for phase in range(min(piece.period, keys)):
        key = torch.arange(phase, keys, piece.period)
        query = key[key >= keys - queries]
        if piece.queries is not None:
            query = query[torch.isin(query, torch.tensor(piece.queries))]
        for some in query.split(BLOCK_QUERIES):
            yield some, key


def _index(positions: Int[Tensor, " B"], device: torch.device) -> Index:
    """Converts evenly spaced positions to a slice, which is read without a copy."""
    first, last = int(positions[0]), int(positions[-1])
    step = max(1, (last - first) // max(1, len(positions) - 1))
    if torch.equal(positions, torch.arange(first, last + 1, step)):
        return slice(first, last + 1, step)
    return positions.to(device)


def _take(x: Shaped[Tensor, "*batch L W"], index: Index) -> Shaped[Tensor, "*batch B W"]:
    return x[..., index, :] if isinstance(index, slice) else x.index_select(-2, index)
