"""Finds the set of r keys with the least joint error, by branch and bound, with a proved bound.

Let k_j = a_ij (v_j - o_i), and let the mass in `beside` be one more key that is always kept. A set
with indicator x has error sum_i N_i / s_i^2, where N_i = ||sum_j x_j k_j||^2 and s_i = sum_j x_j
a_ij is the kept mass. A node of the search fixes some keys as kept and some as dropped; its
completions keep a mass between l_i and u_i. Each row's error then has two lower bounds:

    chord      t := (l + u) s - l u = s^2 + (s - l) (u - s) >= s^2, so N / s^2 >= N / t: the square
               of a linear map over a positive linear function, convex in x, above its tangents
    heaviest   p - sum_j x_j max(0, p - c_j) for any p, where c_j is at most the row's error of any
               set whose heaviest key is j: that key alone makes it min(p, c_j), the others less

A row without kept mass has N = 0, a chord of 0, and c_j = its whole loss. Both bounds are linear in
x once a point and p are chosen. The node's bound is the minimum over its completions of their sum
over rows, taking in each row the bound that is larger at the point; a sort finds the minimum. A
completion that differs from it in some key is above it by at least one exchange. If that reaches
the limit, the key is fixed. Points follow the Frank-Wolfe method towards those minima.
"""

from dataclasses import dataclass, replace
from time import monotonic

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.caches.joint_set import Rows
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.value_aware import ValueAware

MOST_SOLVED, NODES = 128, 2**18
"""Largest number of keys for `optimal_set`; limit of nodes x rows x keys bounded at once"""
NODE_TANGENTS, FIRST_TANGENTS, SLOWNESS = 4, 256, 24
"""Number of tangents per node, and for the first node. At step k the point moves 2 / (k + slowness)
of the way: a child starts from its parent's point, which is near its own best"""
SAME_ERROR, ERROR_ROUNDING, TINY = 1e-9, 1e-14, 1e-100
"""Relative difference of errors that counts as zero; rounding of an error, relative to the rows'
largest squared distances ||v_j - o_i||^2, and of a bound, relative to its slopes; smallest divisor,
relative to its dividend"""
SMALL_MASS = 1e-2
"""A mass below this share of the largest counts as 0, because slopes grow as (u / l)^2"""
FIXED_IN, FIXED_OUT = 2.0, -1.0
"""Marks of a node's fixed keys; a free key has its coordinate of the last point, 0 to 1"""


@dataclass(frozen=True)
class OptimalSet:
    """Holds the best set found for each cache, and a proved bound on the error of every set.

    `indices` ascend and include padding if a cache has fewer keys. `error` is the set's sum
    ||o - o~||^2 in fp64. No set of r keys that includes the protected ones has an error below
    `lower_bound`. `proved` is True if both are equal up to rounding (1e-9, or the last digits of
    distances).
    """

    indices: Int[Tensor, "*batch r"]
    error: Float[Tensor, " *batch"]
    lower_bound: Float[Tensor, " *batch"]
    proved: Bool[Tensor, " *batch"]


@torch.no_grad()
def optimal_set(observed: Observed, r: int, *, seconds: float = 60.0) -> OptimalSet:
    """Finds the r keys with the least sum ||o_i - o~_i||^2 over the observed queries.

    Searches each cache for at most `seconds`, starting from the set of `ValueAware(r,
    search="best")`. A search that ends in time has proved the optimum; otherwise
    error / lower_bound is the gap. Raises ValueError for more than `MOST_SOLVED` keys, and in the
    cases of `ValueAware`.
    """
    if observed.keys > MOST_SOLVED:
        raise ValueError(f"optimal_set got {observed.keys} keys; it takes at most {MOST_SOLVED}")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds!r}; it must be a number above 0")
    raised = {
        name: x.double()
        for name in ("query", "key", "value", "projection")
        if (x := getattr(observed, name)) is not None
    }
    beside = observed.beside and observed.beside.rearranged(Tensor.double)
    # outputs and weights in fp64, like errors
    observed = replace(observed, **raised, beside=beside)
    rows, start = Rows.of(observed), ValueAware(r, search="best").keep(observed).indices
    first = torch.zeros_like(rows.available)
    first.scatter_(-1, start.view(len(first), -1), value=True)
    searches = [
        _search(cache_rows, first[cache] & cache_rows.available, seconds)
        for cache in torch.arange(len(first)).split(1)
        for cache_rows in [rows.take(cache)]
    ]
    sets, *numbers = (
        torch.stack(x).view(observed.batch + x[0].shape) for x in zip(*searches, strict=True)
    )
    return OptimalSet(CacheMethod.leading(observed, sets.double(), r).sort(-1).values, *numbers)


