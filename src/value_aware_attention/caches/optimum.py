"""Finds the set of r keys with the least joint error, by branch and bound, with a proved bound.

With k_j = a_ij (v_j - o_i), and what is beside the keys as one key more that is always kept, a set
of indicator x leaves sum_i N_i / s_i^2: N_i = ||sum_j x_j k_j||^2, and s_i = sum_j x_j a_ij is the
kept mass. A node of the search fixes some keys as kept and some as dropped; its completions keep a
mass between l_i and u_i. Each row's error has two lower bounds there:

    chord      s^2 is convex, so s^2 <= (l + u) s - l u =: t, and N / s^2 >= N / t: the square of a
               linear map over a positive linear function, hence convex in x and above its tangents
    heaviest   p - sum_j x_j max(0, p - c_j) for any p, where c_j is at most the error of any set
               whose heaviest key is j, alone: the term of that key makes it p - (p - c_j) or less

Both are linear in x once a point and p are chosen. Their sum over rows, by row the one that is
larger at the point, has its minimum over all x with r ones by a sort: the node's bound. By how much
it rises where one key is kept or dropped against that minimum fixes keys without branching. With
all keys fixed l = u = s: the chord is the error.
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
"""Tangents of a node, each at a point where the bounds of the rows sum to less"""
NODES = 2**18
"""Nodes bounded at once, times rows, times keys"""
ROUNDING = 1e-9
"""Relative difference of errors that counts as none"""
DIGITS = 1e-14
"""Rounding of an error, in parts of the rows' largest squared distances ||v_j - o_i||^2"""
SMALL = 1e-6
"""Part of the largest mass below which the smallest counts as 0: t would lose its digits"""
TINY = 1e-100
"""Added to masses, whose products then neither vanish nor lose digits"""
KEPT, DROPPED = 2.0, -1.0
"""Marks of a node's fixed keys; a free one has its part of the last point, 0 to 1"""


@dataclass(frozen=True)
class OptimalSet:
    """Holds the best set found for each cache, and a proved bound on the error of every set."""

    indices: Int[Tensor, "*batch r"]
    """Ascending; with padding where a cache has fewer keys"""
    error: Float[Tensor, " *batch"]
    """sum ||o - o~||^2 of the set, in fp64"""
    lower_bound: Float[Tensor, " *batch"]
    """No set of r keys with the protected ones leaves less."""
    proved: Bool[Tensor, " *batch"]
    """The bound is the error, up to rounding (1e-9 of it, or the last digits of distances)."""


@torch.no_grad()
def optimal_set(seen: Observed, r: int, *, seconds: float = 60.0) -> OptimalSet:
    """Finds the r keys that leave the least sum ||o_i - o~_i||^2 over the observed queries.

    Searches each cache, from the set of `ValueAware(r, search="best")`, for at most `seconds`. A
    search that ends within them has proved the optimum; otherwise error / lower_bound is the gap of
    the best set found. Raises ValueError for more than `MOST_KEYS` keys, and as `ValueAware` does.
    """
    if seen.keys > MOST_KEYS:
        raise ValueError(f"optimal_set got {seen.keys} keys; it takes at most {MOST_KEYS}")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds!r}; it must be a number above 0")
    found = ValueAware(r, search="best").keep(seen).indices
    rows = Rows.of(seen)
    first = torch.zeros_like(rows.available).scatter(-1, found.view(-1, r), value=True)
    searches = [
        _search(part, one[None] & part.available, seconds)
        for part, one in zip(rows.split(1), first, strict=True)
    ]
    kept, *numbers = (
        torch.stack(x).view(*seen.batch, *x[0].shape) for x in zip(*searches, strict=True)
    )
    return OptimalSet(CacheMethod.ranked(seen, kept.double(), r).sort(-1).values, *numbers)


def _search(
    rows: Rows, kept: Bool[Tensor, "1 M"], seconds: float
) -> tuple[Bool[Tensor, " M"], Float[Tensor, ""], Float[Tensor, ""], Bool[Tensor, ""]]:
    """Searches one cache from a set of it, the node of the least bound first."""
    stop, numbers = monotonic() + seconds, count()
    problem, error = _Problem.of(rows, int(kept.sum())), rows.error(kept)
    limit = problem.limit(error)
    root = kept.double().where(rows.available, DROPPED).masked_fill(rows.protected, KEPT)
    heap = [(0.0, next(numbers), root[0])]
    while heap and heap[0][0] < limit and monotonic() < stop:
        parents = [heapq.heappop(heap) for _ in range(min(problem.nodes, len(heap)))]
        bounds, nodes, keys = problem.bounded(torch.stack([node for *_, node in parents]), limit)
        for candidate in problem.below(limit, nodes):
            if (other := rows.error(candidate[None])) < error:
                kept, error = candidate[None], other
        limit = problem.limit(error)
        for parent, bound, node, key in zip(parents, bounds.tolist(), nodes, keys, strict=True):
            if key >= 0 and bound < limit:
                for mark in (KEPT, DROPPED):
                    child = node.index_fill(0, key, mark)
                    heapq.heappush(heap, (max(bound, parent[0]), next(numbers), child))
    lowest = min([limit, *(bound for bound, *_ in heap[:1])])
    return (
        kept[0],
        error[0],
        error.new_tensor(lowest).clamp_min(0),
        kept.new_tensor(lowest == limit),
    )


