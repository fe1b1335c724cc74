"""Searches on batched tensors on any device: the torch version of active_set.cpp.

Per query, let o be the output and w_i = v_i - o. The simplex weights that bring sum_i beta_i w_i
closest to 0 are the normalised solution of a non-negative least squares problem with atoms (w_i, c)
and target (0, c), for any lift c > 0. It is solved by the active-set method of Lawson & Hanson
(1974, chapter 23), where atoms enter one by one as in orthogonal matching pursuit (Pati et al.,
1993). The atoms in use (rows of A) are represented by an orthonormal basis Q = R_inverse A. Adding
or removing an atom then costs O(size (size + V)) and stays accurate in fp32, unlike an inverted
Gram matrix.

Every query is a row of the batch. In a round every row inserts an atom, drops one or rests, by the
same operations on tensors of the same shape, so that a GPU never waits for the host. The host asks
for the number of live rows once in several rounds. Once finished rows exceed three tenths of the
batch, the others are gathered into a smaller batch.

If the keys are given, a row begins with all of them at once. The Cholesky factor of their Gram
matrix in fp64 shows which weights are negative. Rounds follow only if there are some, or if atoms
nearly depend on each other.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from value_aware_attention.approximations.closest_combination.problem import (
    BEAM,
    INDEPENDENCE,
    KEY_GROUPS,
    LOOKS,
    NEARLY,
    Problem,
    tiny,
    unresolved,
)
from value_aware_attention.call import BYTES_PER_ELEMENT, max_elements
from value_aware_attention.weights import top_keys

ROWS_AT_ONCE = 2048
"""Most queries searched at once on a CPU: enough to outweigh call overhead and to fit its cache"""
NEAREST = 8
"""Number of values nearest to o whose distances are recomputed, to remove rounding"""
APART = 1e-5
"""Smallest squared norm outside the span of earlier atoms, relative to that of the atom, with which
all atoms may begin at once"""
ROUNDS = 8
"""Most rounds before the host first asks whether rows are live. It then asks after 2 rounds, or
after one in 8 of the rounds so far"""


@dataclass
class _ActiveSets:
    """Holds one set of keys per row in slots. Some slots are empty.

    Attributes:
        basis: [Q | R_inverse], where Q = R_inverse @ the lifted atoms has orthonormal rows. An
            empty slot has a row of zeros, and a column of zeros in R_inverse.
        residual: o - x, times the sum of the unconstrained weights: the first coordinates of the
            lifted target minus its projection onto the basis.
        solution: Minus the unconstrained weights, which are neither normalised nor bounded at 0.
        target: [0, lift | 0].
        frame: [-o, lift | 0]; [v, 0 | 0] + frame is the atom of a value.
        mass: The weights beta.
        empty: 1 for an empty slot, else 0.
        place: Position of the atom in active_set.cpp, where the last atom fills a gap; or -1.
        zero: Largest error that counts as zero.
        before: Error before the last insertion.
        largest: Largest size so far.
        taken_back: Number of removals that were chosen to improve on a smaller set.
        stalled: Number of insertions in a row that hardly reduced the error.
        added: Whether no such removal followed the last insertion.
        live: Whether the row is still searched.
    """

    basis: Float[Tensor, "B K X"]
    residual: Float[Tensor, "B 1 V"]
    solution: Float[Tensor, "B 1 K"]
    target: Float[Tensor, "B 1 X"]
    frame: Float[Tensor, "B 1 X"]
    keys: Int[Tensor, "B 1 K"]
    mass: Float[Tensor, "B 1 K"]
    empty: Float[Tensor, "B 1 K"]
    place: Int[Tensor, "B 1 K"]
    lift: Float[Tensor, "B 1 1"]
    zero: Float[Tensor, "B 1 1"]
    before: Float[Tensor, "B 1 1"]
    largest: Int[Tensor, "B 1 1"]
    taken_back: Int[Tensor, "B 1 1"]
    stalled: Int[Tensor, "B 1 1"]
    added: Bool[Tensor, "B 1 1"]
    live: Bool[Tensor, "B 1 1"]

    @classmethod
    def of_one(
        cls, rows: "_Rows", key: Int[Tensor, "B 1 1"], live: Bool[Tensor, "B 1 1"]
    ) -> "_ActiveSets":
        """Creates sets of one key."""
        atom = rows.atoms(key)
        squared = atom.square().sum(-1, keepdim=True)
        lift = torch.maximum(squared, 1e-4 * rows.scale).sqrt()
        inverse = (squared + lift.square()).rsqrt()
        none, zero = torch.zeros_like(key), torch.zeros_like(lift)
        basis = torch.cat([atom * inverse, lift * inverse, inverse], dim=-1)
        target = torch.cat([torch.zeros_like(atom), lift, zero], dim=-1)
        frame = torch.cat([-rows.output, lift, zero], dim=-1)
        sets = cls(
            basis, atom, zero, target, frame, key, zero + 1, zero, none, lift, rows.zero,
            zero + torch.inf, none + 1, none, none, none == 0, live,
        )  # fmt: skip
        sets.project()
        return sets

    def take(self, rows: Tensor | slice) -> "_ActiveSets":
        """Copies the sets of some rows."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def reserve(self, slots: int) -> None:
        """Adds empty slots, up to this number of slots."""
        more = (0, slots - self.keys.shape[-1])
        if more[1] > 0:
            self.basis = pad(self.basis, more + more)
            self.empty, self.place = pad(self.empty, more, value=1), pad(self.place, more, value=-1)
            for name in ("solution", "target", "frame", "keys", "mass"):
                setattr(self, name, pad(getattr(self, name), more))

    def size(self) -> Int[Tensor, "B 1 1"]:
        return (self.empty == 0).sum(-1, keepdim=True)

    def start(
        self, atoms: Float[Tensor, "B K V"], usable: Bool[Tensor, "B 1 K"]
    ) -> Bool[Tensor, "B 1 1"]:
        """Takes all usable atoms in place of the first set, less those of negative weight.

        Rows keep their set if atoms nearly depend on each other. The Gram matrix is in fp64,
        because its factor has half the digits. Returns the rows that use all these atoms, which is
        optimal.
        """
        # in units of the lift, or the squares of atoms that are all almost 0 would underflow
        lifted = pad(atoms.double() / self.lift.double(), (0, 1), value=1.0)
        gram, used = torch.bmm(lifted, lifted.mT), usable
        identity = torch.eye(len(gram[0]), dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky_ex(gram.where(used & used.mT, identity)).L
        outside, squared = (x.diagonal(dim1=1, dim2=2)[:, None] for x in (factor.square(), gram))
        apart = ((outside > APART * squared) | ~used).all(-1, keepdim=True)
        weights = torch.cholesky_solve(used.mT.to(gram), factor).mT
        used = used & (weights > 0)
        factor = torch.linalg.cholesky_ex(gram.where(used & used.mT, identity)).L
        inverse = torch.linalg.solve_triangular(factor, identity * used.mT, upper=False)
        basis = [x.to(self.basis) for x in (torch.bmm(inverse, lifted), inverse / self.lift)]
        self.basis = torch.cat(basis, dim=-1).where(apart, self.basis)
        self.keys = _each(identity).where(apart, self.keys)
        self.mass = (weights * used).to(self.mass).where(apart, self.mass)
        self.mass.div_(self.mass.sum(-1, keepdim=True))
        self.empty = (~used).to(self.empty).where(apart, self.empty)
        self.project()
        return apart & (used == usable).all(-1, keepdim=True)

    def project(self) -> None:
        """Recomputes residual and solution: projects the target onto the span of Q."""
        width, slots = self.residual.shape[-1], self.keys.shape[-1]
        step = self.basis.narrow(2, width, 1).mT * self.lift
        left = torch.baddbmm(self.target, step, self.basis, alpha=-1)
        self.residual, _, self.solution = left.split([width, 1, slots], dim=-1)

    def measure(self) -> tuple[Float[Tensor, "B 1 1"], Float[Tensor, "B 1 1"]]:
        """Returns ||o - x||^2 and minus the sum of the unconstrained weights."""
        total = self.solution.sum(-1, keepdim=True)
        return (vector_norm(self.residual, dim=-1, keepdim=True) / total).square_(), total

    def approach(self, total: Tensor) -> tuple[Int[Tensor, "B 1 1"], Bool[Tensor, "B 1 1"]]:
        """Moves the weights towards the unconstrained ones until one of them reaches zero.

        Returns the slot of that weight, and whether there is one. The inner loop of Lawson & Hanson
        drops its atom and repeats this.
        """
        share = self.solution / total
        reachable = self.mass / (self.mass - share).clamp_min_(tiny(share))
        reachable = reachable.masked_fill_((share + self.empty) > 0, torch.inf)
        reach, slot = reachable.min(dim=-1, keepdim=True)
        self.mass = self.mass.lerp(share, reach.clamp_max(1)).clamp_min_(0)
        return slot, reach < torch.inf

    def change(
        self,
        value: Float[Tensor, "B 1 V"],
        key: Int[Tensor, "B 1 1"],
        slot: Int[Tensor, "B 1 1"],
        drop: Bool[Tensor, "B 1 1"],
        insert: Bool[Tensor, "B 1 1"],
    ) -> None:
        """Inserts a value into an empty slot by Gram-Schmidt, drops the one there, or does neither.

        A row rests for good if it does neither, or if the atom depends on those of the row. A
        reflection moves an atom to drop into the row in which it is largest. This row is then
        replaced by the row of its slot, which is emptied.
        """
        basis, inserted, width = self.basis, insert.to(value.dtype), value.shape[-1] + 1
        column = slot + width
        atom = pad(value, (0, basis.shape[1] + 1)).add_(self.frame).mul_(inserted)
        # Where a slot is filled, the vector is 1 there alone, and selects its column of R_inverse.
        vector = atom.scatter(-1, column, 1.0)
        share = torch.bmm(vector, basis.mT)
        norm = vector_norm(share, dim=-1, keepdim=True)
        share = share.div_(norm.masked_fill_(~drop, 1.0))
        rest = vector.baddbmm_(share, basis, alpha=-1)
        outside = rest[..., :width]
        again = torch.bmm(outside, basis[..., :width].mT).mul_(inserted)
        rest.baddbmm_(again, basis, alpha=-1)
        length = vector_norm(outside, dim=-1, keepdim=True)
        before = vector_norm(atom, dim=-1, keepdim=True)
        insert = insert & (length > INDEPENDENCE[value.dtype] * before)
        inserted = insert.to(value.dtype)
        largest = torch.where(drop, share.abs().argmax(-1, keepdim=True), slot)
        row, pivot = slot.expand_as(rest), share.gather(-1, largest)
        largest = largest.expand_as(rest)
        turned = basis.gather(1, largest).mul_(pivot.sign()).sub_(rest)
        share.mul_(drop / pivot.abs_().add_(1))
        basis.addcmul_(share.mT, turned, value=-1)
        basis.scatter_(2, column.expand(-1, basis.shape[1], 1), 0.0)
        basis.scatter_(1, largest, basis.gather(1, row))
        basis.scatter_(1, row, rest.mul_(inserted / length.clamp_min_(tiny(rest))))
        self.keys.scatter_(-1, slot, key)
        self.empty.scatter_(-1, slot, 1 - inserted)
        self.live = drop | insert
        self.project()

    def order(self, slot: Tensor, drop: Tensor) -> None:
        """Updates `place` after a change, and the weights after a removal of any atom."""
        old, size = self.place.gather(-1, slot), self.size()
        self.place = torch.where((self.place == size) & drop, old, self.place)
        self.place.scatter_(-1, slot, (size - 1).masked_fill_(drop | ~self.live, -1))
        torch.maximum(self.largest, size, out=self.largest)
        self.mass.scatter_(-1, slot, 0.0)
        self.mass.div_(self.mass.sum(-1, keepdim=True))

    def cheapest(
        self, total: Tensor, size: Tensor
    ) -> tuple[Int[Tensor, "B 1 1"], Float[Tensor, "B 1 1"]]:
        """Finds the atom that costs least to remove, and the error if no weight turns negative.

        The last atom is spared right after an insertion.
        """
        column = vector_norm(self.basis[..., -self.keys.shape[-1] :], dim=1, keepdim=True)
        cost = (self.solution / column.clamp_min_(tiny(total))).square_()
        spared = (self.place < 0) | ((self.place == size - 1) & self.added)
        least, slot = cost.masked_fill_(spared, torch.inf).min(dim=-1, keepdim=True)
        lift = self.lift.square()
        left = -(total + least / lift)
        error = lift * (1 / left - 1)
        return slot, error.masked_fill_((left <= 0) | (error <= 0), torch.inf)


def _each(x: Tensor) -> Int[Tensor, " B"]:
    return torch.arange(len(x), device=x.device)


class _BestSets:
    """Holds the best set of every size, or, if `sizes` is 1, the best of all sizes up to r.

    Sets to discard are written to the last column and the last size.
    """

    def __init__(self, rows: int, sizes: int, r: int, slots: int, like: Tensor) -> None:
        self.r, self.sizes = r, sizes
        self.keys = torch.zeros(rows, sizes + 1, slots, dtype=torch.int64, device=like.device)
        self.mass = like.new_zeros(rows, sizes + 1, slots)
        self.error, self.best = (like.new_full((rows, n), torch.inf) for n in (sizes + 1, r + 3))

    def record(
        self,
        rows: Int[Tensor, " B"],
        which: Bool[Tensor, "B 1 1"],
        sets: _ActiveSets,
        error: Float[Tensor, "B 1 1"],
    ) -> None:
        """Records the sets among `which` that improve on the best set of their row and size."""
        size, error = sets.size().flatten(), error.flatten()
        better = which.flatten() & (size <= self.r) & (error < self.best[rows, size])
        self.best[rows, size.masked_fill(~better, self.r + 2)] = error
        self.write(rows, better, size - 1, sets.keys[:, 0], sets.mass[:, 0], error)

    def write(
        self, rows: Tensor, which: Tensor, column: Tensor, keys: Tensor, mass: Tensor, error: Tensor
    ) -> None:
        """Replaces recorded sets by those among `which` whose error is smaller."""
        column = column.clamp(0, self.sizes - 1)
        better = which & (error < self.error[rows, column])
        column = column.masked_fill_(~better, self.sizes)
        more = (0, self.keys.shape[2] - keys.shape[1])
        self.error[rows, column] = error
        self.keys[rows, column], self.mass[rows, column] = pad(keys, more), pad(mass, more)

    def improve(self, twice: "_BestSets", which: int, zero: Tensor | float = -1.0) -> None:
        """Takes the sets of every second row, from `which` on, if they are better.

        Sets whose error is at most `zero` stay.
        """
        error = twice.error[which::2]
        better = (error < self.error) & (self.error > zero)
        self.error = error.where(better, self.error)
        self.keys = twice.keys[which::2].where(better[..., None], self.keys)
        self.mass = twice.mass[which::2].where(better[..., None], self.mass)

    def solution(self) -> tuple[Int[Tensor, "B S R"], Float[Tensor, "B S R"]]:
        """Returns keys and weights, in the order of the weights."""
        mass, slot = self.mass[:, :-1].topk(self.r, dim=-1)
        return self.keys[:, :-1].gather(-1, slot) * (mass > 0), mass


class _Rows:
    """Holds the unfinished queries, equally many per head, so that one product scans them all."""

    PER_ROW = ("row", "output", "scale", "zero", "inverse", "first", "mean")

    def __init__(
        self,
        value: Float[Tensor, "H P V"],
        output: Float[Tensor, "B 1 V"],
        distance: Float[Tensor, "B 1 M"],
        scale: Float[Tensor, "B 1 1"],
        zero: Float[Tensor, "B 1 1"],
    ) -> None:
        """Holds B queries of H heads; a hidden key has an infinite distance, and P may exceed M."""
        self.transposed, self.flat = value.mT, value.flatten(0, 1)
        self.mean: Tensor | None = None
        self.output, self.distance = output, distance
        self.heads, self.queries = len(value), len(output) // max(1, len(value))
        self.scale, self.zero, self.row = scale, zero, _each(output)
        # Hidden keys and padding get slope 0.
        inverse = torch.maximum(distance, 1e-8 * scale).rsqrt_()
        self.inverse = pad(inverse, (0, value.shape[1] - inverse.shape[-1]))
        self.first = (self.row // max(1, self.queries) * value.shape[1])[:, None, None]

    @classmethod
    def of(cls, problem: Problem) -> "_Rows":
        """Holds all queries of a problem."""
        squared = problem.output.square().sum(-1, keepdim=True)
        norms = problem.value.square().sum(-1)[:, None]
        distance = torch.baddbmm(norms + squared, problem.output, problem.value.mT, alpha=-2)
        finite, visible = distance, problem.visible
        if visible is not None:
            finite, distance = distance.where(visible, 0.0), distance.where(visible, torch.inf)
        scale = finite.amax(-1).clamp_min_(tiny(distance)).view(-1, 1, 1)
        value = pad(problem.value, (0, 0, 0, -problem.value.shape[1] % KEY_GROUPS))
        output, zero = problem.output.flatten(0, 1)[:, None], problem.zero().view(-1, 1, 1)
        return cls(value, output, distance.flatten(0, 1)[:, None], scale, zero)

    def with_mean(self, mean: Float[Tensor, "B 1 V"]) -> "_Rows":
        """Returns two rows of each query, as neighbours, so that one search serves both.

        The second has its own vector as last candidate.
        """
        rows = copy(self)
        distance = (mean - self.output).square().sum(-1, keepdim=True)
        inverse = torch.maximum(distance, 1e-8 * self.scale).rsqrt_()
        rows.mean, rows.inverse = mean, torch.cat([self.inverse, inverse], dim=-1)
        rows.distance = torch.cat([self.distance, distance], dim=-1).repeat_interleave(2, dim=0)
        rows.widen(2)
        rows.distance[::2, :, -1], rows.inverse[::2, :, -1] = torch.inf, 0.0
        rows.row = _each(rows.output)
        return rows

    def values(self, keys: Int[Tensor, "B 1 C"]) -> Float[Tensor, "B C V"]:
        """Returns the values of the keys of each row."""
        if self.mean is None:
            return torch.embedding(self.flat, keys + self.first).squeeze(1)
        last = self.transposed.shape[-1] - 1
        values = torch.embedding(self.flat, keys.clamp_max(last) + self.first).squeeze(1)
        return self.mean.where(keys.mT > last, values)

    def atoms(self, keys: Int[Tensor, "B 1 C"]) -> Float[Tensor, "B C V"]:
        """Returns v - o for the keys of each row."""
        return self.values(keys) - self.output

    def nearest(self) -> Int[Tensor, "B 1 1"]:
        """Finds the key whose value is closest to o (Eq. 3); ties go to the first.

        Distances are first differences of squares; the smallest are then recomputed.
        """
        few = min(NEAREST, self.distance.shape[-1])
        least, keys = self.distance.topk(few, dim=-1, largest=False)
        keys = keys.where(least < torch.inf, keys[..., :1]).sort(dim=-1).values
        keys = self.candidates(keys)
        closest = self.atoms(keys).square().sum(-1).argmin(-1, keepdim=True)
        return keys.gather(-1, closest[:, None])

    def candidates(self, places: Tensor) -> Tensor:
        """Converts places among the distances, which have no padding, to keys."""
        if self.mean is None:
            return places
        return places.masked_fill(places == self.distance.shape[-1] - 1, self.transposed.shape[-1])

    def descents(self, sets: _ActiveSets, error: Tensor, total: Tensor) -> Float[Tensor, "B 1 P"]:
        """Computes <v - x, o - x> of every value, times the sum of the unconstrained weights."""
        shift = (sets.residual * self.output).sum(-1, keepdim=True).addcmul_(error, total)
        shape = self.heads, self.queries, -1
        product = torch.baddbmm(
            shift.view(shape), sets.residual.view(shape), self.transposed, beta=-1
        )
        product = product.view(len(shift), 1, product.shape[-1])
        if self.mean is None:
            return product
        return torch.cat(
            [product, (sets.residual * self.mean).sum(-1, keepdim=True) - shift], dim=-1
        )

    def steepest(self, descent: Float[Tensor, "B 1 P"]) -> tuple[Tensor, Tensor]:
        """Finds slope (B, 1, C), descent / ||v - o||, and key of the steepest of every group.

        The mean is a separate group.
        """
        slope = (descent * self.inverse).clamp_min_(0)
        last = self.transposed.shape[-1]
        slope, of_mean = slope[..., :last], slope[..., last:]
        most, place = _largest(slope.reshape(len(slope), -1, KEY_GROUPS))
        keys = place * KEY_GROUPS + torch.arange(KEY_GROUPS, device=place.device)
        most, keys = most[:, None], keys[:, None]
        return torch.cat([most, of_mean], -1), pad(keys, (0, of_mean.shape[-1]), value=last)

    def widen(self, times: int) -> None:
        """Repeats every query `times` times, as neighbours."""
        self.queries *= times
        self._take(_each(self.output).repeat_interleave(times))

    def keep(self, live: Bool[Tensor, "B 1 1"], most: int) -> Tensor:
        """Keeps only the live rows, padded to `most` per head; returns their positions."""
        order = live.view(self.heads, -1).int().argsort(dim=1, descending=True, stable=True)
        positions = (order[:, :most] + _each(order)[:, None] * self.queries).flatten()
        self.queries = most
        self._take(positions)
        return positions

    def _take(self, positions: Int[Tensor, " B"]) -> None:
        for name in self.PER_ROW[: None if self.mean is not None else -1]:
            setattr(self, name, getattr(self, name)[positions])


def _largest(groups: Float[Tensor, "B M G"]) -> tuple[Float[Tensor, "B G"], Int[Tensor, "B G"]]:
    """Returns the maximum over M and its index, for small M and entries >= 0."""
    if groups.dtype != torch.float32 or groups.device.type != "cpu":
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
    shape, results = (*problem.output.shape[:2], sizes, r), []
    if sizes == 1 and r > problem.value.shape[-1]:
        problem = replace(problem, mean=None)  # so many values reach the output without it
    for block in _parts(problem, _rows_at_once(problem, r, effort)):
        best, undone = _search(block, r, effort, sizes)
        results.append((*best.solution(), undone))
    keys, mass, undone = (torch.cat(parts) for parts in zip(*results, strict=True))
    return keys.view(shape), mass.view(shape), undone.view(shape[:2])


def _rows_at_once(problem: Problem, r: int, effort: str) -> int:
    """Returns the number of queries searched together."""
    keys, width = problem.value.shape[1:]
    size, times = min(r, width) + 2, 1 if problem.mean is None else 2
    numbers = times * (2 * size * (width + 1 + size) + 4 * keys)  # the basis is copied to grow
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
            some = several, slice(first, first + rows)
            visible, mean = (
                None if x is None else x[some] for x in (problem.visible, problem.mean)
            )
            yield Problem(
                problem.value[several],
                problem.output[some],
                problem.weights[some],
                visible,
                problem.unit[several],
                mean=mean,
            )


def _search(problem: Problem, r: int, effort: str, sizes: int) -> tuple[_BestSets, Tensor]:
    """Returns the best sets, and the rows left to fp64."""
    keys, width = problem.value.shape[1:]
    capacity, weights = min(r + 1, width + 1, keys), problem.weights.flatten(0, 1)
    best = _BestSets(len(weights), sizes, r, max(r, capacity + 1), weights)
    heaviest = top_keys(weights, None, r)
    few = _take_few(weights, heaviest, width, best)
    rows = all_rows = _Rows.of(problem)
    undone = unresolved(rows.distance, rows.scale[..., 0], rows.output)[..., None] & ~few
    searched, ended = best, few | undone
    if problem.mean is not None:
        searched = _BestSets(2 * len(weights), sizes, r, max(r, capacity + 1), weights)
        searched.best[::2] = best.best
        all_rows = rows.with_mean(problem.mean.flatten(0, 1)[:, None])
        ended = ended.repeat_interleave(2, dim=0)
    _search_rows(all_rows, searched, ended, min(r + (effort != "fast"), capacity), effort)
    if problem.mean is not None:
        best.improve(searched, 0)
    if r > 1:
        best.error.masked_fill_(undone[..., 0], 0.0)
        _guard(rows, weights, heaviest, best)
    if problem.mean is not None:
        best.improve(searched, 1, rows.zero[:, 0] if sizes == 1 else -1.0)
    return best, undone.flatten()


def _search_rows(
    all_rows: _Rows, best: _BestSets, ended: Bool[Tensor, "B 1 1"], reach: int, effort: str
) -> None:
    """Searches rows from the nearest candidate on, and records the best sets."""
    rows = copy(all_rows)
    sets = _ActiveSets.of_one(rows, rows.nearest(), ~ended)
    _grow(rows, sets, best, reach, effort)
    if best.r > 1 and effort == "best":
        _beam(copy(all_rows), best.r, best, ended)


def _take_few(
    weights: Tensor, heaviest: Tensor, width: int, best: _BestSets
) -> Bool[Tensor, "B 1 1"]:
    """Records all weights of rows with few enough, at error 0; returns these finished rows."""
    positive, none = (weights > 0).sum(-1), torch.zeros_like(weights[:, 0])
    few = positive <= min(best.r, width + 1)
    mass, each = weights.gather(1, heaviest), _each(weights)
    best.best[each, positive.clamp_min(1).masked_fill_(~few, best.r + 2)] = 0
    best.write(each, few, positive - 1, heaviest * (mass > 0), mass, none)
    return (few if best.sizes == 1 else positive <= 1)[:, None, None]


def _grow(
    rows: _Rows,
    sets: _ActiveSets,
    best: _BestSets,
    reach: int,
    effort: str,
    may_stall: bool = True,
) -> None:
    """Adds keys one by one; unless the search is "fast", each step is followed by removals.

    A fast search for one size records the last set alone, which is the best. `may_stall` ends rows
    whose error hardly falls; without it, rows go on for a number of rounds.
    """
    often, slots, rounds = effort != "fast" or best.sizes > 1, 1, 0
    count, limit = min(reach, ROUNDS) if may_stall else 0, 8 * reach + 16
    error = sets.measure()[0]
    while True:
        slots = min(slots + count, reach + 1)
        sets.reserve(slots)
        for _ in range(count):
            error = _round(rows, sets, best if often else None, reach, effort, may_stall)
        most = int(sets.live.view(rows.heads, -1).sum(1).max())  # live rows of the fullest head
        ended = not most or (rounds >= limit and not may_stall)
        if ended or most < 0.7 * rows.queries:
            if not often:
                best.record(rows.row, ~sets.live, sets, error)
            if ended:
                return
            sets = sets.take(rows.keep(sets.live, most))
        rounds, count = rounds + count, max(2, (rounds + count) // ROUNDS)


def _round(
    rows: _Rows,
    sets: _ActiveSets,
    best: _BestSets | None,
    reach: int,
    effort: str,
    may_stall: bool,
) -> Float[Tensor, "B 1 1"]:
    """Lets every live row drop an atom, or insert one, or end; returns the errors before that."""
    error, total = sets.measure()
    slot, blocked = sets.approach(total)
    drop = sets.live & blocked
    insert = sets.live ^ drop
    if may_stall:
        stuck = error > (1 - 1e-4) * sets.before
        sets.stalled = torch.where(insert & sets.added, (sets.stalled + 1) * stuck, sets.stalled)
    if best is not None:
        best.record(rows.row, insert, sets, error)
    if effort != "fast" and best is not None:
        back, pays = _pays(rows, sets, best, error, total)
        pays = pays & insert
        slot, drop, insert = torch.where(pays, back, slot), drop | pays, insert & ~pays
        sets.taken_back, sets.added = sets.taken_back + pays, sets.added & ~pays
    excess = error - sets.zero
    descent = rows.descents(sets, excess, total)
    if effort == "fast":
        slope, key = descent.mul_(rows.inverse).max(-1, keepdim=True)
    else:
        slope, key = _place(rows, sets, *rows.steepest(descent))
    insert = insert & (torch.minimum(slope, excess) > 0)
    if sets.keys.shape[-1] > reach:
        insert = insert & (sets.empty.sum(-1, keepdim=True) > 1)
    if may_stall:
        insert = insert & (sets.stalled < 3)
        sets.before = torch.where(insert, error, sets.before)
    slot = torch.where(drop, slot, sets.empty.argmax(-1, keepdim=True))
    sets.change(rows.values(key), key, slot, drop, insert)
    if effort != "fast":
        sets.order(slot, drop)
        sets.added = sets.added | insert
    return error


def _pays(
    rows: _Rows, sets: _ActiveSets, best: _BestSets, error: Tensor, total: Tensor
) -> tuple[Int[Tensor, "B 1 1"], Bool[Tensor, "B 1 1"]]:
    """Finds the atom to remove, and whether that improves on the best set of the smaller size.

    The number of removals is limited by the largest size so far. This bound does not depend on r,
    so a search for more keys visits all sets that a search for fewer visits.
    """
    size = sets.size()
    slot, after = sets.cheapest(total, size)
    resolved = 16 * torch.finfo(error.dtype).eps * sets.lift.square()
    may = (size >= 3) & (error > resolved) & (sets.taken_back < sets.largest)
    return slot, may & (after < 0.999 * best.best[rows.row[:, None, None], size - 1])


def _place(rows: _Rows, sets: _ActiveSets, slope: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Finds slope and key, among the steepest of each group, whose addition leaves least error."""
    gain = _gain(rows, sets, slope, keys)
    ordered = slope.sort(dim=-1, descending=True).values
    looks = (LOOKS // sets.size()).clamp_(2, KEY_GROUPS) - 1
    least = torch.maximum(NEARLY * ordered[..., :1], ordered.gather(-1, looks))
    place = gain.masked_fill_(slope < least, -1.0).argmax(-1, keepdim=True)
    return slope.gather(-1, place), keys.gather(-1, place)


def _gain(rows: _Rows, sets: _ActiveSets, slope: Tensor, keys: Tensor) -> Float[Tensor, "B 1 G"]:
    """Computes descent^2 / ||atom outside the span||^2 for candidate keys (B, 1, G)."""
    atoms = torch.cat([rows.atoms(keys), sets.lift.expand(-1, keys.shape[-1], 1)], dim=-1)
    share = torch.bmm(atoms, sets.basis[..., : atoms.shape[-1]].mT)
    whole = atoms.square().sum(-1)
    left = torch.maximum(whole - share.square().sum(-1), 1e-4 * whole)[:, None]
    descent = slope / rows.inverse.gather(-1, keys).clamp_min(tiny(slope))
    return descent.square_().div_(left).masked_fill_(slope <= 0, 0.0)


def _beam(rows: _Rows, r: int, best: _BestSets, ended: Tensor) -> None:
    """Extends the BEAM best sets of every size at once, from the BEAM closest values."""
    count, width = len(rows.row), BEAM
    distance, first = rows.distance.topk(min(width, rows.distance.shape[-1]), largest=False)
    first = rows.candidates(first)
    spare = (0, width - first.shape[-1])
    distance, first = pad(distance, spare, value=torch.inf), pad(first, spare)
    rows.widen(width)
    live = ((distance < torch.inf) & ~ended).view(-1, 1, 1)
    sets = _ActiveSets.of_one(rows, first.view(-1, 1, 1), live)
    for size in range(2, min(r, rows.output.shape[-1] + 1, rows.distance.shape[-1]) + 1):
        error, total = sets.measure()
        slope, keys = rows.steepest(rows.descents(sets, error, total))
        least = _child_errors(rows, sets, slope, keys)
        least = least.masked_fill(~(sets.live & (error > sets.zero)), torch.inf)
        support = _hashed(sets.keys).where(sets.mass > 0, 0).sum(-1, keepdim=True) + _hashed(keys)
        child, live = _survivors(least.view(count, -1), support.view(count, -1), width)
        if not bool(live.any()):
            return
        key = keys.view(count, -1).gather(1, child).view(-1, 1, 1)
        parent = child // slope.shape[-1] + width * _each(child)[:, None]
        sets = sets.take(parent.flatten())
        sets.reserve(size + 1)
        insert, slot = live.view(-1, 1, 1), sets.empty.argmax(-1, keepdim=True)
        sets.change(rows.values(key), key, slot, torch.zeros_like(insert), insert)
        _restore_feasibility(sets, rows)
        error, _ = sets.measure()
        for lane in range(width):  # one set per row at a time: each may improve on the last
            some = sets.take(slice(lane, None, width))
            best.record(rows.row[lane::width], some.live, some, error[lane::width])


def _restore_feasibility(sets: _ActiveSets, rows: _Rows) -> None:
    """Drops atoms whose weight reaches zero on the way to the unconstrained weights."""
    live, insert = sets.live, torch.zeros_like(sets.live)
    while True:
        slot, blocked = sets.approach(sets.measure()[1])
        drop = live & blocked
        if not bool(drop.any()):
            break
        slot = torch.where(drop, slot, sets.empty.argmax(-1, keepdim=True))
        sets.change(rows.output, slot, slot, drop, insert)
    sets.live = live


def _child_errors(
    rows: _Rows, sets: _ActiveSets, slope: Tensor, keys: Tensor
) -> Float[Tensor, "B 1 G"]:
    """Computes the error after adding a key; exact if no weight turns negative."""
    error, total = sets.measure()
    lift = sets.lift.square()
    missing = (error / (lift + error) - _gain(rows, sets, slope, keys) / lift).clamp_min(0)
    pays = slope > -sets.zero * total * rows.inverse.gather(-1, keys)
    return torch.where(pays & (slope > 0), lift * missing / (1 - missing), torch.inf)


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


def _guard(rows: _Rows, weights: Tensor, heaviest: Tensor, best: _BestSets) -> None:
    """Replaces sets that are worse than optimal weights on the keys of largest attention weight."""
    atoms, has_weight = rows.atoms(heaviest[:, None]), weights.gather(1, heaviest) > 0
    for column in range(best.sizes):
        count, least = best.r - best.sizes + column + 1, best.error[:, : column + 1].amin(-1)
        usable = has_weight[:, :count] & (least[:, None] > rows.zero[:, 0])
        solved = _solve_on(atoms[:, :count], usable, rows.scale, rows.zero)
        (slots, mass), error = solved.solution(), solved.error[:, 0]
        keys, columns = heaviest.gather(1, slots[:, 0]), torch.full_like(rows.row, column)
        best.write(rows.row, error < least, columns, keys, mass[:, 0], error)


def _solve_on(
    atoms: Float[Tensor, "B C V"],
    usable: Bool[Tensor, "B C"],
    scale: Float[Tensor, "B 1 1"],
    zero: Float[Tensor, "B 1 1"],
) -> _BestSets:
    """Finds the best weights on these keys, which are indices into `atoms`."""
    (count, width), live = atoms.shape[1:], usable.any(-1)[:, None, None]
    distance = (
        atoms.square().sum(-1).clamp_min_(tiny(atoms)).masked_fill_(~usable, torch.inf)[:, None]
    )
    rows = _Rows(atoms, torch.zeros_like(atoms[:, :1]), distance, scale, zero)
    reach = min(count, width + 1)
    best = _BestSets(len(atoms), 1, count, max(count, reach + 1), atoms)
    sets = _ActiveSets.of_one(rows, distance.argmin(-1, keepdim=True), live)
    sets.reserve(reach)
    is_optimal = sets.start(atoms[:, :reach], usable[:, None, :reach])
    sets.live = sets.live & ~(is_optimal & (reach == count))
    sets.reserve(reach + 1)
    _grow(rows, sets, best, reach, "fast", may_stall=False)
    return best


def weigh(
    problem: Problem, indices: Int[Tensor, "H N R"]
) -> tuple[Float[Tensor, "H N R"], Bool[Tensor, "H N"]]:
    """Solves for the weights on these keys; also returns the unfinished rows, as `search` does.

    Repeated and hidden keys get weight 0.
    """
    same = (indices[..., :, None] == indices[..., None, :]).tril(-1).any(-1)
    usable, is_mean = ~same, indices == problem.mean_key
    places = indices.masked_fill(is_mean, 0)
    if problem.visible is not None:
        usable &= problem.visible.gather(-1, places) | is_mean
    value = problem.value[:, None].expand(-1, indices.shape[1], -1, -1)
    where = places[..., None].expand(*indices.shape, value.shape[-1])
    chosen = value.gather(2, where)
    if problem.mean is not None:
        chosen = problem.mean[:, :, None].where(is_mean[..., None], chosen)
    chosen = chosen.flatten(0, 1)
    atoms, usable = chosen - problem.output.flatten(0, 1)[:, None], usable.flatten(0, 1)
    distance = atoms.square().sum(-1)
    scale = distance.where(usable, 0.0).amax(-1).clamp_min(tiny(atoms))
    zero = problem.zero().view(-1, 1, 1)
    keys, solved = _solve_on(atoms, usable, scale[:, None, None], zero).solution()
    mass = torch.zeros_like(distance).scatter_add_(1, keys[:, 0], solved[:, 0])
    mass = (mass * usable.any(-1, keepdim=True)).view(indices.shape)
    distance = distance.masked_fill(~usable, torch.inf)
    undone = unresolved(distance, scale, problem.output.flatten(0, 1))
    return mass, undone.view(indices.shape[:-1])