def _search(
    rows: Rows, chosen: Bool[Tensor, "1 M"], seconds: float
) -> tuple[Bool[Tensor, " M"], Float[Tensor, ""], Float[Tensor, ""], Bool[Tensor, ""]]:
    """Searches one cache from a starting set, nodes with the least bounds first."""
    stop, steps = monotonic() + seconds, FIRST_TANGENTS
    problem, error = _Problem.of(rows, int(chosen.sum())), rows.error(chosen)
    limit, at_once = problem.limit(error), max(1, NODES // problem.weights.numel())
    root = chosen.double().where(rows.available, FIXED_OUT).masked_fill(rows.protected, FIXED_IN)
    ahead = [(0.0, root[0])]
    while ahead and ahead[0][0] < limit and monotonic() < stop:
        lower, nodes = zip(*ahead[:at_once], strict=True)
        bounds, parents = problem.bounded(torch.stack(nodes), limit, steps)
        bounds, steps = bounds.maximum(bounds.new_tensor(lower)), NODE_TANGENTS
        for other in problem.below(limit, parents)[:, None]:
            if (less := rows.error(other)) < error:
                chosen, error, limit = other, less, problem.limit(less)
        children, origin = problem.children(parents, bounds < limit)
        ahead = ahead[at_once:] + list(zip(bounds[origin].tolist(), children, strict=True))
        ahead.sort(key=lambda node: node[0])
    lowest = error.new_tensor(min([limit, *(bound for bound, _ in ahead[:1])]))
    return chosen[0], error[0], lowest.clamp_min(0), lowest == limit


@dataclass(frozen=True)
class _Problem:
    """Holds the weights, k_j and c_j of a cache; column M is the mass in `beside`.

    `digits` is the rounding of an error.
    """

    r: int
    weights: Float[Tensor, "n K"]
    scaled: Float[Tensor, "K nV"]
    cost: Float[Tensor, "n K"]
    digits: float

    @classmethod
    def of(cls, rows: Rows, r: int) -> "_Problem":
        """Creates the problem of one cache."""
        log_weights = torch.cat([rows.log_weights, rows.log_beside], dim=-1)[0]
        weights, output = log_weights.exp(), rows.output[0, :, None]
        value = rows.value.expand(len(output), -1, -1)
        sees = log_weights > -torch.inf
        away = torch.cat([value, rows.beside[0, :, None]], dim=1) - output
        away = away.where(sees[..., None], 0.0)
        scaled = (weights[..., None] * away).transpose(0, 1).flatten(1)
        cost = _costs_of_heaviest(weights, away @ away.mT, r - 1 + int(sees[:, -1].any()))
        cost = cost.where(sees, (output - rows.nothing[0]).square().sum(dim=-1))  # loses everything
        cost[:, -1] = cost[:, -1].where(sees[:, -1], cost.amax(dim=-1))  # no mass: never heaviest
        return cls(
            r,
            weights,
            scaled,
            cost,
            float(ERROR_ROUNDING * away.square().sum(dim=-1).amax(dim=-1).sum()),
        )

    def limit(self, error: Float[Tensor, " 1"]) -> float:
        """Returns the error from which another set is no better."""
        return float(error) - max(SAME_ERROR * float(error), self.digits)

    def bounded(
        self, nodes: Float[Tensor, "B M"], limit: float, steps: int
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, "B M"]]:
        """Bounds each node, and fixes keys whose other choice would reach the limit."""
        free, left = _free(nodes), self.r - (nodes == FIXED_IN).sum(dim=-1, keepdim=True)
        masses, x = self._masses(nodes, free, left), _with_sum(nodes.clamp(0, 1), free, left)
        best = x.new_full(x.shape[:1], -torch.inf)
        for step in range(steps):
            value, slope = self.tangent(x, *masses)
            rise, inside = _least_linear(slope, free, left)
            move = inside.double().where(free, x) - x
            rounding = ERROR_ROUNDING * self.r * (slope * free).abs().amax(dim=-1)
            bound = value + (slope * move).sum(dim=-1) - rounding
            fixed = free & (bound[:, None] + rise >= limit)
            nodes = torch.where(fixed, torch.where(inside, FIXED_IN, FIXED_OUT), nodes)
            best, x = best.maximum(bound), x + 2 / (step + SLOWNESS) * move
        return best, torch.where(_free(nodes), x, nodes)

    def tangent(
        self, x: Float[Tensor, "B M"], low: Float[Tensor, "B n"], high: Float[Tensor, "B n"]
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, "B M"]]:
        """Computes the sum over rows of the larger bound at a point, and a subgradient."""
        parts = _with_beside(x)
        moved, total = self._moved(parts), low + high
        t = total * (parts @ self.weights.mT) - low * high + TINY * high
        chord = moved.square().sum(dim=-1) / t
        cost, order = self.cost.sort(dim=-1)
        reached = (parts[:, order].cumsum(dim=-1) >= 1).to(torch.int8).argmax(-1, keepdim=True)
        p = cost.expand(len(x), -1, -1).gather(-1, reached)  # the best p at this point
        less = (p - self.cost).clamp_min(0)
        heaviest = (p - less @ parts[..., None]).squeeze(-1)
        per_t = (chord >= heaviest) / t
        slope = (2 * per_t[..., None] * moved).flatten(1) @ self.scaled.mT
        slope = slope - (per_t * chord * total) @ self.weights
        slope = slope - (less * (chord < heaviest)[..., None]).sum(dim=1)
        return chord.maximum(heaviest).sum(dim=-1), slope[:, :-1]

    def below(self, limit: float, nodes: Float[Tensor, "B M"]) -> Bool[Tensor, "C M"]:
        """Rounds nodes to sets; returns those with an error that may be below the limit."""
        fits = ((nodes == FIXED_IN).sum(-1) <= self.r) & ((nodes >= 0).sum(-1) >= self.r)
        chosen = nodes[fits].topk(self.r, dim=-1).indices  # the others fix keys both ways
        sets = torch.zeros_like(nodes[fits] > 0).scatter(-1, chosen, value=True).unique(dim=0)
        parts = _with_beside(sets.double())
        errors = self._moved(parts).square().sum(-1) / (parts @ self.weights.mT + TINY).square()
        return sets[errors.sum(dim=-1) < limit]  # a row that loses everything counts as 0 here

    def children(
        self, nodes: Float[Tensor, "B M"], alive: Bool[Tensor, " B"]
    ) -> tuple[Float[Tensor, "C M"], Int[Tensor, " C"]]:
        """Branches on the least decided and longest key; also returns the parent of each child."""
        left, free = self.r - (nodes == FIXED_IN).sum(dim=-1), _free(nodes)
        origin = (alive & (left > 0) & (left < free.sum(dim=-1))).nonzero().squeeze(-1)
        worth = (nodes * (1 - nodes) + 1e-2) * self.scaled.square().sum(dim=-1)[:-1]
        key = worth.masked_fill(~free, -1.0)[origin].argmax(dim=-1, keepdim=True)
        both = [nodes[origin].scatter(-1, key, mark) for mark in (FIXED_IN, FIXED_OUT)]
        return torch.cat(both), origin.repeat(2)

    def _moved(self, parts: Float[Tensor, "B K"]) -> Float[Tensor, "B n V"]:
        """Computes sum_j x_j k_j."""
        return (parts @ self.scaled).unflatten(-1, (len(self.weights), -1))

    def _masses(
        self, nodes: Float[Tensor, "B M"], free: Bool[Tensor, "B M"], left: Int[Tensor, "B 1"]
    ) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B n"]]:
        """Computes l and u, the smallest and largest mass of a completion."""
        fixed = _with_beside((nodes == FIXED_IN).double()) @ self.weights.mT
        heaviest, order = self.weights[:, :-1].sort(dim=-1, descending=True)
        place, left = free[:, order].cumsum(dim=-1, dtype=torch.int16), left[..., None]
        low, high = (
            fixed + (heaviest * (free[:, order] & ends)).sum(dim=-1)
            for ends in (place > place[..., -1:] - left, place <= left)
        )
        return low.where(low > SMALL_MASS * high, 0.0), high + TINY


