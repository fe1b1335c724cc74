"""Finds the set of r keys with the least joint error, by branch and bound, with a proved bound.

With k_ij = a_ij (v_j - o_i), and what is beside the keys as one more that is always kept, a set with
indicator x leaves sum_i ||o_i - o~_i||^2 = sum_i N_i / s_i^2 of N_i = ||sum_j x_j k_ij||^2 and the
kept mass s_i = sum_j x_j a_ij. A node of the search fixes some keys as kept and some as dropped; no
completion keeps less mass than l_i nor more than u_i (the smallest and the largest free weights).

**The bound.** s^2 is convex, so that s^2 <= (l_i + u_i) s - l_i u_i =: t_i(s), its chord, and

    F(x) >= f(x) = sum_i N_i(x) / t_i(x)

for every completion x. N_i / t_i is the square of a linear map over a positive linear function and
hence convex; a tangent of f at any point y is below f, and its minimum over all x with r ones is
read off a sort. Where all keys are fixed l = u = s and f is the error itself. The same tangent says
by how much the bound rises where a key is kept or dropped against it, which fixes most keys.
"""

import heapq
from dataclasses import dataclass
from itertools import count
from time import monotonic

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.caches.joint_set import Rows
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.value_aware import ValueAware

MOST_KEYS = 128
"""Largest number of keys that `optimal_set` takes"""
STEPS = 4
"""Tangents per node: each is taken where the one before lowers f most"""
NODES = 2**18
"""Nodes bounded at once, times rows, times keys"""
ROUNDING = 1e-9
"""Relative difference of errors that counts as none"""
DIGITS = 1e-13
"""Rounding of an error, in parts of the squared distances of values from outputs"""
SMALL = 1e-6
"""Part of the largest mass below which the smallest counts as 0: t loses its digits there"""
KEPT, DROPPED = 2.0, -1.0
"""Marks of fixed keys in a node"""
TINY = 1e-100
"""Added to masses, so that products of two neither vanish nor lose digits"""


@dataclass(frozen=True)
class OptimalSet:
    """Holds the best sets found, one for each cache, and a proved bound on the error of any set."""

    indices: Int[Tensor, "*batch r"]
    """Ascending; padding where a cache has fewer keys"""
    error: Float[Tensor, " *batch"]
    """sum ||o - o~||^2 of the set, fp64"""
    lower_bound: Float[Tensor, " *batch"]
    """No set of r keys with the protected ones leaves less."""
    proved: Bool[Tensor, " *batch"]
    """No set leaves less than the error, up to rounding (1e-9 of it); False: time ran out"""


@torch.no_grad()
def optimal_set(seen: Observed, r: int, *, seconds: float = 60.0) -> OptimalSet:
    """Finds the r keys with the least sum ||o_i - o~_i||^2 over the observed queries.

    Exact by branch and bound, best bound first, from the set of `ValueAware(r, search="best")`;
    see the module for the bound. A cache whose search is not done after `seconds` has the best set
    found, and error / lower_bound is its gap. In fp64. Raises ValueError for more than `MOST_KEYS`
    keys, and where `ValueAware` does: r above the keys or below the protected ones.
    """
    start = ValueAware(r, search="best")
    start.check(seen)
    if seen.keys > MOST_KEYS:
        raise ValueError(
            f"optimal_set got {seen.keys} keys; branch and bound takes at most {MOST_KEYS}"
        )
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds!r}; it must be a number above 0")
    rows = Rows.of(seen)
    first = torch.zeros_like(rows.available)
    first.scatter_(-1, start.keep(seen).indices.view(len(first), -1), value=True)
    parts = zip(rows.split(1), (first & rows.available).split(1), strict=True)
    found = [_search(part, one, seconds) for part, one in parts]
    kept, error, bound, proved = (torch.stack(x) for x in zip(*found, strict=True))
    kept, *numbers = (x.view(*seen.batch, *x.shape[1:]) for x in (kept, error, bound, proved))
    indices = CacheMethod.ranked(seen, kept.double(), r).sort(dim=-1).values
    return OptimalSet(indices, *numbers)


