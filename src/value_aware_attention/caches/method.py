"""Defines the interface of cache methods, which keep one set of keys for all later queries."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from value_aware_attention.arguments import arguments_shown, check_at_least, described
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.budgets import Ranking, pooled_counts
from value_aware_attention.caches.kept import KeptKeys
from value_aware_attention.caches.observed import Observed
from value_aware_attention.call import refuse
from value_aware_attention.kernels import check_kernel


class CacheMethod(nn.Module):
    """Keeps r keys of a cache, chosen on observed queries; subclasses define `scores` or `keep`.

    Attributes:
        kernels: The supported kernels; empty = all kernels.
        observes: Whether the choice depends on the queries.
        refits: Whether keys get new weights and values, so that no later choice can be made among
            them.
        is_nested: Whether the order of the keys is the same for every r.
        scale_free: Whether the choice stays the same if all values are multiplied by one number.
    """

    kernels: tuple[type, ...] = ()
    observes: bool = True
    refits: bool = False
    is_nested: bool = True
    scale_free: bool = True

    def __init__(self, r: int) -> None:
        super().__init__()
        self.r = check_at_least(1, r=r)

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        """Computes the scores; the r keys with the largest are kept."""
        raise NotImplementedError(f"{type(self).__name__} has neither scores nor keep")

    @torch.no_grad()
    def keep(self, observed: Observed) -> KeptKeys:
        """Chooses the keys to keep: the protected ones, then those with the largest scores.

        Raises ValueError if r exceeds the number of keys or is below the number of protected keys,
        and for an unsupported kernel.
        """
        self.check(observed)
        order = self.leading(observed, self.scores(observed), self.r)
        return first_kept(observed, order, self.r, [self.r] * observed.batch.numel())

    @torch.no_grad()
    def rank(self, observed: Observed) -> Ranking:
        """Ranks all keys by `losses`; raises ValueError like `keep`.

        A loss that is NaN counts as the lowest.
        """
        self.check(observed)
        loss, keys = self._ordered(observed, self.losses(observed).double())
        return Ranking(keys, loss, self.preference(observed))

    def losses(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        """Computes scores that are comparable between heads and layers; by default `scores`."""
        return self.scores(observed)

    def preference(self, observed: Observed) -> Float[Tensor, " B"] | None:
        """Computes the layer's need for keys, if `share` uses it; else None."""
        return None

    def share(
        self, rankings: Sequence[Ranking], total: int, least: int
    ) -> list[Int[Tensor, "B H"]]:
        """Counts the keys of each head if `rankings`, one per layer, keep `total` in all."""
        return pooled_counts(rankings, total, least)

    @torch.no_grad()
    def cut(self, observed: Observed, ranking: Ranking, counts: Int[Tensor, " *batch"]) -> KeptKeys:
        """Keeps `counts` keys of each cache by `ranking`, which this method made."""
        return first_kept(observed, ranking.keys, counts[..., None], counts.flatten().tolist())

    def check(self, observed: Observed) -> None:
        """Raises ValueError for an unsupported kernel or number of keys."""
        name = type(self).__name__
        check_kernel(observed.kernel)
        if self.kernels and not isinstance(observed.kernel, self.kernels):
            allowed = ", ".join(kernel.__name__ for kernel in self.kernels)
            raise ValueError(f"{name} got the kernel {observed.kernel}; it supports {allowed}")
        _refuse_large(observed)
        if self.r > observed.keys:
            raise ValueError(f"{name} keeps r = {self.r} keys; there are {observed.keys}")
        if observed.protected is None or observed.protected.shape[-1] <= self.r:
            return
        if (forced := int(protected(observed).sum(dim=-1).max())) > self.r:  # repeats count once
            raise ValueError(
                f"{name} keeps r = {self.r} keys; {forced} are protected, so r must be at least "
                f"{forced}"
            )

    @staticmethod
    def leading(
        observed: Observed, scores: Float[Tensor, "*batch M"], r: int
    ) -> Int[Tensor, "*batch r"]:
        """Returns the first r keys: protected, then by score, then padding."""
        return CacheMethod._ordered(observed, scores)[1][..., :r]

    @staticmethod
    def _ordered(
        observed: Observed, scores: Float[Tensor, "*batch M"]
    ) -> tuple[Float[Tensor, "*batch M"], Int[Tensor, "*batch M"]]:
        """Sorts the keys; returns finite scores, inf for protected keys and -inf for padding."""
        largest = torch.finfo(scores.dtype).max
        scores = scores.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)
        if observed.protected is not None:
            positions = observed.protected.to(scores.device).expand(*observed.batch, -1)
            scores = scores.scatter(-1, positions, torch.inf)
        if observed.available is not None:
            scores = scores.masked_fill(~available(observed), -torch.inf)
        return scores.sort(dim=-1, descending=True, stable=True)

    @staticmethod
    def pack(observed: Observed, chosen: Bool[Tensor, "*batch M"]) -> KeptKeys:
        """Packs sets of keys, unchanged, into slots; counts them, which waits for a GPU."""
        counts = chosen.sum(dim=-1, keepdim=True)
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        return first_kept(observed, order, counts, counts.flatten().tolist())

    def extra_repr(self) -> str:
        return arguments_shown(self)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Counts the multiply-adds of one choice for a key-value head with `rows` queries.

        The default counts all scores, or, without queries, one pass over the keys.
        """
        return float((rows if self.observes else 1) * keys * head_dim)


def check_cache_method(method: CacheMethod) -> None:
    """Raises ValueError unless the argument is an instance of `CacheMethod`."""
    if not isinstance(method, CacheMethod):
        raise ValueError(
            f"method is {described(method)}; it must be a method of caches, such as "
            f"caches.ObservedAttention(8)"
        )


class Refinement(CacheMethod):
    """Ranks and shares keys like another method, and changes what a head keeps."""

    def __init__(self, method: CacheMethod) -> None:
        check_cache_method(method)
        super().__init__(method.r)
        self.method, self.kernels = method, method.kernels
        self.is_nested, self.scale_free = method.is_nested, method.scale_free

    @torch.no_grad()
    def rank(self, observed: Observed) -> Ranking:
        return self.method.rank(observed)

    def share(
        self, rankings: Sequence[Ranking], total: int, least: int
    ) -> list[Int[Tensor, "B H"]]:
        return self.method.share(rankings, total, least)


def _refuse_large(observed: Observed) -> None:
    """Raises ValueError for values so large that a sum over all keys may not be finite."""
    if not observed.value.numel():
        return
    keys, largest = observed.keys, working_precision(observed.value.abs().max())
    refuse(
        largest > torch.finfo(largest.dtype).max / keys,
        lambda: (
            f"value holds {float(largest):.0e}; sums of {keys} such numbers are too large for "
            f"{largest.dtype}"
        ),
    )


def first_kept(
    observed: Observed, order: Int[Tensor, "*batch K"], counts: int | Int[Tensor, "*batch 1"],
    sizes: list[int],
) -> KeptKeys:  # fmt: skip
    """Keeps the first `counts` keys of each order, unchanged; `sizes` are the counts on the host.

    Slots of padding are unused, as are surplus slots of a cache that keeps fewer keys.
    """
    indices, places = order[..., : max([1, *sizes])].sort(dim=-1)
    used = places < counts
    if observed.available is not None:
        used &= available(observed).gather(-1, indices)
    dtype = torch.float64 if observed.key.dtype == torch.float64 else torch.float32
    choice = KeptKeys(indices, used.to(dtype).log())
    object.__setattr__(choice, "sizes", sizes if observed.available is None else None)
    return choice


def available(observed: Observed) -> Bool[Tensor, "*batch M"]:
    """Returns a mask of the keys that may be kept."""
    keys = torch.ones(
        (*observed.batch, observed.keys), dtype=torch.bool, device=observed.key.device
    )
    return keys if observed.available is None else keys & observed.available


def protected(observed: Observed) -> Bool[Tensor, "*batch M"]:
    """Returns a mask of the keys that must be kept, never padding."""
    none = observed.key.new_zeros((*observed.batch, observed.keys), dtype=torch.bool)
    if observed.protected is None:
        return none
    positions = observed.protected.to(none.device).expand(*observed.batch, -1)
    forced = none.scatter(-1, positions, value=True)
    return forced if observed.available is None else forced & observed.available


def candidates(observed: Observed) -> Bool[Tensor, "*batch M"]:
    """Returns a mask of the keys to choose from: neither padding nor protected."""
    return available(observed) & ~protected(observed)