def _costs_of_heaviest(
    weights: Float[Tensor, "n K"], gram: Float[Tensor, "n K K"], others: int
) -> Float[Tensor, "n K"]:
    """Computes a lower bound of each row's error if key j is the heaviest of at most `others` + 1.

    It is the squared minimum of (o~ - o)·(v_j - o) / ||v_j - o||, a mean with the set's weights.
    This is at least z if no `others` lighter keys bring the sum of a (. - z) below 0.
    """
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    along, cost = gram / (length[..., None] + TINY), torch.zeros_like(length)
    pulling = weights[:, None] * (weights[:, None] <= weights[..., None])
    for place in range(1, 21):  # binary digits; a key does not pull itself
        z = cost + length / 2**place
        pulls = (pulling * (along - z[..., None])).clamp_max(0)
        pull = pulls.topk(min(others, pulls.shape[-1]), dim=-1, largest=False).values.sum(dim=-1)
        cost = z.where(weights * (length - z) + pull >= 0, cost)
    return cost.square() * (weights > 0)


def _free(nodes: Float[Tensor, "B M"]) -> Bool[Tensor, "B M"]:
    return (nodes >= 0) & (nodes <= 1)


def _with_beside(x: Float[Tensor, "B M"]) -> Float[Tensor, "B K"]:
    return torch.cat([x, torch.ones_like(x[:, :1])], dim=-1)