def _search(
    rows: Rows, kept: Bool[Tensor, "1 M"], seconds: float
) -> tuple[Bool[Tensor, " M"], Float[Tensor, ""], Float[Tensor, ""], Bool[Tensor, ""]]:
    """Searches one cache from a set of it: the best set, its error, the bound, whether proved."""
    problem, stop = _Problem.of(rows, int(kept.sum())), monotonic() + seconds
    error, number = rows.error(kept), count(1)
    free = rows.available & ~rows.protected
    root = torch.where(free, kept.double(), torch.where(rows.protected, KEPT, DROPPED))
    heap, limit = [(0.0, 0, root[0])], problem.limit(error)
    while heap and heap[0][0] < limit and monotonic() < stop:
        taken = [heapq.heappop(heap) for _ in range(min(problem.nodes, len(heap)))]
        nodes = torch.stack([node for *_, node in taken])
        bounds, nodes, to_branch = problem.bounded(nodes, limit)
        bounds = bounds.maximum(bounds.new_tensor([bound for bound, *_ in taken]))
        best = problem.completed(nodes)[None]
        if (found := rows.error(best)) < error:
            kept, error = best, found
            limit = problem.limit(error)
        for bound, node, key in zip(bounds.tolist(), nodes, to_branch.tolist(), strict=True):
            if bound < limit and key >= 0:
                for value in (KEPT, DROPPED):
                    child = node.clone()
                    child[key] = value
                    heapq.heappush(heap, (bound, next(number), child))
    lowest = min(limit, heap[0][0]) if heap else limit
    return kept[0], error[0], error.new_tensor(max(0.0, lowest)), torch.tensor(lowest >= limit)


