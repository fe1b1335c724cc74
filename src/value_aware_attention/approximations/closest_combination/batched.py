"""Searches on batched tensors on any device: the torch version of active_set.cpp.

Per query, let o be the output and w_i = v_i - o. The simplex weights that bring sum_i beta_i w_i
closest to 0 are the normalised solution of a non-negative least squares problem with atoms (w_i, c)
and target (0, c), for any lift c > 0. It is solved by the active-set method of Lawson & Hanson
(1974, chapter 23), where atoms enter one by one as in orthogonal matching pursuit (Pati et al.,
1993). The atoms in use (rows of A) are represented by an orthonormal basis Q = R_inverse A. Adding
or removing an atom then costs O(size (size + V)) and stays accurate in fp32, unlike an inverted
Gram matrix.

Every query is a row of the batch. Finished rows stay in the batch until they exceed three tenths of
it; the others are then gathered into a smaller batch.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from value_aware_attention.approximations.closest_combination.problem import (
    BEAM,
    INDEPENDENCE,
    KEY_GROUPS,
    LOOKS,
    NEARLY,
    Problem,
    unresolved,
)
from value_aware_attention.call import BYTES_PER_ELEMENT, max_elements
from value_aware_attention.weights import top_keys

ROWS_AT_ONCE = 2048
"""Most queries searched at once on a CPU: enough to outweigh call overhead and to fit its cache"""
NEAREST = 8
"""Number of values nearest to o whose distances are recomputed, to remove rounding"""


@dataclass
class _ActiveSets:
    """Holds one set of keys per row with its optimal weights; slots from `size` on are empty.

    Attributes:
        Q: Orthonormal rows: R_inverse @ the lifted atoms.
        Q_transposed: Q in the only layout in which a batch of row vectors times a matrix is fast.
        mass: The weights beta.
        unconstrained: The least squares solution on these keys, neither normalised nor bounded at
            0.
        lifted: Residual of the lifted target.
        residual: o - x, where x is the combination.
        zero: Largest error that counts as zero.
        largest: Largest size so far.
    """

    Q: Float[Tensor, "B K W"]
    Q_transposed: Float[Tensor, "B W K"]
    R_inverse: Float[Tensor, "B K K"]
    keys: Int[Tensor, "B K"]
    mass: Float[Tensor, "B K"]
    unconstrained: Float[Tensor, "B K"]
    lifted: Float[Tensor, "B W"]
    residual: Float[Tensor, "B V"]
    size: Int[Tensor, " B"]
    lift: Float[Tensor, " B"]
    error: Float[Tensor, " B"]
    zero: Float[Tensor, " B"]
    largest: Int[Tensor, " B"]
    taken_back: Int[Tensor, " B"]
    stalled: Int[Tensor, " B"]

    @classmethod
    def of_one(
        cls, atom: Tensor, key: Tensor, scale: Tensor, zero: Tensor, capacity: int
    ) -> "_ActiveSets":
        """Creates sets of one key; atom (B, V) is its value - o, scale the largest ||v - o||^2."""
        squared = atom.square().sum(-1)
        lift = torch.maximum(squared, 1e-4 * scale).sqrt()
        inverse = (squared + lift.square()).rsqrt()
        direction = torch.cat([atom, lift[:, None]], dim=1) * inverse[:, None]
        Q = pad(direction[:, None], (0, 0, 0, capacity))
        R_inverse = pad(inverse[:, None, None], (0, capacity, 0, capacity))
        mass = pad(torch.ones_like(inverse)[:, None], (0, capacity))
        keys = pad(key[:, None], (0, capacity))
        count = torch.ones_like(key)
        sets = cls(
            Q, Q.mT.contiguous(), R_inverse, keys, mass, torch.zeros_like(mass),
            torch.zeros_like(direction), -atom, count, lift, squared, zero, count.clone(),
            count * 0, count * 0,
        )  # fmt: skip
        sets.rebuild(torch.arange(len(atom), device=atom.device))
        return sets

    def take(self, rows: Tensor) -> "_ActiveSets":
        """Copies the sets of some rows."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def done(self) -> Bool[Tensor, " B"]:
        return self.error <= self.zero

    def insert(
        self, atom: Float[Tensor, "B V"], key: Int[Tensor, " B"], live: Bool[Tensor, " B"]
    ) -> tuple[Bool[Tensor, " B"], Int[Tensor, " S"]]:
        """Adds an atom by Gram-Schmidt to the live rows where it is independent of the others.

        Returns these rows as a mask and as indices.
        """
        used = min(self.Q.shape[1], int(self.size.max()))
        atom = torch.cat([atom, self.lift[:, None]], dim=1)
        before = atom.square().sum(-1)
        Q, Q_transposed = self.Q[:, :used], self.Q_transposed[:, :, :used]
        share = torch.bmm(atom[:, None], Q_transposed)
        rest = atom - torch.bmm(share, Q)[:, 0]
        if bool((live & (rest.square().sum(-1) < 0.05 * before)).any()):
            again = torch.bmm(rest[:, None], Q_transposed)
            rest -= torch.bmm(again, Q)[:, 0]
            share = share + again
        length = rest.norm(dim=-1)
        live = live & (length > INDEPENDENCE[atom.dtype] * before.sqrt())
        inverse = torch.where(live, 1 / length, 0.0)[:, None]
        direction = torch.where(live[:, None], rest * inverse, 0.0)
        row = torch.zeros_like(self.unconstrained)
        row[:, :used] = torch.bmm(share, self.R_inverse[:, :used, :used])[:, 0] * -inverse
        row.scatter_(1, self.size[:, None], inverse)
        where = live.nonzero()[:, 0]
        slot = self.size[where]
        self.Q[where, slot] = direction[where]
        self.Q_transposed[where, :, slot] = direction[where]
        self.R_inverse[where, slot] = row[where]
        self.keys[where, slot] = key[where]
        self.mass[where, slot] = 0
        step = (self.lift * direction[:, -1])[:, None]
        self.unconstrained += step * row
        self.lifted -= step * direction
        self.size += live
        torch.maximum(self.largest, self.size, out=self.largest)
        self.residual, self.error = _measure(self.lifted, self.lift)
        return live, where

    def rebuild(self, rows: Tensor) -> None:
        """Recomputes unconstrained weights and residuals: projects (0, lift) onto the span of Q."""
        lift = self.lift[rows]
        step = lift[:, None] * self.Q[rows, :, -1]
        self.unconstrained[rows] = torch.bmm(step[:, None], self.R_inverse[rows])[:, 0]
        lifted = -torch.bmm(step[:, None], self.Q[rows])[:, 0]
        lifted[:, -1] += lift
        self.lifted[rows] = lifted
        self.residual[rows], self.error[rows] = _measure(lifted, lift)

    def restore_feasibility(self, live: Bool[Tensor, " B"]) -> None:
        """Drops atoms whose weight reaches zero on the way to the unconstrained weights.

        This is the inner loop of Lawson & Hanson.
        """
        slots = torch.arange(self.unconstrained.shape[1], device=live.device)
        while True:  # on all rows: few are blocked, and selecting them costs more
            share = self.unconstrained / self.unconstrained.sum(-1, keepdim=True)
            stop = (share <= 0) & (slots < self.size[:, None])
            blocked = live & stop.any(-1) & (self.size > 1)
            self.mass = torch.where((live & ~blocked)[:, None], share, self.mass)
            rows = blocked.nonzero()[:, 0]
            if not len(rows):
                return
            mass, share = self.mass[rows], share[rows]
            reachable = mass / (mass - share).clamp_min(_tiny(mass))
            reach, slot = torch.where(stop[rows], reachable, torch.inf).min(dim=-1)
            self.mass[rows] = (mass + reach[:, None] * (share - mass)).clamp_min(0)
            self.drop(rows, slot)
            live = blocked

    def drop(self, rows: Tensor, slot: Tensor) -> None:
        """Removes an atom: a reflection moves it into the last row of Q, which is then dropped."""
        each = torch.arange(len(rows), device=rows.device)
        R_inverse, Q, last = self.R_inverse[rows], self.Q[rows], self.size[rows] - 1
        column = R_inverse[each, :, slot]
        column = column / column.norm(dim=-1, keepdim=True).clamp_min(_tiny(column))
        column[each, last] += torch.where(column[each, last] >= 0, 1.0, -1.0).to(column)
        share = (-2 / column.square().sum(-1, keepdim=True) * column)[:, :, None]
        Q += share * torch.bmm(column[:, None], Q)
        R_inverse += share * torch.bmm(column[:, None], R_inverse)
        Q[each, last] = 0
        R_inverse[each, last] = 0
        R_inverse[each, :, slot] = R_inverse[each, :, last]
        R_inverse[each, :, last] = 0
        self.Q[rows], self.Q_transposed[rows], self.R_inverse[rows] = Q, Q.mT, R_inverse
        mass = self.mass[rows]
        self.keys[rows, slot] = self.keys[rows, last]
        mass[each, slot] = mass[each, last]
        mass[each, last] = 0
        self.mass[rows] = mass / mass.sum(-1, keepdim=True).clamp_min(_tiny(mass))
        self.size[rows] -= 1
        self.rebuild(rows)

    def cheapest(self, rows: Tensor, spare_last: bool) -> tuple[Tensor, Tensor]:
        """Finds the atom that costs least to remove, and the error if no weight turns negative."""
        unconstrained, size = self.unconstrained[rows], self.size[rows, None]
        slots = torch.arange(unconstrained.shape[1], device=rows.device)
        cost = unconstrained.square() / self.R_inverse[rows].square().sum(1).clamp_min(
            _tiny(unconstrained)
        )
        cost = torch.where(slots < (size - 1 if spare_last else size), cost, torch.inf)
        least, slot = cost.min(dim=-1)
        lift = self.lift[rows].square()
        left = unconstrained.sum(-1) - least / lift
        error = torch.where(left > 0, lift * (1 / left - 1), torch.inf)
        return slot, torch.where(error > 0, error, torch.inf)


