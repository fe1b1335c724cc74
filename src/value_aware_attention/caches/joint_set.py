"""Computes the joint error of a set of keys, and its change when a key is dropped or added.

The n rows are all observed queries of a group; one set S serves all rows. The output o~_i of row i
is the weighted mean over S and over the mass outside the cache. Dropping key j moves it along a
line:

    o~' = o~ + t (o~ - v_j),  t = a_j / (m - a_j)       a_j, m: the weight of j, and of all kept

The change of ||o - o~||^2 is then t ((1 + t) R_j - D_j + ||o - o~||^2), with two squared distances
that are kept up to date, R_j = ||v_j - o~||^2 and D_j = ||v_j - o||^2. Adding is the same with
a_j -> -a_j. Dropping key s changes every other R_j to (1 + t) R_j + (1 + t) t R_s - t
||v_j - v_s||^2. The exact joint costs of all candidates thus take O(n M) per drop. If one key has
nearly all of a row's mass, t and its rounding are large; its cost is then computed from the output
of the other keys.
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
"""Everything is recomputed if drops leave less than this share of a row's mass: t is then large and
amplifies rounding"""
GENTLE = 0.9
"""Largest share of a row's mass in one key for which drops are tracked in fp32, twice as fast"""
BREADTH = 8
"""Number of cheapest keys that an exchange tries to drop"""
IN_CACHE = 2**18
"""Largest number of weights searched at once on a CPU, so that they fit its cache"""
UPDATED_KEYS = 256
"""Number of keys with updated costs after a drop: the cheapest at the last full computation"""
GAIN = 1e-5
"""Least relative gain for which keys are exchanged"""

LENGTHS = ("value", "output", "exact", "nothing")
SQUARES = ("error", "error_of_others", "to_kept", "to_exact")
"""Fields of a `State` that are lengths, and squared lengths"""


