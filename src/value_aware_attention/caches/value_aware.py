"""Searches for the set of keys that jointly changes the observed outputs least."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from value_aware_attention.arguments import check_choice
from value_aware_attention.caches.baselines import KeyDiff, KeyNorm, Recent
from value_aware_attention.caches.budgets import Ranking, first_of
from value_aware_attention.caches.critical_values import CriticalValues
from value_aware_attention.caches.elimination import DROPPED_SHARE, eliminate, measured_in_order
from value_aware_attention.caches.expected_attention import ExpectedAttention
from value_aware_attention.caches.joint_set import Rows, exchange, extend
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.caches.leave_one_out import LeaveOneOut
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.caches.observed_attention import ObservedAttention
from value_aware_attention.caches.refit import refitted

RANKINGS: Sequence[Callable[[int], CacheMethod]] = (
    LeaveOneOut,
    ObservedAttention,
    partial(ObservedAttention, aggregate="max"),
)
"""`search="default"` eliminates among the 4r keys that any of these scores ranks highest"""
STARTS: Sequence[Callable[[int], CacheMethod]] = (
    *RANKINGS,
    partial(ObservedAttention, pool=5),
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    Recent,
    lambda r: CriticalValues(ObservedAttention(r)),
)
"""Scores whose sets are starting points, or are returned if they have less error"""
PRESELECTED = 4
"""Number of keys that `search="default"` searches, relative to r"""
EXCHANGED, FEW_KEYS = 3, 64
"""`search="best"` improves at most `EXCHANGED` starts, but all starts with `FEW_KEYS` keys or
fewer. On 128 keys of three trained models, all 11 starts gave 0.2 to 1.6% less error in four times
the time. With ten keys, the start that leads to the optimum is often far from it."""


class ValueAware(CacheMethod):
    """Searches for the r keys with the least sum ||o_i - o~_i||^2 over the observed queries.

    One set serves all queries, with attention's own weights: the objective of section 3 for a
    cache. Scores of single keys cannot rank sets, because the gain of a key depends on the others.
    Keys are therefore dropped one by one, each time the key that increases the joint error least,
    computed exactly for every candidate. If the set of a scoring method (`STARTS`) has less error
    on the observed queries, that set is returned.

    The set is optimal if one key is free (r = 1, or one more than the protected) or one is dropped,
    and the best found otherwise. `search` "default" eliminates among the 4r keys that any of three
    scores ranks highest, "exhaustive" among all keys. "best" also exchanges keys until no exchange
    helps, from several starts (with few keys, from all). `refit` fits biases and values of the
    keys, like `AttentionMatching`.
    """

    is_nested = False

    def __init__(self, r: int, refit: bool = False, search: str = "default") -> None:
        super().__init__(r)
        self.refit = self.refits = refit
        self.search = check_choice(("default", "exhaustive", "best"), search=search)

    @torch.no_grad()
    def keep(self, observed: Observed) -> KeptKeys:
        self.check(observed)
        # copies, so that derived tensors of size queries x keys are freed
        starts, rows = self._starts(replace(observed)), Rows.of(replace(observed))
        searched = [
            self._searched(part_rows, part_starts, self.r)[0]
            for part_rows, part_starts in _parts(rows, starts)
        ]
        orders = torch.cat([torch.cat(searched).view(1, *observed.batch, -1), starts])
        choice = self._kept(
            observed, rows, orders, torch.full(observed.batch, self.r, device=observed.key.device)
        )
        del rows
        return refitted(observed, choice) if self.refit else choice

    @torch.no_grad()
    def rank(self, observed: Observed) -> Ranking:
        """Ranks keys by elimination, with costs after W_o relative to the layer's output."""
        self.check(observed)
        starts, rows = self._starts(replace(observed)), Rows.of(replace(observed), projected=True)
        least = int(rows.protected.sum(dim=-1).max())
        measured = [
            self._measured(part_rows, part_starts, least)
            for part_rows, part_starts in _parts(rows, starts)
        ]
        keys, costs = (torch.cat(x).view(*observed.batch, -1) for x in zip(*measured, strict=True))
        return Ranking(
            keys,
            costs / observed.squared_layer_output().view(-1, *(1,) * (costs.ndim - 1)),
            others=starts,
        )

    @torch.no_grad()
    def cut(self, observed: Observed, ranking: Ranking, counts: Int[Tensor, " *batch"]) -> KeptKeys:
        assert ranking.others is not None
        orders = torch.cat([ranking.keys[None], ranking.others])
        choice = self._kept(observed, Rows.of(replace(observed), projected=True), orders, counts)
        return refitted(observed, choice) if self.refit else choice

    def _kept(
        self,
        observed: Observed,
        rows: Rows,
        orders: Int[Tensor, "S *batch M"],
        counts: Int[Tensor, " *batch"],
    ) -> KeptKeys:
        """Keeps the set of least error among the first keys of each order, or a better set."""
        best, first = [], 0
        for part_rows, part_orders in _parts(rows, orders):
            part_counts = counts.flatten()[first : first + len(part_rows.available)]
            best.append(self._best(part_rows, part_orders, part_counts))
            first += len(part_counts)
        return self.pack(observed, torch.cat(best).view(*observed.batch, -1))

    def _starts(self, observed: Observed) -> Int[Tensor, "S *batch M"]:
        """Ranks the keys by each of `STARTS`."""
        starts = []
        for method in (build(self.r) for build in STARTS):
            with suppress(ValueError):  # unsupported kernel or unknown rotation
                method.check(observed)
                starts.append(method.leading(observed, method.scores(observed), observed.keys))
        return torch.stack(starts)

    def _searched(
        self, rows: Rows, others: Int[Tensor, "S B M"], least: int
    ) -> tuple[Int[Tensor, "B M"], Float[Tensor, "B K"]]:
        """Ranks the keys by the search, down to `least`, with the costs of the K searched."""
        all_keys = torch.arange(others.shape[-1], device=others.device).expand(others.shape[1:])
        count = PRESELECTED * self.r
        if self.search != "default" or count >= others.shape[-1]:
            share = DROPPED_SHARE if self.search == "default" else 0.0
            return eliminate(rows, all_keys, least, share=share)
        places = torch.empty_like(others[: len(RANKINGS)])
        places.scatter_(-1, others[: len(RANKINGS)], all_keys.expand_as(places).contiguous())
        union = places.amin(dim=0).argsort(dim=-1, stable=True)
        keys, costs = eliminate(
            rows, union[:, :count].sort(dim=-1).values, least, share=DROPPED_SHARE
        )
        return torch.cat([keys, union[:, count:]], dim=-1), costs

    def _measured(
        self, rows: Rows, others: Int[Tensor, "S B M"], least: int
    ) -> tuple[Int[Tensor, "B M"], Float[Tensor, "B M"]]:
        """Ranks the keys by the search; also returns the cost of each."""
        keys, costs = self._searched(rows, others, least)
        return keys, torch.cat([costs, measured_in_order(rows, keys, costs.shape[-1])], dim=-1)

    def _best(
        self, rows: Rows, orders: Int[Tensor, "S B M"], counts: Int[Tensor, " B"]
    ) -> Bool[Tensor, "B M"]:
        """Returns the set of least error among the first keys of each order, or a better set."""
        starts = [first_of(keys, counts) for keys in orders]
        if (counts - rows.protected.sum(dim=-1) == 1).any() or self.search == "best":
            starts.append(extend(rows, counts))
        sets = torch.stack(starts)
        errors = torch.stack([rows.error(start) for start in starts])
        if self.search == "best":
            count = len(sets) if sets.shape[-1] <= FEW_KEYS else EXCHANGED
            nearest = errors.topk(count, dim=0, largest=False).indices
            sets = sets.gather(0, nearest[..., None].expand(-1, -1, sets.shape[-1]))
            sets = torch.stack([exchange(rows, start) for start in sets])
            errors = torch.stack([rows.error(start) for start in sets])
        best: Int[Tensor, " B"] = errors.argmin(dim=0)
        return sets[best, torch.arange(len(best), device=best.device)]

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Counts scores, distances, and nine multiply-adds per drop and remaining pair.

        This is for `search` "default" without a refit; the scores of `STARTS` are not counted.
        """
        searched = min(keys, PRESELECTED * self.r)
        pairs = rows * (searched - min(self.r, searched)) * (searched + self.r) / 2
        return rows * keys * (head_dim + 2 * value_dim) + 9 * pairs


def _parts(
    rows: Rows, orders: Int[Tensor, "S *batch M"]
) -> Iterator[tuple[Rows, Int[Tensor, "S B M"]]]:
    """Splits caches into parts that are searched together, with the orders of their keys."""
    parts = list(rows.split(orders.shape[1:-1][:1].numel()))  # texts; 1 without dimensions
    by_cache = orders.reshape(len(orders), -1, orders.shape[-1])
    return zip(parts, by_cache.split([len(x.available) for x in parts], dim=1), strict=True)