def _measure(lifted: Tensor, lift: Tensor) -> tuple[Tensor, Tensor]:
    """Returns o - x and its square; the lifted residual is o - x times the sum of the weights."""
    residual = lifted[:, :-1] / (1 - lifted[:, -1] / lift)[:, None]
    return residual, residual.square().sum(-1)


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


class _BestSets:
    """Holds the best set of every size, or, if `sizes` is 1, the best of all sizes up to r."""

    def __init__(self, rows: int, sizes: int, r: int, like: Tensor) -> None:
        self.r = r
        self.keys = torch.zeros(rows, sizes, r, dtype=torch.int64, device=like.device)
        self.mass = like.new_zeros(rows, sizes, r)
        self.error = like.new_full((rows, sizes), torch.inf)
        self.best = like.new_full((rows, r + 3), torch.inf)

    def record(self, rows: Tensor, sets: _ActiveSets, which: Tensor) -> None:
        """Records the sets among `which` that improve on the best set of their row and size."""
        size, error = sets.size[which], sets.error[which]
        # Here and below, nonzero waits for the GPU once; every [] with a mask would wait again.
        better = ((size <= self.r) & (error < self.best[rows, size])).nonzero()[:, 0]
        rows, which = rows[better], which[better]
        size, error = size[better], error[better]
        self.best[rows, size] = error
        self.write(rows, size, sets.keys[which], sets.mass[which], error)

    def write(self, rows: Tensor, size: Tensor, keys: Tensor, mass: Tensor, error: Tensor) -> None:
        """Replaces recorded sets by these if the error is smaller."""
        column = torch.zeros_like(size) if self.error.shape[1] == 1 else size - 1
        better = (error < self.error[rows, column]).nonzero()[:, 0]
        rows, column = rows[better], column[better]
        spare = max(0, self.r - keys.shape[1])
        self.error[rows, column] = error[better]
        self.keys[rows, column] = pad(keys[better, : self.r], (0, spare))
        self.mass[rows, column] = pad(mass[better, : self.r], (0, spare))