@dataclass(frozen=True)
class _Problem:
    """Holds the weights of a cache and the products of its k_j; column M is beside the keys."""

    r: int
    weights: Float[Tensor, "n K"]
    gram: Float[Tensor, "n K K"]
    cost: Float[Tensor, "n K"]
    """c, the least error of a row whose heaviest kept key is this one, or that loses all it sees"""
    digits: float
    """Rounding of an error"""

    @classmethod
    def of(cls, rows: Rows, r: int) -> "_Problem":
        """Multiplies the weighted distances of one cache."""
        log_weights = torch.cat([rows.log_weights, rows.log_beside], dim=-1)[0]
        weights, output = log_weights.exp(), rows.output[0, :, None]
        value = rows.value.expand(len(output), -1, -1)
        sees = log_weights > -torch.inf
        away = torch.cat([value, rows.beside[0, :, None]], dim=1) - output
        away = away.where(sees[..., None], 0.0)
        scaled = weights[..., None] * away
        lost = (rows.output - rows.nothing)[0].square().sum(dim=-1)
        others = r - 1 + int(sees[:, -1].any())
        cost = _costs_of_heaviest(weights, away @ away.mT, others).where(sees, lost[:, None])
        cost[:, -1] = cost[:, -1].where(sees[:, -1], cost.amax(dim=-1))  # nothing: never heaviest
        digits = DIGITS * float(away.square().sum(dim=-1).amax(dim=-1).sum())
        return cls(r, weights, scaled @ scaled.mT, cost, digits)

    @property
    def nodes(self) -> int:
        """Returns the number of nodes that are bounded at once."""
        return max(1, NODES // self.weights.numel())

    def limit(self, error: Float[Tensor, " 1"]) -> float:
        """Returns the error at which another set is no better."""
        return float(error) - max(ROUNDING * float(error), self.digits)

    def below(self, limit: float, nodes: Float[Tensor, "B M"]) -> Bool[Tensor, "C M"]:
        """Rounds each node to a set, completes those with one key to keep in every way, and
        returns the sets with an error below the limit."""
        fits = ((nodes == KEPT).sum(-1) <= self.r) & ((nodes >= 0).sum(-1) >= self.r)
        nodes = nodes[fits]  # keys fixed both ways: nothing below the limit
        last = (nodes == KEPT).sum(dim=-1, keepdim=True) == self.r - 1
        node, key = (_free(nodes) & last).nonzero(as_tuple=True)
        completed = nodes[node].scatter(-1, key[:, None], KEPT)
        every = torch.cat([nodes, completed]).topk(self.r, dim=-1).indices
        sets = nodes.new_zeros(len(every), nodes.shape[-1]).scatter(-1, every, 1.0)
        x = _with_beside(sets, 1.0)
        errors = self._quadratic(x, self._products(x)) / (x @ self.weights.mT + TINY).square()
        return sets[errors.sum(dim=-1) < limit].unique(dim=0) > 0

    def bounded(
        self, nodes: Float[Tensor, "B M"], limit: float
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, "B M"], Int[Tensor, " B"]]:
        """Bounds each node, fixes keys by the limit, and names the key to branch on.

        -1: at most one key is left to keep, or none to drop, so that there is nothing to branch on.
        """
        free, left = _free(nodes), self.r - (nodes == KEPT).sum(dim=-1, keepdim=True)
        masses = self._masses(nodes, free, left)
        x = _nearest(nodes.clamp(0, 1), torch.ones_like(nodes), free, left)
        diagonal = self.gram.diagonal(dim1=-2, dim2=-1)[:, :-1]
        best, rate = x.new_full(x.shape[:1], -torch.inf), torch.ones_like(x[:, :1])
        move = before = x
        for step in range(STEPS):
            at = self._minorants(x, *masses)
            slope = at.slope(self.weights)
            least, rise, inside = _least_linear(slope, free, left)
            bound = at.value + least - (slope * x * free).sum(dim=-1)
            fixed = free & (bound[:, None] + rise >= limit)
            nodes = torch.where(fixed, torch.where(inside, KEPT, DROPPED), nodes)
            best = best.maximum(bound)
            if step == 0:
                stiff = 2 * (at.curved / at.t) @ diagonal
                stiff = stiff + 1e-3 * stiff.mean(dim=-1, keepdim=True) + TINY
            else:
                bent = (move * (slope - before)).sum(dim=-1, keepdim=True)
                rate = (move.square() * stiff).sum(dim=-1, keepdim=True) / (bent + TINY)
                rate = rate.clamp(1e-2, 1e2)
            target = _nearest(x - rate * slope * free / stiff, stiff, free, left)
            every = _with_beside(target - x, 0.0)
            move = at.step(every, self._products(every), self.weights) * (target - x)
            x, before = x + move, slope
        nodes = torch.where(_free(nodes), x.clamp(0, 1), nodes)
        worth = ((x * (1 - x) + 1e-2) * stiff).masked_fill(~_free(nodes), -1.0)
        left = self.r - (nodes == KEPT).sum(dim=-1)
        ends = (left <= 1) | (left >= _free(nodes).sum(dim=-1))
        return best, nodes, worth.argmax(dim=-1).masked_fill(ends, -1)

    def _masses(
        self, nodes: Float[Tensor, "B M"], free: Bool[Tensor, "B M"], left: Int[Tensor, "B 1"]
    ) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B n"]]:
        """Computes l and u, the smallest and the largest mass that a completion keeps."""
        fixed = _with_beside((nodes == KEPT).double(), 1.0) @ self.weights.mT
        heaviest, order = self.weights[:, :-1].sort(dim=-1, descending=True)
        ordered = free[:, order]
        place = ordered.cumsum(dim=-1, dtype=torch.int16)
        lightest = place > place[..., -1:] - left[..., None]
        low = fixed + (heaviest * (ordered & lightest)).sum(dim=-1)
        high = fixed + (heaviest * (ordered & (place <= left[..., None]))).sum(dim=-1)
        return low.where(low > SMALL * high, 0.0), high + TINY

    def _products(self, every: Float[Tensor, "B K"]) -> Float[Tensor, "B n K"]:
        """Computes the products of sum_j x_j k_j with each k."""
        return (every @ self.gram.flatten(0, 1).mT).view(len(every), *self.weights.shape)

    @staticmethod
    def _quadratic(
        every: Float[Tensor, "B K"], products: Float[Tensor, "B n K"]
    ) -> Float[Tensor, "B n"]:
        return (products @ every[..., None])[..., 0].clamp_min(0)

    def _minorants(
        self, x: Float[Tensor, "B M"], low: Float[Tensor, "B n"], high: Float[Tensor, "B n"]
    ) -> "_Minorants":
        """Takes each row's larger bound at a point."""
        every = _with_beside(x, 1.0)
        products = self._products(every)
        square, mass = self._quadratic(every, products), every @ self.weights.mT
        t = (low + high) * mass - low * high + TINY * high
        cost, order = self.cost.sort(dim=-1)
        reached = (every[:, order].cumsum(dim=-1) >= 1).to(torch.int8).argmax(-1, keepdim=True)
        p = cost.expand(len(x), -1, -1).gather(-1, reached)
        less = (p - self.cost).clamp_min(0)
        linear = p[..., 0] - (less @ every[..., None])[..., 0]
        # t loses its digits, or its sign, where the mass is below l by rounding
        heaviest = (linear * t > square) | (t < low.square() / 2)
        return _Minorants(
            square=linear.where(heaviest, square),
            products=(-less / 2).where(heaviest[..., None], products),
            t=t.masked_fill(heaviest, 1.0),
            per_mass=(low + high).masked_fill(heaviest, 0.0),
            curved=~heaviest,
        )