@dataclass(frozen=True)
class _Problem:
    """Holds a cache's weights and the products of k_ij; a node is 1 < KEPT, DROPPED < 0, or free.

    What is beside the keys is key M. A free key of a node has its part x_j in [0, 1] of the point
    at which f was last bounded.
    """

    r: int
    weights: Float[Tensor, "n K"]
    gram: Float[Tensor, "n K K"]
    sees: Bool[Tensor, "n K"]
    lost: Float[Tensor, " n"]
    """Error of a row that sees nothing"""
    digits: float
    """Rounding of an error"""
    order: Int[Tensor, "n M"]
    """Keys by weight, the largest first"""
    cost: Float[Tensor, "n K"]
    by_cost: Int[Tensor, "n K"]
    cost_sorted: Float[Tensor, "n K"]

    @classmethod
    def of(cls, rows: Rows, r: int) -> "_Problem":
        """Multiplies the weighted distances of one cache."""
        log_weights = torch.cat([rows.log_weights, rows.log_beside], dim=-1)[0]
        weights, output = log_weights.exp(), rows.output[0, :, None]
        away = torch.cat([rows.value.expand(len(output), -1, -1), rows.beside[0, :, None]], 1)
        away = (away - output).where(log_weights[..., None] > -torch.inf, 0.0)
        scaled = weights[..., None] * away
        lost = (rows.output - rows.nothing)[0].square().sum(dim=-1)
        others = r if (weights[:, -1] > 0).any() else r - 1
        cost = _cost_of_heaviest(weights, away, others)
        cost = torch.where(log_weights > -torch.inf, cost, lost[:, None])
        cost_sorted, by_cost = cost.sort(-1)
        return cls(
            r,
            weights,
            scaled @ scaled.mT,
            log_weights > -torch.inf,
            lost,
            DIGITS * float(away.square().sum(dim=-1).amax(dim=-1).sum()),
            rows.log_weights[0].argsort(dim=-1, descending=True),
            cost, by_cost, cost_sorted
        )

    @property
    def nodes(self) -> int:
        """Returns the number of nodes that are bounded at once."""
        return max(1, NODES // self.weights.numel())

    def limit(self, error: Float[Tensor, " 1"]) -> float:
        """Returns the error from which on a set is no better."""
        return float(error) - max(ROUNDING * float(error), self.digits)

    def completed(self, nodes: Float[Tensor, "B M"]) -> Bool[Tensor, " M"]:
        """Rounds the free parts to a set of each node, and returns the best set."""
        sets = torch.zeros_like(nodes).scatter(-1, nodes.topk(self.r, dim=-1).indices, 1.0)
        square, mass, _ = self._of(sets)
        errors = (square / mass.square().clamp_min(TINY**2)).sum(dim=-1)
        return sets[errors.argmin()] > 0

    def _of(
        self, x: Float[Tensor, "B M"]
    ) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B n"], Float[Tensor, "B n K"]]:
        """Computes N, s, and the products of sum_j x_j k_j with every k."""
        every = torch.cat([x, torch.ones_like(x[:, :1])], dim=-1)
        products = (every @ self.gram.flatten(0, 1).mT).view(len(x), *self.weights.shape)
        return (products @ every[..., None])[..., 0].clamp_min(0), every @ self.weights.mT, products

    def _masses(
        self, nodes: Float[Tensor, "B M"], free: Bool[Tensor, "B M"], left: Int[Tensor, "B 1"]
    ) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B n"]]:
        """Computes the smallest and the largest mass that a completion keeps."""
        fixed = torch.cat([(nodes == KEPT).double(), torch.ones_like(nodes[:, :1])], -1)
        base = fixed @ self.weights.mT
        ordered, sorted_weights = free[:, self.order], self.weights.gather(-1, self.order)
        place = ordered.to(torch.int16).cumsum(dim=-1, dtype=torch.int16)
        heavy = (ordered & (place <= left[..., None])) * sorted_weights
        light = (ordered & (place > place[..., -1:] - left[..., None])) * sorted_weights
        low, high = base + light.sum(dim=-1), base + heavy.sum(dim=-1)
        return low.where(low > SMALL * high, 0.0), high + TINY

    def bounded(
        self, nodes: Float[Tensor, "B M"], limit: float
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, "B M"], Int[Tensor, " B"]]:
        """Bounds each node, fixes its keys, and chooses the key to branch on (-1: none is free)."""
        free = (nodes >= 0) & (nodes <= 1)
        left = self.r - (nodes == KEPT).sum(dim=-1, keepdim=True)
        low, high = self._masses(nodes, free, left)
        sees = (nodes >= 0).double() @ self.sees[:, :-1].mT.double() + self.sees[:, -1] > 0
        nothing = ((~sees) * self.lost).sum(dim=-1)
        x = nodes.clamp(0, 1)
        scale = move = None
        best = torch.full_like(nothing, -torch.inf)
        for step in range(STEPS):
            square, mass, products = self._of(x)
            t = (low + high) * mass - low * high + TINY * high
            linear, down = self._by_heaviest(x)
            heaviest = linear > square / t
            both = (low + high).where(~heaviest, 0.0)
            square, t = linear.where(heaviest, square), t.where(~heaviest, 1.0)
            products = (-down / 2).where(heaviest[..., None], products)
            slope = self._slope(square, t, both, products)
            if scale is None:
                scale = 2 * (1 / t) @ self.gram.diagonal(dim1=-2, dim2=-1)[:, :-1]
                scale = scale + scale.mean(-1, keepdim=True) * 1e-3 + TINY
                rate = torch.ones_like(best)[:, None]
            else:
                bend = ((slope - before) * move).sum(-1, keepdim=True)
                rate = ((move * scale * move).sum(-1, keepdim=True) / bend.clamp_min(TINY)).clamp(0.01, 100)
            bound, rise, inside = _tangent(slope, free, left)
            bound = bound + (square / t).sum(-1) + nothing - (slope * x * free).sum(-1)
            better = bound > best
            if step == 0:
                best, top, chosen = bound, rise, inside
            else:
                best = best.maximum(bound)
                top = rise.where(better[:, None], top); chosen = inside.where(better[:, None], chosen)
            if step == STEPS - 1:
                break
            move = _projected(x, slope, scale / rate, free, left) - x
            gamma = self._line(move, square, t, both, products, heaviest)
            move, before = gamma * move, slope
            x = x + move
        fixed = free & (best[:, None] + top >= limit)
        nodes = torch.where(free, x.clamp(0, 1), nodes)
        nodes = torch.where(fixed, torch.where(chosen, KEPT, DROPPED), nodes)
        free = free & ~fixed
        left = self.r - (nodes == KEPT).sum(-1)
        score = ((x * (1 - x) + 1e-2) * scale).masked_fill(~free, -1.0)
        key = score.argmax(-1)
        determined = (left <= 0) | (left >= free.sum(-1))
        return best, nodes, key.where(~determined, -1)

    def _slope(self, square, t, both, products):
        first = 2 * ((1 / t)[:, None] @ products)[:, 0, :-1]
        return first - (square / t.square() * both) @ self.weights[:, :-1]

    def _by_heaviest(self, x):
        every = torch.cat([x, torch.ones_like(x[:, :1])], dim=-1)
        whole = every[:, self.by_cost].cumsum(-1) >= 1 - 1e-9
        first = whole.to(torch.int8).argmax(-1, keepdim=True)   # B n 1
        pi = self.cost_sorted.expand(len(x), -1, -1).gather(-1, first)
        down = (pi - self.cost).clamp_min(0)
        return pi[..., 0] - (down @ every[..., None])[..., 0], down

    def _line(self, move, square, t, both, products, heaviest):
        every = torch.cat([move, torch.zeros_like(move[:, :1])], -1)
        moved = (every @ self.gram.flatten(0, 1).mT).view(len(move), *self.weights.shape)
        cross = (products @ every[..., None])[..., 0]
        curve = (moved @ every[..., None])[..., 0].where(~heaviest, 0.0)
        dt = both * (every @ self.weights.mT)
        gamma = torch.zeros_like(move[:, :1])
        for _ in range(4):
            tt = t + gamma * dt
            q, q1 = square + 2 * gamma * cross + gamma**2 * curve, 2 * cross + 2 * gamma * curve
            one = (q1 / tt - q * dt / tt**2).sum(-1, keepdim=True)
            two = (2 * curve / tt - 2 * q1 * dt / tt**2 + 2 * q * dt**2 / tt**3).sum(-1, keepdim=True)
            gamma = (gamma - one / two.clamp_min(TINY)).clamp(0, 1)
        return gamma