class _Rows:
    """Holds the unfinished queries, equally many per head, so that one product scans them all."""

    PER_ROW = ("row", "output", "scale", "zero", "inverse")

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.heads, self.queries = problem.output.shape[:2]
        self.row = torch.arange(self.heads * self.queries, device=problem.value.device)
        self.output = problem.output.flatten(0, 1)
        squared = self.output.square().sum(-1).unflatten(0, (self.heads, -1))[..., None]
        norms = problem.value.square().sum(-1)[:, None]
        distance = torch.baddbmm(norms + squared, problem.output, problem.value.mT, alpha=-2)
        finite, visible = distance, problem.visible
        if visible is not None:
            finite, distance = distance.where(visible, 0.0), distance.where(visible, torch.inf)
        self.distance = distance.flatten(0, 1)
        self.scale = finite.amax(-1).flatten().clamp_min(_tiny(distance))
        self.zero = problem.zero().flatten()
        inverse = torch.maximum(self.distance, 1e-8 * self.scale[:, None]).rsqrt_()
        # Hidden keys and padding get slope 0.
        self.inverse = pad(inverse, (0, -inverse.shape[1] % KEY_GROUPS))

    def atoms(self, keys: Int[Tensor, "B ..."]) -> Float[Tensor, "B ... V"]:
        """Returns v - o for the keys of each row."""
        count, width = self.problem.value.shape[1:]
        head = torch.arange(self.heads, device=keys.device).repeat_interleave(self.queries)
        shape = [-1, *[1] * (keys.dim() - 1)]
        index = keys + count * head.view(shape)
        value = self.problem.value.reshape(-1, width)[index]
        return value - self.output.view(*shape, width)

    def nearest(self) -> Int[Tensor, " B"]:
        """Finds the key whose value is closest to o (Eq. 3); ties go to the first.

        Distances are first differences of squares; the smallest are then recomputed.
        """
        few = min(NEAREST, self.distance.shape[1])
        least, keys = self.distance.topk(few, dim=-1, largest=False)
        keys = keys.where(least < torch.inf, keys[:, :1]).sort(dim=-1).values
        closest = self.atoms(keys).square().sum(-1).argmin(-1, keepdim=True)
        return keys.gather(-1, closest)[:, 0]

    def steepest(self, sets: _ActiveSets) -> tuple[Float[Tensor, "B G"], Int[Tensor, "B G"]]:
        """Finds slope <v - x, o - x> / ||v - o|| and key of the steepest atom of every group."""
        shift = sets.error - (sets.residual * self.output).sum(-1)
        residual = sets.residual.unflatten(0, (self.heads, -1))
        shift = shift.view(self.heads, -1, 1)
        slope = torch.baddbmm(shift, residual, self.problem.value.mT).flatten(0, 1)
        slope = pad(slope, (0, self.inverse.shape[1] - slope.shape[1])).mul_(self.inverse)
        most, place = _largest(slope.clamp_min_(0).unflatten(1, (-1, KEY_GROUPS)))
        return most, place * KEY_GROUPS + torch.arange(KEY_GROUPS, device=place.device)

    def widen(self, times: int) -> None:
        """Repeats every query `times` times, as neighbours."""
        self.queries *= times
        for name in self.PER_ROW:
            setattr(self, name, getattr(self, name).repeat_interleave(times, dim=0))

    def keep(self, live: Bool[Tensor, " B"], most: int) -> Tensor:
        """Keeps only the live rows, padded to `most` per head; returns their positions."""
        order = live.view(self.heads, -1).int().argsort(dim=1, descending=True, stable=True)
        first = torch.arange(self.heads, device=live.device)[:, None] * self.queries
        positions = (order[:, :most] + first).flatten()
        self.queries = most
        for name in self.PER_ROW:
            setattr(self, name, getattr(self, name)[positions])
        return positions