@dataclass(frozen=True)
class _Minorants:
    """Holds bounds square / t of the rows at a point; of a linear one t = 1."""

    square: Float[Tensor, "B n"]
    products: Float[Tensor, "B n K"]
    """Half the gradient of the square"""
    t: Float[Tensor, "B n"]
    per_mass: Float[Tensor, "B n"]
    """Change of t by mass"""
    curved: Bool[Tensor, "B n"]

    @property
    def value(self) -> Float[Tensor, " B"]:
        return (self.square / self.t).sum(dim=-1)

    def slope(self, weights: Float[Tensor, "n K"]) -> Float[Tensor, "B M"]:
        """Computes the gradient of the sum by every key."""
        by_mass = self.square / self.t * (self.per_mass / self.t)
        by_square = (2 / self.t)[:, None] @ self.products
        return (by_square[:, 0] - by_mass @ weights)[:, :-1]

    def step(
        self,
        move: Float[Tensor, "B K"],
        products: Float[Tensor, "B n K"],
        weights: Float[Tensor, "n K"],
    ) -> Float[Tensor, "B 1"]:
        """Finds the part of a move, 0 to 1, that lowers the sum most, by Newton's method."""
        cross = (self.products @ move[..., None])[..., 0]
        curve = _Problem._quadratic(move, products) * self.curved
        by_move, part = self.per_mass * (move @ weights.mT), torch.zeros_like(move[:, :1])
        for _ in range(4):
            t, half = self.t + part * by_move, cross + part * curve
            ratio = (self.square + part * (cross + half)) / t
            first = ((2 * half - ratio * by_move) / t).sum(-1, keepdim=True)
            bend = curve - 2 * half * by_move / t + ratio * by_move.square() / t
            second = (2 * bend / t).sum(dim=-1, keepdim=True)
            part = (part - first / (second + TINY)).nan_to_num(0.0).clamp(0, 1)
        return part