@dataclass(frozen=True)
class Rows:
    """Holds the observed rows of B caches, with centred values in fp64.

    If values are measured after the output projection, each of the `parts` query heads of a cache
    has its own values (C = B parts); otherwise all rows of a group are one part. Costs contain t^2
    times the rounding of distances; in fp32 this would decide the next drop wherever attention is
    sharp.

    Attributes:
        log_weights: In the precision of their computation, because they are by far the largest
            tensor.
        nothing: The output of a row that sees nothing: 0, relative to the mean.
    """

    log_weights: Float[Tensor, "C n M"]
    log_beside: Float[Tensor, "C n 1"]
    beside: Float[Tensor, "C n V"]
    value: Float[Tensor, "C M V"]
    output: Float[Tensor, "C n V"]
    nothing: Float[Tensor, "C 1 V"]
    protected: Bool[Tensor, "B M"]
    available: Bool[Tensor, "B M"]

    @classmethod
    def of(cls, observed: Observed, *, projected: bool = False) -> "Rows":
        """Stacks each group's queries; `projected` measures values after W_o, if it is known.

        A head's W_o = L Q with orthonormal rows of Q, so distances after L equal those after W_o.
        """
        value = observed.value.double().reshape(-1, *observed.value.shape[-2:])
        allowed, forced = (
            x.reshape(value.shape[:-1]) for x in (available(observed), protected(observed))
        )
        count = allowed.sum(dim=-1)[:, None, None].clamp_min(1)
        centre = value.where(allowed[..., None], 0.0).sum(dim=-2, keepdim=True) / count
        value = (value - centre).where(allowed[..., None], 0.0)
        turn = _projection(observed) if projected else None
        parts = 1 if turn is None else turn.shape[-3]

        def stacked(x: Tensor) -> Tensor:
            return x.reshape(len(value) * parts, -1, x.shape[-1])

        def measured(x: Float[Tensor, "B N V"] | Float[Tensor, "C N V"]) -> Float[Tensor, "C N E"]:
            if turn is None:
                return x
            # (B, 1, N, V) or (B, G, N, V)
            return (x.view(len(value), -1, *x.shape[-2:]) @ turn).flatten(0, 1)

        shift = centre.repeat_interleave(parts, dim=0)
        output = measured(stacked(observed.output) - shift)
        beside = (
            torch.zeros_like(output)
            if observed.beside is None
            else measured(stacked(observed.beside.output()) - shift)
        )
        return cls(
            log_weights=stacked(observed.log_weights),
            log_beside=stacked(observed.log_beside).double(),
            beside=beside,
            value=measured(value),
            output=output,
            nothing=measured(-shift),
            protected=forced,
            available=allowed,
        )

    @property
    def parts(self) -> int:
        """Returns the number of query heads of a cache with separate values."""
        return len(self.value) // len(self.available)

    def split(self, texts: int = 1) -> Iterator["Rows"]:
        """Splits the caches into parts that are searched together: one text, or less on a CPU.

        A cache can affect how precisely and how often the costs of its part are computed. With few
        keys, costs are always exact, and texts are searched together.
        """
        numbers = torch.arange(len(self.available), device=self.value.device)
        most = (
            max(1, IN_CACHE // max(1, self.parts * self.log_weights[0].numel()))
            if numbers.is_cpu
            else len(numbers)
        )
        for text in numbers.view(texts if self.available.shape[-1] > UPDATED_KEYS else 1, -1):
            for caches in text.split(most):
                yield self if len(caches) == len(numbers) else self.take(caches)

    def take(self, caches: Int[Tensor, " A"]) -> "Rows":
        """Returns some of the caches."""
        numbers = torch.arange(len(self.value), device=caches.device).view(-1, self.parts)
        of_parts = numbers[caches].flatten()
        at = dict.fromkeys(("protected", "available"), caches)
        return Rows(**{name: x[at.get(name, of_parts)] for name, x in vars(self).items()})

    def error(self, chosen: Bool[Tensor, "B M"]) -> Float[Tensor, " B"]:
        """Computes sum_i ||o_i - o~_i||^2 of each set."""
        keys = chosen.int().topk(max(1, int(chosen.sum(dim=-1).max())), dim=-1).indices
        at = _by_part(keys, self.parts)
        used = _by_part(chosen.gather(-1, keys), self.parts)[:, None]
        log_weights = _columns(self.log_weights, at).to(self.value.dtype)
        value = self.value.take_along_dim(at[..., None], dim=-2)
        *_, output, _ = _attended(self, log_weights.masked_fill(~used, -torch.inf), value)
        return _by_cache((self.output - output).square().sum(dim=(-2, -1)), self.parts)

    def start(self, left: Int[Tensor, "B K"]) -> tuple["State", Float[Tensor, "B K"]]:
        """Returns the state of the keys left, and costs to add: padding -inf, protected inf."""
        at = _by_part(left, self.parts)
        log_weights = _columns(self.log_weights, at).to(self.value.dtype)
        state = State.of(self, log_weights, self.value.take_along_dim(at[..., None], dim=-2))
        fixed = torch.zeros_like(self.available, dtype=torch.float64)
        fixed = fixed.masked_fill_(self.protected, torch.inf)
        return state, fixed.masked_fill_(~self.available, -torch.inf).gather(-1, left)

    def cost_of_adding(self, chosen: Bool[Tensor, "B M"]) -> Float[Tensor, "B M"]:
        """Computes the change of the joint error by adding each key; inf if it cannot be added."""
        return self._adding(self._state(chosen), chosen)

    def exchanged(self, chosen: Bool[Tensor, "B M"]) -> Bool[Tensor, "B M"]:
        """Returns the set of least error after exchanging one cheap key."""
        state = self._state(chosen)
        dropping = state.cost().masked_fill(~chosen | self.protected, torch.inf)
        cheapest = dropping.topk(min(BREADTH, chosen.shape[-1]), dim=-1, largest=False)
        best, lowest = chosen, torch.full_like(dropping[:, :1], torch.inf)
        for cost, dropped in zip(*(x.split(1, dim=-1) for x in cheapest), strict=True):
            without = chosen.scatter(-1, dropped, value=False)
            other = self._state(without) if state.empties(dropped) else state.without(dropped)
            gained, added = self._adding(other, without).min(dim=-1, keepdim=True)
            better = cost + gained < lowest
            best = best.where(~better, without.scatter(-1, added, value=True))
            lowest = lowest.where(~better, cost + gained)
        return best

    def _state(self, chosen: Bool[Tensor, "B M"]) -> "State":
        hidden = ~_by_part(chosen, self.parts)[:, None]
        log_weights = self.log_weights.masked_fill(hidden, -torch.inf).to(self.value.dtype)
        return State.of(self, log_weights, self.value)

    def _adding(self, state: "State", chosen: Bool[Tensor, "B M"]) -> Float[Tensor, "B M"]:
        odds = self.log_weights.to(self.value.dtype) - (state.log_total + state.mass.log())
        odds = odds.masked_fill(self.log_weights == -torch.inf, -torch.inf)
        return state.change(-odds.sigmoid()).masked_fill(chosen | ~self.available, torch.inf)


def _projection(observed: Observed) -> Float[Tensor, "B G V E"] | None:
    """Returns for each query head a matrix L that gives vectors the same norms as W_o."""
    if observed.projection is None:
        return None
    whole = observed.projection.double().expand(*observed.batch, -1, -1, -1).flatten(0, -4)
    return torch.linalg.qr(whole.mT, mode="r").R.mT


def _columns(x: Float[Tensor, "C n K"], at: Int[Tensor, "C D"]) -> Float[Tensor, "C n D"]:
    return x.gather(-1, at[:, None].expand(-1, x.shape[1], -1))


def _by_part(x: Tensor, parts: int) -> Tensor:
    """Repeats each cache's entry for each of its parts."""
    return x if parts == 1 else x.repeat_interleave(parts, dim=0)


def _by_cache(x: Tensor, parts: int) -> Tensor:
    """Sums over the parts of each cache."""
    return x if parts == 1 else x.unflatten(0, (-1, parts)).sum(dim=1)


@dataclass
class State:
    """Holds the errors of a set and the distances of K keys; drops change it in place.

    Attributes:
        output: o~ at the last full computation.
        error_of_others: ||o - o~||^2 without the key of the largest weight, at the last full
            computation.
        to_kept: R = ||v_j - o~||^2.
        to_exact: D = ||v_j - o||^2.
        parts: Query heads of a cache with separate values.
    """

    value: Float[Tensor, "C K V"]
    log_total: Float[Tensor, "C n 1"]
    weights: Float[Tensor, "C n K"]
    mass: Float[Tensor, "C n 1"]
    output: Float[Tensor, "C n V"]
    exact: Float[Tensor, "C n V"]
    nothing: Float[Tensor, "C 1 V"]
    error: Float[Tensor, "C n 1"]
    error_of_others: Float[Tensor, "C n 1"]
    to_kept: Float[Tensor, "C n K"]
    to_exact: Float[Tensor, "C n K"]
    parts: int = 1

    @classmethod
    def of(
        cls,
        rows: Rows,
        log_weights: Float[Tensor, "C n K"],
        value: Float[Tensor, "C K V"],
    ) -> "State":
        """Computes the state of the set of all keys with a finite log-weight."""
        total, weights, mass, output, others = _attended(rows, log_weights, value)
        return cls(
            value=value,
            log_total=total,
            weights=weights,
            mass=mass,
            output=output,
            exact=rows.output,
            nothing=rows.nothing,
            error=(rows.output - output).square().sum(dim=-1, keepdim=True),
            error_of_others=(rows.output - others).square().sum(dim=-1, keepdim=True),
            to_kept=_squared_distances(output, value),
            to_exact=_squared_distances(rows.output, value),
            parts=rows.parts,
        )

    def take(self, keys: Int[Tensor, "B C"]) -> "State":
        """Returns the state of some of the keys."""
        at = _by_part(keys, self.parts)
        return replace(
            self,
            value=self.value.take_along_dim(at[..., None], dim=-2),
            weights=_columns(self.weights, at),
            to_kept=_columns(self.to_kept, at),
            to_exact=_columns(self.to_exact, at),
        )

    @property
    def is_gentle(self) -> bool:
        """Returns whether fp32 suffices, because no key has nearly all of a row's mass."""
        return bool((self.weights <= GENTLE * self.mass).all())

    @property
    def is_single(self) -> bool:
        """Returns whether the state is in fp32."""
        return self.error.dtype == torch.float32

    def eased(self, is_large: bool) -> tuple["State", Float[Tensor, "B 1"]]:
        """Returns the state in fp32 if that suffices, and the unit of its costs.

        Its unit of length keeps squares in the range of fp32. With few keys it stays in fp64: texts
        are then searched together, and one text must not decide the precision of another.
        """
        if self.is_single or not (is_large and self.is_gentle):
            return self, self.error.new_ones(1, 1)
        lengths = {name: vars(self)[name] / self.unit for name in LENGTHS}
        squares = {name: vars(self)[name] / self.unit.square() for name in SQUARES}
        parts = vars(self) | lengths | squares
        state = State(**{n: x if n == "parts" else x.float() for n, x in parts.items()})
        return state, self.unit[:: self.parts, :, 0].square()

    @property
    def unit(self) -> Float[Tensor, "C 1 1"]:
        """Returns a power of two typical of the values, the same for all parts of a cache."""
        return _by_part(
            typical_unit(self.value.unflatten(0, (-1, self.parts)).flatten(1, 2)), self.parts
        )

    def change(self, t: Float[Tensor, "C n K"]) -> Float[Tensor, "B K"]:
        """Computes sum_i t ((1 + t) R - D + ||o - o~||^2)."""
        gained = torch.addcmul(self.to_kept, t, self.to_kept).sub_(self.to_exact).mul_(t)
        return _by_cache(gained.sum(dim=-2) + (t.mT @ self.error).squeeze(-1), self.parts)

    def cost(self) -> Float[Tensor, "B K"]:
        """Computes the change of the error by dropping each key."""
        others = self.mass - self.weights
        t = self.weights / others
        largest = others <= LEFT[others.dtype] * self.mass  # true for a row that sees nothing
        if not largest.any():
            return self.change(t)
        lost = (self.error_of_others - self.error).where(largest, 0.0).sum(dim=-2)
        return self.change(t.masked_fill(largest, 0.0)) + _by_cache(lost, self.parts)

    def empties(self, key: Int[Tensor, "B 1"]) -> bool:
        """Returns whether a row has less than `LEFT` of its mass without these keys."""
        left = self.mass - self._of(self.weights, key)
        return bool(((left < LEFT[left.dtype]) & (self.mass > 0)).any())

    def drop(self, key: Int[Tensor, "B 1"]) -> None:
        """Drops one key of each cache."""
        weight, near, far = (self._of(x, key) for x in (self.weights, self.to_kept, self.to_exact))
        left = self.mass - weight
        t = (weight / left).where(left > 0, 0.0)  # 0 / 0 in a row that sees nothing
        at = _by_part(key, self.parts)
        between = self.value - self.value.gather(1, at[..., None].expand_as(self.value[:, :1]))
        outer = torch.cat([(1 + t) * t * near, -t], dim=-1)
        with_all = torch.stack([torch.ones_like(between[..., 0]), between.square().sum(-1)], dim=1)
        self.to_kept.mul_(1 + t).baddbmm_(outer, with_all)
        self.error = self.error + t * ((1 + t) * near - far + self.error)
        self.mass = left
        self.weights.scatter_(-1, at[:, None, :].expand_as(weight), 0.0)

    def recomputed(self, gone: Int[Tensor, "B D"]) -> "State":
        """Returns the state after dropping keys, with recomputed distances."""
        at = _by_part(gone, self.parts)
        weight = _columns(self.weights, at)
        value = self.value.take_along_dim(at[..., None], dim=-2)
        mass = self.mass - weight.sum(dim=-1, keepdim=True)
        output = (self.mass * self.output - weight @ value) / mass
        output = output.where(mass > 0, self.nothing)
        return replace(
            self,
            weights=self.weights.scatter(-1, at[:, None].expand_as(weight), 0.0),
            mass=mass,
            output=output,
            error=(self.exact - output).square().sum(dim=-1, keepdim=True),
            to_kept=_squared_distances(output, self.value),
        )

    def _of(self, x: Float[Tensor, "C n K"], key: Int[Tensor, "B 1"]) -> Float[Tensor, "C n 1"]:
        return _columns(x, _by_part(key, self.parts))

    def without(self, key: Int[Tensor, "B 1"]) -> "State":
        """Returns the state after dropping one key of each cache."""
        left = replace(self, weights=self.weights.clone(), to_kept=self.to_kept.clone())
        left.drop(key)
        return left


def _attended(
    rows: Rows, log_weights: Float[Tensor, "C n K"], value: Float[Tensor, "C K V"]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the log of the total weight, the normalised weights, their mass (about 1), and o~.

    Also returns each row's output without its largest weight. Everything else is computed from it,
    with weights relative to the sum of the others, so it stays accurate even if the largest weight
    dwarfs them.
    """
    top, largest = log_weights.max(dim=-1, keepdim=True)
    others = log_weights.scatter(-1, largest, -torch.inf)
    scale = finite(torch.maximum(others.amax(dim=-1, keepdim=True), rows.log_beside))
    weights, beside = others.sub_(scale).exp_(), (rows.log_beside - scale).exp()
    mass = weights.sum(dim=-1, keepdim=True) + beside
    of_others = (weights @ value + beside * rows.beside) / mass
    of_others = of_others.where(mass > 0, rows.nothing)
    log_others = mass.log() + scale
    total = finite(torch.logaddexp(log_others, top))
    share, share_of_others = (top - total).exp(), (log_others - total).exp()
    weights.mul_((scale - total).exp()).scatter_(-1, largest, share)
    of_largest = value.take_along_dim(largest, dim=-2)
    mass = share + share_of_others
    output = ((share * of_largest + share_of_others * of_others) / mass).where(
        mass > 0, rows.nothing
    )
    return total, weights, mass, output, of_others


def _squared_distances(
    a: Float[Tensor, "C n V"], b: Float[Tensor, "C K V"]
) -> Float[Tensor, "C n K"]:
    squares = a.square().sum(-1, keepdim=True) + b.square().sum(-1)[:, None]
    return squares.baddbmm(a, b.mT, alpha=-2).clamp_min_(0)


def extend(rows: Rows, counts: Int[Tensor, " B"]) -> Bool[Tensor, "B M"]:
    """Greedily adds the best key to the protected ones; optimal if only one is added."""
    chosen = rows.protected
    for _ in range(int((counts - chosen.sum(dim=-1)).max())):
        cost = rows.cost_of_adding(chosen)
        best = cost.argmin(dim=-1, keepdim=True)
        is_short = chosen.sum(dim=-1, keepdim=True) < counts[:, None]
        more = is_short & cost.gather(-1, best).isfinite()
        chosen = chosen.scatter(-1, best, more | chosen.gather(-1, best))
    return chosen


def exchange(rows: Rows, chosen: Bool[Tensor, "B M"]) -> Bool[Tensor, "B M"]:
    """Exchanges kept keys for others while that lowers the joint error, up to a local optimum.

    Each step tries to drop each of the `BREADTH` cheapest keys and to add the best key in its
    place, and takes the exchange with the least error.
    """
    chosen, error = chosen.clone(), rows.error(chosen)
    improving = torch.arange(len(chosen), device=chosen.device)
    for _ in range(2 * int(chosen.sum(dim=-1).max())):
        rest = rows.take(improving)
        other = rest.exchanged(chosen[improving])
        left = rest.error(other)
        better = left < error[improving] * (1 - GAIN)
        improving = improving[better]
        if len(improving) == 0:
            break
        chosen[improving], error[improving] = other[better], left[better]
    return chosen