def _largest(groups: Float[Tensor, "B M G"]) -> tuple[Float[Tensor, "B G"], Int[Tensor, "B G"]]:
    """Returns the maximum over M and its index, for small M and entries >= 0."""
    if groups.dtype != torch.float32:
        return groups.max(dim=1)
    # One vectorised pass instead of a slow argmax: the lowest bits of the number hold the index.
    low = (1 << (groups.shape[1] - 1).bit_length()) - 1
    place = torch.arange(groups.shape[1], dtype=torch.int32, device=groups.device)[:, None]
    packed = groups.contiguous().view(torch.int32).bitwise_and_(~low).bitwise_or_(low - place)
    packed = packed.amax(dim=1)
    return (packed & ~low).view(torch.float32), (low - (packed & low)).long()


def search(problem: Problem, r: int, effort: str, sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns indices and weights (H, N, sizes, r) of the best set of each size; sizes is 1 or r.

    Also returns a mask (H, N) of the unfinished rows, which this precision does not resolve.
    """
    heads, queries = problem.output.shape[:2]
    results = []
    for block in _parts(problem, _rows_at_once(problem, r, effort)):
        best = _BestSets(block.output.shape[0] * block.output.shape[1], sizes, r, block.value)
        undone = _search(block, r, effort, best)
        results.append((best.keys, best.mass, undone))
    keys, mass, undone = (torch.cat(parts) for parts in zip(*results, strict=True))
    shape = heads, queries, sizes, r
    return keys.view(shape), mass.view(shape), undone.view(heads, queries)


def _rows_at_once(problem: Problem, r: int, effort: str) -> int:
    """Returns the number of queries searched together."""
    keys, width = problem.value.shape[1:]
    size = min(r, width) + 2
    numbers = 2 * size * (width + 1) + size**2 + 4 * keys
    rows = BYTES_PER_ELEMENT // 4 * max_elements() // (numbers * problem.value.element_size())
    if problem.value.device.type == "cpu":
        rows = min(rows, ROWS_AT_ONCE)
    return max(1, rows // BEAM if effort == "best" else rows)


def _parts(problem: Problem, rows: int) -> Iterator[Problem]:
    """Yields whole heads if they fit, else parts of one; each has at most `rows` queries."""
    heads, queries = problem.output.shape[:2]
    step = max(1, rows // max(1, queries))
    for head in range(0, heads, step):
        several = slice(head, head + step)
        for first in range(0, queries, min(rows, max(1, queries))):
            some = slice(first, first + rows)
            visible = None if problem.visible is None else problem.visible[several, some]
            yield Problem(
                problem.value[several],
                problem.output[several, some],
                problem.weights[several, some],
                visible,
                problem.unit[several],
            )


def _search(problem: Problem, r: int, effort: str, best: _BestSets) -> Bool[Tensor, " B"]:
    """Fills `best`; returns the rows left to fp64."""
    capacity = min(r + 1, problem.value.shape[2] + 1, problem.value.shape[1])
    weights = problem.weights.flatten(0, 1)
    few = _take_few(problem, weights, r, best)
    all_rows = _Rows(problem)
    undone = ~few & unresolved(all_rows.distance, all_rows.scale, all_rows.output)
    rows = copy(all_rows)
    first = rows.nearest()
    sets = _ActiveSets.of_one(rows.atoms(first), first, rows.scale, rows.zero, capacity)
    everything = rows.row[~few]
    best.record(everything, sets, everything)
    reach = r if effort == "fast" else r + 1
    live = ~(few | undone) & ~sets.done() & (r > 1)
    _grow(rows, sets, best, live, min(reach, capacity), effort)
    if r > 1 and effort == "best":
        _beam(copy(all_rows), r, best, few | undone)
    if r > 1:
        best.error.masked_fill_(undone[:, None], 0.0)
        _guard(all_rows, r, best)
    return undone


def _take_few(problem: Problem, weights: Tensor, r: int, best: _BestSets) -> Tensor:
    """Records all weights of rows with few enough, at error 0; returns these finished rows."""
    positive = (weights > 0).sum(-1)
    few = (positive <= min(r, problem.value.shape[2] + 1)).nonzero()[:, 0]
    mass, keys = weights[few].topk(min(r, weights.shape[1]), dim=-1)
    size = positive[few].clamp_min(1)
    best.best[few, size] = 0
    best.write(few, size, keys * (mass > 0), mass, torch.zeros_like(mass[:, 0]))
    ended = torch.zeros_like(positive, dtype=torch.bool)
    ended[few] = True if best.error.shape[1] == 1 else positive[few] <= 1
    return ended


def _grow(
    rows: _Rows, sets: _ActiveSets, best: _BestSets, live: Tensor, reach: int, effort: str
) -> None:
    """Adds keys one by one; unless the search is "fast", each step is followed by removals."""
    while most := int(live.view(rows.heads, -1).sum(1).max()):  # live rows of the fullest head
        if most < 0.7 * rows.queries:
            chosen = rows.keep(live, most)
            sets, live = sets.take(chosen), live[chosen]
        slope, keys = rows.steepest(sets)
        place = _place(rows, sets, slope, keys) if effort != "fast" else slope.argmax(-1)
        key = keys.gather(1, place[:, None])[:, 0].clamp_max(rows.problem.value.shape[1] - 1)
        steepest = slope.gather(1, place[:, None])[:, 0]
        atom = rows.atoms(key)
        before = sets.error
        descent = (atom * sets.residual).sum(-1) + before
        live, which = sets.insert(atom, key, live & (steepest > 0) & (descent > sets.zero))
        sets.restore_feasibility(live)
        best.record(rows.row[which], sets, which)
        stuck = sets.error > before * (1 - 1e-4)
        sets.stalled = torch.where(stuck, sets.stalled + 1, 0)
        if effort != "fast":
            _backward(rows, sets, best, which)
        live = live & ~sets.done() & (sets.size < reach) & (sets.stalled < 3)


def _place(rows: _Rows, sets: _ActiveSets, slope: Tensor, keys: Tensor) -> Tensor:
    """Finds the key, among the steepest of each group, whose addition leaves least error."""
    gain = _gain(rows, sets, slope, keys)
    ordered = slope.sort(dim=-1, descending=True).values
    looks = (LOOKS // sets.size).clamp(2, KEY_GROUPS)[:, None]
    least = torch.maximum(NEARLY * ordered[:, :1], ordered.gather(1, looks - 1))
    return torch.where(slope >= least, gain, -1.0).argmax(-1)


def _gain(rows: _Rows, sets: _ActiveSets, slope: Tensor, keys: Tensor) -> Tensor:
    """Computes descent^2 / ||atom outside the span||^2 for candidate keys (B, G)."""
    keys = keys.clamp_max(rows.problem.value.shape[1] - 1)
    lift = sets.lift[:, None, None].expand(-1, keys.shape[1], 1)
    atoms = torch.cat([rows.atoms(keys), lift], dim=-1)
    used = int(sets.size.max())
    share = torch.bmm(atoms, sets.Q_transposed[:, :, :used])
    whole = atoms.square().sum(-1)
    left = torch.maximum(whole - share.square().sum(-1), 1e-4 * whole)
    descent = slope / rows.inverse.gather(1, keys).clamp_min(_tiny(slope))
    return torch.where(slope > 0, descent.square() / left, 0.0)


def _backward(rows: _Rows, sets: _ActiveSets, best: _BestSets, which: Tensor) -> None:
    """Removes atoms while that improves on the best set of the smaller size.

    The number of removals is limited by the largest size so far. This bound does not depend on r,
    so a search for more keys visits all sets that a search for fewer visits.
    """
    resolved = 16 * torch.finfo(sets.error.dtype).eps * sets.lift.square()
    spare_last = True
    while len(which):
        may = (sets.size[which] >= 3) & (sets.error[which] > resolved[which])
        which = which[may & (sets.taken_back[which] < sets.largest[which])]
        slot, error = sets.cheapest(which, spare_last)
        error_before = best.best[rows.row[which], sets.size[which] - 1]
        pays = (error < 0.999 * error_before).nonzero()[:, 0]
        which, slot = which[pays], slot[pays]
        sets.taken_back[which] += 1
        sets.drop(which, slot)
        sets.restore_feasibility(torch.zeros_like(sets.done()).index_fill_(0, which, True))
        best.record(rows.row[which], sets, which)
        spare_last = False


def _beam(rows: _Rows, r: int, best: _BestSets, ended: Tensor) -> None:
    """Extends the BEAM best sets of every size at once, from the BEAM closest values."""
    problem, count = rows.problem, len(rows.row)
    distance, first = rows.distance.topk(min(BEAM, rows.distance.shape[1]), largest=False)
    width, spare = BEAM, (0, BEAM - first.shape[1])
    distance, first = pad(distance, spare, value=torch.inf), pad(first, spare).flatten()
    rows.widen(width)
    capacity = min(r, problem.value.shape[2] + 1, problem.value.shape[1])
    sets = _ActiveSets.of_one(rows.atoms(first), first, rows.scale, rows.zero, capacity)
    live = (distance < torch.inf).flatten() & ~ended.repeat_interleave(width)
    for _ in range(2, capacity + 1):
        slope, keys = rows.steepest(sets)
        error = _child_errors(rows, sets, slope, keys)
        error = error.masked_fill(~(live & ~sets.done())[:, None], torch.inf)
        support = _hashed(sets.keys).where(sets.mass > 0, 0).sum(-1, keepdim=True) + _hashed(keys)
        child, live = _survivors(error.view(count, -1), support.view(count, -1), width)
        if not bool(live.any()):
            return
        key = keys.view(count, -1).gather(1, child).flatten()
        parent = child // KEY_GROUPS + width * torch.arange(count, device=child.device)[:, None]
        sets = sets.take(parent.flatten())
        key = key.clamp_max(problem.value.shape[1] - 1)
        live, which = sets.insert(rows.atoms(key), key, live.flatten())
        sets.restore_feasibility(live)
        lane = which % width
        counts = lane.bincount(minlength=width).tolist()
        # one set per row at a time: each may improve on the last
        for mine in which[lane.argsort(stable=True)].split(counts):
            best.record(rows.row[mine], sets, mine)


def _child_errors(rows: _Rows, sets: _ActiveSets, slope: Tensor, keys: Tensor) -> Tensor:
    """Computes the error after adding a key; exact if no weight turns negative."""
    lift, error = sets.lift.square()[:, None], sets.error[:, None]
    grown = _gain(rows, sets, slope, keys) * (lift / (lift + error)).square() / lift
    missing = (error / (lift + error) - grown).clamp_min(0)
    inverse = rows.inverse.gather(1, keys)
    pays = (slope > 0) & (slope > sets.zero[:, None] * inverse)
    return torch.where(pays, lift * missing / (1 - missing), torch.inf)


def _hashed(keys: Tensor) -> Tensor:
    """Hashes keys to numbers whose sum, which may wrap, identifies a set."""
    mixed = (keys + 0x1E3779B97F4A7C15) * -0x40A7B892E31B1A47
    return (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB


def _survivors(error: Tensor, support: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Selects the `width` best distinct supports: indices (rows, width) and which are valid."""
    error, order = error.sort(dim=-1)
    considered = min(error.shape[1], 4 * width)
    error, order = error[:, :considered], order[:, :considered]
    support = support.gather(1, order)
    same = (support[:, :, None] == support[:, None, :]).tril(-1).any(-1)
    error, place = error.masked_fill(same, torch.inf).sort(dim=-1, stable=True)
    return order.gather(1, place)[:, :width], error[:, :width] < torch.inf


def _guard(rows: _Rows, r: int, best: _BestSets) -> None:
    """Replaces sets that are worse than optimal weights on the keys of largest attention weight."""
    weights = rows.problem.weights.flatten(0, 1)
    heaviest = top_keys(weights, None, r)
    for column in range(best.error.shape[1]):
        least = best.error[:, : column + 1].amin(-1)
        which = (least > rows.zero).nonzero()[:, 0]
        if not len(which):
            return
        count = r if best.error.shape[1] == 1 else column + 1
        keys = heaviest[:, :count]
        atoms, share = rows.atoms(keys), weights.gather(1, keys)
        which = which[~_separated(atoms[which], share[which], least[which])]
        sets, better = _solve_on(
            atoms[which], share[which] > 0, rows.scale[which], rows.zero[which], least[which]
        )
        better = better.nonzero()[:, 0]
        chosen = keys[which[better]].gather(1, sets.keys[better].clamp_max(keys.shape[1] - 1))
        size = torch.full_like(better, column + 1)
        best.write(which[better], size, chosen, sets.mass[better], sets.error[better])


def _separated(
    atoms: Float[Tensor, "B C V"], share: Float[Tensor, "B C"], enough: Float[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """Returns whether every combination of the keys provably has an error of at least `enough`.

    The proof is a plane between the keys and o. Its normal starts at the attention-weighted mean
    and turns towards the keys closest to o.
    """
    share = share.masked_fill(share <= 0, 0.0)
    mean = torch.bmm((share / share.sum(-1, keepdim=True))[:, None], atoms)[:, 0]
    apart = torch.zeros_like(enough, dtype=torch.bool)
    for _ in range(6):
        squared = mean.square().sum(-1)
        depth = torch.bmm(mean[:, None], atoms.mT)[:, 0].masked_fill(share <= 0, torch.inf)
        nearest, key = depth.min(-1)
        apart |= (nearest > 0) & (nearest.square() >= enough * squared)
        turn = atoms.take_along_dim(key[:, None, None], dim=1)[:, 0] - mean
        step = (squared - nearest) / turn.square().sum(-1).clamp_min(_tiny(mean))
        mean = mean + step.clamp(0, 1)[:, None] * turn
    return apart


def _solve_on(
    atoms: Float[Tensor, "B C V"],
    usable: Bool[Tensor, "B C"],
    scale: Float[Tensor, " B"],
    zero: Float[Tensor, " B"],
    enough: Float[Tensor, " B"],
) -> tuple[_ActiveSets, Bool[Tensor, " B"]]:
    """Finds the best weights on these keys; also returns which rows end below `enough`.

    Keys are indices into `atoms`. A row stops once a hyperplane proves that it cannot.
    """
    each = torch.arange(len(atoms), device=atoms.device)
    distance = atoms.square().sum(-1).clamp_min(_tiny(atoms)).masked_fill(~usable, torch.inf)
    first = distance.argmin(-1)
    capacity = min(atoms.shape[1], atoms.shape[2] + 1)
    sets = _ActiveSets.of_one(atoms[each, first], first, scale, zero, capacity)
    live = usable.any(-1)
    hopeless = ~live
    for _ in range(4 * atoms.shape[1] + 8):
        live &= ~sets.done() & (sets.size < capacity)
        if not bool(live.any()):
            break
        descent = torch.bmm(sets.residual[:, None], atoms.mT)[:, 0] + sets.error[:, None]
        descent = descent.masked_fill(~usable, -1.0)
        gap = descent.amax(-1)
        left = sets.error - gap
        hopeless |= live & (left > 0) & (left.square() >= enough * sets.error)
        live &= ~hopeless & (gap > zero)
        key = (descent.clamp_min(0).square() / distance).argmax(-1)
        live, _ = sets.insert(atoms[each, key], key, live)
        sets.restore_feasibility(live)
    return sets, ~hopeless & (sets.error < enough)


def weigh(
    problem: Problem, indices: Int[Tensor, "H N R"]
) -> tuple[Float[Tensor, "H N R"], Bool[Tensor, "H N"]]:
    """Solves for the weights on these keys; also returns the unfinished rows, as `search` does.

    Repeated and hidden keys get weight 0.
    """
    same = (indices[..., :, None] == indices[..., None, :]).tril(-1).any(-1)
    usable = ~same
    if problem.visible is not None:
        usable &= problem.visible.gather(-1, indices)
    value = problem.value[:, None].expand(-1, indices.shape[1], -1, -1)
    where = indices[..., None].expand(*indices.shape, value.shape[-1])
    chosen = value.gather(2, where).flatten(0, 1)
    atoms, usable = chosen - problem.output.flatten(0, 1)[:, None], usable.flatten(0, 1)
    distance = atoms.square().sum(-1)
    scale = distance.where(usable, 0.0).amax(-1).clamp_min(_tiny(atoms))
    zero, enough = problem.zero().flatten(), torch.full_like(scale, torch.inf)
    sets, _ = _solve_on(atoms, usable, scale, zero, enough)
    mass = atoms.new_zeros(len(atoms), indices.shape[-1])
    mass.scatter_add_(1, sets.keys[:, :-1].clamp_max(mass.shape[1] - 1), sets.mass[:, :-1])
    mass = (mass * usable.any(-1, keepdim=True)).view(indices.shape)
    distance = distance.masked_fill(~usable, torch.inf)
    undone = unresolved(distance, scale, problem.output.flatten(0, 1))
    return mass, undone.view(indices.shape[:-1])