def _costs_of_heaviest(
    weights: Float[Tensor, "n K"], gram: Float[Tensor, "n K K"], others: int
) -> Float[Tensor, "n K"]:
    """Bounds each row's error with key j as the heaviest of at most `others` + 1, from below.

    Of (o~ - o)·(v_j - o) / ||v_j - o|| this is the least value squared: a mean, with the weights of
    the set, that is at least z where no `others` lighter keys pull their sum of a (. - z) below 0.
    """
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    along = gram / (length[..., None] + TINY)
    itself = torch.eye(len(gram[0]), dtype=torch.bool, device=gram.device)
    lighter = (weights[:, None] <= weights[..., None]) & ~itself
    pulling = weights[:, None] * lighter
    low, high = torch.zeros_like(length), length
    for _ in range(20):
        z = (low + high) / 2
        pulls = (pulling * (along - z[..., None])).clamp_max(0)
        most = pulls.topk(min(others, len(itself)), dim=-1, largest=False).values.sum(dim=-1)
        above = weights * (length - z) + most >= 0
        low, high = z.where(above, low), high.where(above, z)
    return low.square() * (weights > 0)


def _free(nodes: Float[Tensor, "B M"]) -> Bool[Tensor, "B M"]:
    return (nodes >= 0) & (nodes <= 1)


def _with_beside(x: Float[Tensor, "B M"], beside: float) -> Float[Tensor, "B K"]:
    return torch.cat([x, torch.full_like(x[:, :1], beside)], dim=-1)


def _least_linear(
    slope: Float[Tensor, "B M"], free: Bool[Tensor, "B M"], left: Int[Tensor, "B 1"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, "B M"], Bool[Tensor, "B M"]]:
    """Minimises a linear function over the sets of `left` free keys.

    Returns the least value, by how much it rises where a key is exchanged against its choice, and
    the keys chosen.
    """
    ordered, keys = slope.masked_fill(~free, torch.inf).sort(dim=-1)
    places = torch.arange(keys.shape[-1], device=keys.device)
    inside = torch.zeros_like(free).scatter(-1, keys, (places < left).expand_as(free)) & free
    end = torch.full_like(ordered[:, :1], torch.inf)
    ordered = torch.cat([-end, ordered, end], dim=-1)
    last, next_one = (ordered.gather(-1, at.clamp(0, len(places) + 1)) for at in (left, left + 1))
    rise = torch.where(inside, next_one - slope, slope - last)
    return (slope * inside).sum(dim=-1), rise, inside


def _nearest(
    x: Float[Tensor, "B M"],
    stiff: Float[Tensor, "B M"],
    free: Bool[Tensor, "B M"],
    left: Int[Tensor, "B 1"],
) -> Float[Tensor, "B M"]:
    """Projects free parts to [0, 1] with the sum `left`, by bisection; fixed ones become 0 or 1."""
    low = ((x - 1) * stiff).masked_fill(~free, torch.inf).amin(dim=-1, keepdim=True)
    high = (x * stiff).masked_fill(~free, -torch.inf).amax(dim=-1, keepdim=True)
    for _ in range(25):
        shift = (low + high) / 2
        more = ((x - shift / stiff).clamp(0, 1) * free).sum(dim=-1, keepdim=True) > left
        low, high = shift.where(more, low), high.where(more, shift)
    return (x - high / stiff).clamp(0, 1).where(free, x.clamp(0, 1))