def _with_sum(
    x: Float[Tensor, "B M"], free: Bool[Tensor, "B M"], left: Int[Tensor, "B 1"]
) -> Float[Tensor, "B M"]:
    """Scales the free coordinates, or their complements to 1, so that they sum to `left`."""
    whole, most = (x * free).sum(dim=-1, keepdim=True), free.sum(dim=-1, keepdim=True)
    more = 1 - (1 - x) * (most - left) / (most - whole).clamp_min(TINY)
    return torch.where(whole > left, x * left / whole, more).where(free, x)


def _least_linear(
    slope: Float[Tensor, "B M"], free: Bool[Tensor, "B M"], left: Int[Tensor, "B 1"]
) -> tuple[Float[Tensor, "B M"], Bool[Tensor, "B M"]]:
    """Minimises a linear function over the sets of `left` free keys.

    Returns the increase if an exchange reverses the choice of each key, and a mask of the set.
    """
    ordered, keys = slope.masked_fill(~free, torch.inf).sort(dim=-1)
    inside = free.scatter(-1, keys, torch.arange(keys.shape[-1], device=keys.device) < left) & free
    ordered = torch.nn.functional.pad(ordered, (1, 1), value=torch.inf)
    last, following = (ordered.gather(-1, place) for place in (left, left + 1))
    return torch.where(inside, following - slope, slope - last), inside
