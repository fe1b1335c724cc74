"""Holds the kernels of `triton_losses`; imports Triton, which PyTorch's builds for CPUs lack."""

import triton
import triton.language as tl


@triton.jit
def _tile(tensor, head, rows, length, width, padded: tl.constexpr):
    """Loads rows of a head's matrix (length, width), with zeros beyond it."""
    columns = tl.arange(0, padded)
    at = (head.to(tl.int64) * length + rows)[:, None] * width + columns[None, :]
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    return tl.load(tensor + at, mask=inside, other=0.0)


@triton.jit
def states(
    query, key, value, top_out, number_out, others_out, changed_out,
    groups, queries, keys, dim, width,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SCORES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Sums the weights and the weighted values of a tile of queries, without their largest.

    Weights are relative to the largest so far. When a larger one appears, the key of the former
    largest joins the sums.
    """
    head = tl.program_id(1)
    cache = head // groups
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    q = _tile(query, head, rows, queries, dim, DIM)
    top = tl.full([TILE], float("-inf"), tl.float32)
    number = tl.zeros([TILE], tl.int32)
    others = tl.zeros([TILE], tl.float32)
    changed = tl.zeros([TILE, WIDTH], tl.float32)
    for first in range(0, keys, TILE):
        places = first + tl.arange(0, TILE)
        k = _tile(key, cache, places, keys, dim, DIM)
        v = _tile(value, cache, places, keys, width, WIDTH)
        score = tl.dot(q, tl.trans(k), input_precision=SCORES)
        score = tl.where((places < keys)[None, :], score, float("-inf"))
        is_new = tl.max(score, 1) > top
        leader = tl.where(is_new, tl.argmax(score, 1).to(tl.int32) + first, number)
        peak = tl.maximum(tl.max(score, 1), top)
        shrink = tl.exp(top - peak)
        weight = tl.exp(score - peak[:, None])
        weight = tl.where(places[None, :] == leader[:, None], 0.0, weight)
        others = others * shrink + tl.sum(weight, 1)
        changed = changed * shrink[:, None] + tl.dot(weight, v, input_precision=SUMS)
        joining = tl.where(is_new, shrink, 0.0)  # 0 at first, when nothing was the largest
        if tl.max(joining, 0) > 0:
            others += joining
            changed += joining[:, None] * _tile(value, cache, number, keys, width, WIDTH)
        number, top = leader, peak
    inside, place = rows < queries, head.to(tl.int64) * queries + rows
    tl.store(top_out + place, top, mask=inside)
    tl.store(number_out + place, number, mask=inside)
    tl.store(others_out + place, others, mask=inside)
    columns = tl.arange(0, WIDTH)
    inside_both = inside[:, None] & (columns < width)[None, :]
    tl.store(changed_out + place[:, None] * width + columns[None, :], changed, mask=inside_both)


@triton.jit
def losses(
    query, key, value, turned, length, scale, total, number, norm, loss,
    groups, queries, keys, dim, width,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SCORES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Computes the losses of a tile of keys over all queries of a head, without the largest."""
    head = tl.program_id(1)
    cache = head // groups
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = _tile(key, cache, places, keys, dim, DIM)
    summed = tl.zeros([TILE], tl.float32)  # u, u ||o||^2, and u with o
    lengths = tl.zeros([TILE], tl.float32)
    along = tl.zeros([TILE, WIDTH], tl.float32)
    for first in range(0, queries, TILE):
        rows = first + tl.arange(0, TILE)
        inside, row = rows < queries, head.to(tl.int64) * queries + rows
        q = _tile(query, head, rows, queries, dim, DIM)
        o = _tile(turned, head, rows, queries, width, WIDTH)
        peak = tl.load(scale + row, mask=inside, other=float("inf"))  # no weight beyond the queries
        whole = tl.load(total + row, mask=inside, other=1.0)
        squared = tl.load(length + row, mask=inside, other=0.0)
        largest = tl.load(number + row, mask=inside, other=-1)
        weight = tl.exp(tl.dot(k, tl.trans(q), input_precision=SCORES) - peak[None, :])
        weight = tl.where(places[:, None] == largest[None, :], 0.0, weight)
        u = weight / (whole[None, :] - weight)
        u = u * u
        summed += tl.sum(u, 1)
        lengths += tl.sum(u * squared[None, :], 1)
        along += tl.dot(u, o, input_precision=SUMS)
    v = _tile(value, cache, places, keys, width, WIDTH)
    inside, place = places < keys, head.to(tl.int64) * keys + places
    n = tl.load(norm + place, mask=inside, other=0.0)
    tl.store(loss + place, n * summed + lengths - 2 * tl.sum(along * v, 1), mask=inside)