def _tangent(slope, free, left):
    g, at = slope.masked_fill(~free, torch.inf).sort(dim=-1)
    inside = torch.zeros_like(free).scatter(-1, at, torch.arange(g.shape[-1]) < left)
    ends = torch.full_like(g[:, :1], torch.inf)
    ext = torch.cat([-ends, g, ends], -1)
    last, first = ext.gather(-1, left), ext.gather(-1, left + 1)
    rise = torch.where(inside, first - slope, slope - last)
    return slope.where(inside, 0.0).sum(-1), rise, inside


def _projected(x, slope, stiff, free, left):
    """weighted projection of x - slope/stiff to the slice"""
    low = (-slope + stiff * (x - 1)).masked_fill(~free, torch.inf).amin(-1, keepdim=True)
    high = (-slope + stiff * x).masked_fill(~free, -torch.inf).amax(-1, keepdim=True)
    for _ in range(25):
        middle = (low + high) / 2
        y = (x - (slope + middle) / stiff).clamp(0, 1).where(free, 0.0)
        more = y.sum(-1, keepdim=True) > left
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return y.where(free, x)


def _cost_of_heaviest(weights, away, others):
    """lower bound of each row's error where key j is the heaviest kept"""
    gram = away @ away.mT
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    along = gram / length[..., None].clamp_min(TINY)    # n j l
    lighter = (weights[:, None, :] <= weights[..., None]) & ~torch.eye(gram.shape[-1], dtype=torch.bool)
    w = weights[:, None, :] * lighter
    low, high = torch.zeros_like(length), length
    for _ in range(20):
        middle = (low + high) / 2
        pull = (w * (along - middle[..., None])).clamp_max(0)
        pull = pull.topk(min(others, pull.shape[-1]), dim=-1, largest=False).values.sum(-1) if others else 0
        fine = weights * (length - middle) + pull >= 0
        low, high = torch.where(fine, middle, low), torch.where(fine, high, middle)
    return low.square().where(weights > 0, 0.0)
