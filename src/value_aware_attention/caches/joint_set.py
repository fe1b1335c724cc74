"""Computes the joint error of a set of keys, and its change by dropping or adding each key.

All observed queries of a group are rows, n of them; one set S serves every row. It leaves row i
with o~_i, the mean over S and over what is beside it. Dropping key j moves that along a line:

    o~' = o~ + t (o~ - v_j),  t = a_j / (m - a_j)       a_j, m: the weight of j, of all that is kept

so that the change of ||o - o~||^2 is t ((1 + t) R_j - D_j + ||o - o~||^2) with two distances that
stay known, R_j = ||v_j - o~||^2 and D_j = ||v_j - o||^2. Adding is the same with a_j -> -a_j, and
dropping key s turns every other R_j into (1 + t) R_j + (1 + t) t R_s - t ||v_j - v_s||^2: the exact
joint cost of every candidate takes O(n M) a drop. Where one key has nearly all of a row's mass, t
and its rounding are large, and its cost is computed from the output of the other keys instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.attention import finite
from value_aware_attention.caches.method import available, protected
from value_aware_attention.caches.observed import Observed
from value_aware_attention.error import typical_unit

LEFT = {torch.float64: 1e-3, torch.float32: 1e-1}
"""Smallest part of a row's mass that drops may leave before all is computed again: below it t is
large and magnifies rounding"""
DROPS = 64
"""Number of drops followed by updates before all costs are computed again"""
CANDIDATES = 4 * DROPS
"""Number of keys whose costs are updated: the cheapest to drop when all costs were computed"""
GENTLE = 0.9
"""Largest share of a row's mass in one key at which drops are followed in fp32, twice as fast:
above it t is large and magnifies rounding"""
SHARE = 0.05
"""Share of the remaining keys that `eliminate_by_shares` drops at once"""
BREADTH = 8
"""Keys, the cheapest ones, that an exchange tries to drop"""
GAIN = 1e-5
"""Least relative gain for which keys are exchanged"""

SQUARES = ("error", "error_of_others", "to_kept", "to_exact")
"""Fields of a `_State` that are squared lengths"""


@dataclass(frozen=True)
class Rows:
    """Holds the observed rows of every cache (B of them) in fp64, with values around their mean.

    Costs hold t^2 times the rounding of distances: in fp32 that decides what is dropped next,
    wherever attention is sharp.
    """

    log_weights: Float[Tensor, "B n M"]
    log_beside: Float[Tensor, "B n 1"]
    beside: Float[Tensor, "B n V"]
    value: Float[Tensor, "B M V"]
    output: Float[Tensor, "B n V"]
    nothing: Float[Tensor, "B 1 V"]
    """The output of a row that sees nothing: 0, measured from the mean."""
    protected: Bool[Tensor, "B M"]
    available: Bool[Tensor, "B M"]

    @classmethod
    def of(cls, seen: Observed) -> "Rows":
        """Stacks each group's queries."""
        value = seen.value.double().reshape(-1, *seen.value.shape[-2:])
        allowed, forced = (x.reshape(value.shape[:-1]) for x in (available(seen), protected(seen)))
        count = allowed.sum(dim=-1)[:, None, None].clamp_min(1)
        centre = value.where(allowed[..., None], 0.0).sum(dim=-2, keepdim=True) / count

        def stacked(x: Tensor) -> Tensor:
            return x.double().reshape(len(value), -1, x.shape[-1])

        output = stacked(seen.output)
        beside = torch.zeros_like(output) if seen.beside is None else stacked(seen.beside.output())
        return cls(
            log_weights=stacked(seen.log_weights),
            log_beside=stacked(seen.log_beside),
            beside=beside - centre,
            value=(value - centre).where(allowed[..., None], 0.0),
            output=output - centre,
            nothing=-centre,
            protected=forced,
            available=allowed,
        )

    def split(self, elements: int) -> Iterator["Rows"]:
        """Cuts the caches into parts of about `elements` weights."""
        rows, keys = self.log_weights.shape[1:]
        parts = [x.split(max(1, elements // (rows * keys))) for x in vars(self).values()]
        yield from (Rows(*part) for part in zip(*parts, strict=True))

    def take(self, caches: Int[Tensor, " C"]) -> "Rows":
        """Returns some of the caches."""
        return Rows(*(x[caches] for x in vars(self).values()))

    def error(self, kept: Bool[Tensor, "B M"]) -> Float[Tensor, " B"]:
        """Computes sum_i ||o_i - o~_i||^2 of a set."""
        return self._state(kept).error.sum(dim=(-2, -1))

    def cost_of_adding(self, kept: Bool[Tensor, "B M"]) -> Float[Tensor, "B M"]:
        """Computes the change of the joint error by each key; inf for keys that cannot be added."""
        return self._adding(self._state(kept), kept)

    def exchanged(self, kept: Bool[Tensor, "B M"]) -> Bool[Tensor, "B M"]:
        """Returns the best set that one exchange of a cheap key makes, best by its joint cost."""
        state = self._state(kept)
        dropping = state.cost().masked_fill(~kept | self.protected, torch.inf)
        cheapest = dropping.topk(min(BREADTH, kept.shape[-1]), dim=-1, largest=False)
        best, lowest = kept, torch.full_like(dropping[:, :1], torch.inf)
        for cost, dropped in zip(*(x.split(1, dim=-1) for x in cheapest), strict=True):
            without = kept.scatter(-1, dropped, value=False)
            other = self._state(without) if state.empties(dropped) else state.without(dropped)
            adding = self._adding(other, without)
            gained, added = adding.min(dim=-1, keepdim=True)
            better = cost + gained < lowest
            best = best.where(~better, without.scatter(-1, added, value=True))
            lowest = lowest.where(~better, cost + gained)
        return best

    def _state(self, kept: Bool[Tensor, "B M"]) -> "_State":
        return _State.of(self, self._log_weights_of(kept), self.value)

    def _adding(self, state: "_State", kept: Bool[Tensor, "B M"]) -> Float[Tensor, "B M"]:
        odds = self.log_weights - (state.log_total + state.mass.log())
        odds = odds.masked_fill(self.log_weights == -torch.inf, -torch.inf)
        return state.change(-odds.sigmoid()).masked_fill(kept | ~self.available, torch.inf)

    def _log_weights_of(self, kept: Bool[Tensor, "B M"]) -> Float[Tensor, "B n M"]:
        return self.log_weights.masked_fill(~kept[:, None], -torch.inf)


@dataclass
class _State:
    """Holds the errors that a set leaves, and distances of K keys; drops change it in place."""

    value: Float[Tensor, "B K V"]
    log_total: Float[Tensor, "B n 1"]
    weights: Float[Tensor, "B n K"]
    mass: Float[Tensor, "B n 1"]
    error: Float[Tensor, "B n 1"]
    error_of_others: Float[Tensor, "B n 1"]
    """||o - o~||^2 without the key of the largest weight, when all was computed"""
    to_kept: Float[Tensor, "B n K"]
    """R = ||v_j - o~||^2"""
    to_exact: Float[Tensor, "B n K"]
    """D = ||v_j - o||^2"""

    @classmethod
    def of(
        cls,
        rows: Rows,
        log_weights: Float[Tensor, "B n K"],
        value: Float[Tensor, "B K V"],
    ) -> "_State":
        """Computes the state of the set of keys with a finite log-weight."""
        own = log_weights.logsumexp(dim=-1, keepdim=True)
        total = finite(torch.logaddexp(own, rows.log_beside))
        weights, beside = (log_weights - total).exp(), (rows.log_beside - total).exp()
        mass = weights.sum(dim=-1, keepdim=True) + beside
        output = ((weights @ value + beside * rows.beside) / mass).where(mass > 0, rows.nothing)
        others = _without_largest(rows, log_weights, value)
        return cls(
            value=value,
            log_total=total,
            weights=weights,
            mass=mass,
            error=(rows.output - output).square().sum(dim=-1, keepdim=True),
            error_of_others=(rows.output - others).square().sum(dim=-1, keepdim=True),
            to_kept=_squared_distances(output, value),
            to_exact=_squared_distances(rows.output, value),
        )

    def take(self, keys: Int[Tensor, "B C"]) -> "_State":
        """Returns the state of some of the keys."""
        at = keys[:, None, :]
        parts = {
            name: x.take_along_dim(at, dim=-1)
            for name, x in vars(self).items()
            if name in ("weights", "to_kept", "to_exact")
        }
        return replace(self, value=self.value.take_along_dim(keys[..., None], dim=-2), **parts)

    def in_single_precision(self) -> "_State":
        """Returns the state in fp32, in a unit of length whose squares stay in its range."""
        unit = typical_unit(self.value)
        squares = {name: vars(self)[name] / unit.square() for name in SQUARES}
        parts = vars(self) | squares | {"value": self.value / unit}
        return _State(**{name: x.float() for name, x in parts.items()})

    def change(self, t: Float[Tensor, "B n K"]) -> Float[Tensor, "B K"]:
        """Computes sum_i t ((1 + t) R - D + ||o - o~||^2)."""
        gained = torch.addcmul(self.to_kept, t, self.to_kept).sub_(self.to_exact).mul_(t)
        return gained.sum(dim=-2) + (t.mT @ self.error).squeeze(-1)

    def cost(self) -> Float[Tensor, "B K"]:
        """Computes the change of the error by dropping each key."""
        others = self.mass - self.weights
        t = self.weights / others
        largest = others <= LEFT[others.dtype] * self.mass  # all of a row that sees nothing
        if not largest.any():
            return self.change(t)
        lost = (self.error_of_others - self.error).where(largest, 0.0).sum(dim=-2)
        return self.change(t.masked_fill(largest, 0.0)) + lost

    def empties(self, key: Int[Tensor, "B 1"]) -> bool:
        """Says whether a row has less than `LEFT` of its mass without these keys."""
        left = self.mass - self._of(self.weights, key)
        return bool(((left < LEFT[left.dtype]) & (self.mass > 0)).any())

    def drop(self, key: Int[Tensor, "B 1"]) -> None:
        """Drops one key of each cache."""
        weight, near, far = (self._of(x, key) for x in (self.weights, self.to_kept, self.to_exact))
        left = self.mass - weight
        t = (weight / left).where(left > 0, 0.0)  # 0 / 0 in a row that sees nothing
        between = self.value - self.value.gather(1, key[..., None].expand_as(self.value[:, :1]))
        outer = torch.cat([(1 + t) * t * near, -t], dim=-1)
        with_all = torch.stack([torch.ones_like(between[..., 0]), between.square().sum(-1)], dim=1)
        self.to_kept.mul_(1 + t).baddbmm_(outer, with_all)
        self.error += t * ((1 + t) * near - far + self.error)
        self.mass -= weight
        self.weights.scatter_(-1, key[:, None, :].expand_as(weight), 0.0)

    @staticmethod
    def _of(x: Float[Tensor, "B n K"], key: Int[Tensor, "B 1"]) -> Float[Tensor, "B n 1"]:
        return x.gather(-1, key[:, None, :].expand(-1, x.shape[1], -1))

    def without(self, key: Int[Tensor, "B 1"]) -> "_State":
        """Returns the state after dropping one key of each cache."""
        kept = _State(**{name: x.clone() for name, x in vars(self).items()})
        kept.drop(key)
        return kept


def _without_largest(
    rows: Rows, log_weights: Float[Tensor, "B n K"], value: Float[Tensor, "B K V"]
) -> Float[Tensor, "B n V"]:
    """Computes the output that each row has left once it loses its largest weight."""
    largest = log_weights.argmax(dim=-1, keepdim=True)
    others = log_weights.scatter(-1, largest, -torch.inf)
    total = torch.logaddexp(others.logsumexp(dim=-1, keepdim=True), rows.log_beside)
    scale = finite(total)
    output = (others - scale).exp() @ value + (rows.log_beside - scale).exp() * rows.beside
    return output.where(total > -torch.inf, rows.nothing)


def _squared_distances(
    a: Float[Tensor, "B n V"], b: Float[Tensor, "B K V"]
) -> Float[Tensor, "B n K"]:
    squares = a.square().sum(-1, keepdim=True) + b.square().sum(-1)[:, None]
    return squares.baddbmm(a, b.mT, alpha=-2).clamp_min_(0)


def eliminate(rows: Rows, r: int) -> Bool[Tensor, "B M"]:
    """Drops key after key, each time the one whose loss costs the joint error least, down to r.

    All costs are computed again after `DROPS` drops, and around a drop that takes nearly all of a
    row's mass. In between only the `CANDIDATES` that were cheapest are updated, so that the cost of
    a drop does not grow with the number of keys; within so few drops another key hardly becomes the
    cheapest.
    """
    left = _every_key(rows)
    while left.shape[-1] > r:
        state, fixed = _start(rows, left)
        count = min(CANDIDATES, left.shape[-1])
        candidates = (state.cost() + fixed).topk(count, dim=-1, largest=False).indices
        state, fixed = state.take(candidates), fixed.gather(-1, candidates)
        if (state.weights <= GENTLE * state.mass).all():
            state, fixed = state.in_single_precision(), fixed.float()
        stays = torch.ones_like(left, dtype=torch.bool)
        for step in range(min(DROPS, left.shape[-1] - r)):
            cheapest = (state.cost() + fixed).argmin(dim=-1, keepdim=True)
            empties = state.empties(cheapest)
            if empties and step:  # its cost is that of the last time all was computed
                break
            state.drop(cheapest)
            fixed.scatter_(-1, cheapest, torch.inf)
            stays.scatter_(-1, candidates.gather(-1, cheapest), value=False)
            if empties:
                break
        left = left[stays].view(len(left), -1)
    return torch.zeros_like(rows.available).scatter(-1, left, value=True)


def eliminate_by_shares(rows: Rows, r: int) -> Bool[Tensor, "B M"]:
    """Drops the cheapest 5% of the keys at a time, down to r: blind to redundancy among them."""
    left = _every_key(rows)
    while left.shape[-1] > r:
        state, fixed = _start(rows, left)
        stay = max(r, int((1 - SHARE) * left.shape[-1]))
        dearest = (state.cost() + fixed).topk(stay, dim=-1).indices
        left = left.gather(-1, dearest.sort(dim=-1).values)
    return torch.zeros_like(rows.available).scatter(-1, left, value=True)


def _every_key(rows: Rows) -> Int[Tensor, "B M"]:
    caches, _, keys = rows.log_weights.shape
    return torch.arange(keys, device=rows.value.device).expand(caches, -1)


def _start(rows: Rows, left: Int[Tensor, "B K"]) -> tuple[_State, Float[Tensor, "B K"]]:
    """Returns the state of the remaining keys, and added costs: padding -inf, protected inf."""
    log_weights = rows.log_weights.take_along_dim(left[:, None], dim=-1)
    state = _State.of(rows, log_weights, rows.value.take_along_dim(left[..., None], dim=-2))
    fixed = torch.zeros_like(rows.value[..., 0]).masked_fill_(rows.protected, torch.inf)
    return state, fixed.masked_fill_(~rows.available, -torch.inf).gather(-1, left)


def extend(rows: Rows, r: int) -> Bool[Tensor, "B M"]:
    """Adds key after key to the protected ones, each time the best: optimal where one is added."""
    kept = rows.protected
    for _ in range(r - int(kept.sum(dim=-1).min())):
        cost = rows.cost_of_adding(kept)
        best = cost.argmin(dim=-1, keepdim=True)
        more = (kept.sum(dim=-1, keepdim=True) < r) & cost.gather(-1, best).isfinite()
        kept = kept.scatter(-1, best, more | kept.gather(-1, best))
    return kept


def exchange(rows: Rows, kept: Bool[Tensor, "B M"]) -> Bool[Tensor, "B M"]:
    """Exchanges kept keys for others while that lowers the joint error: a local optimum.

    Each step drops, of the `BREADTH` keys whose loss costs least, the one after which the best key
    to add leaves the least error.
    """
    kept, error = kept.clone(), rows.error(kept)
    improving = torch.arange(len(kept), device=kept.device)
    for _ in range(2 * int(kept.sum(dim=-1).max())):
        part = rows.take(improving)
        other = part.exchanged(kept[improving])
        left = part.error(other)
        better = left < error[improving] * (1 - GAIN)
        improving = improving[better]
        if len(improving) == 0:
            break
        kept[improving], error[improving] = other[better], left[better]
    return kept
