"""Computes attention over a fixed pattern: the keys of a query depend on positions alone."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import Approximation, SparseApproximation
from value_aware_attention.approximations.block_sparse import block_sparse_attention, pairs
from value_aware_attention.approximations.patterns import Pattern
from value_aware_attention.arguments import check_at_least, check_choice
from value_aware_attention.attention import masked_softmax
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes
from value_aware_attention.flex import flex_kernel_attention, uncompiled, unsupported_reason

ENGINES = (None, "flex", "torch")


class FixedPattern(Approximation):
    """Computes Eq. 1 over the pairs of a pattern; a query without visible pairs gives zeros.

    Queries are the last N of M positions; more of them than keys are refused. `engine` is "torch"
    (any device, with gradients), "flex" (FlexAttention: CUDA, or inference on a CPU that has a C++
    compiler), or None to choose: flex on CUDA, torch on a CPU. On a CPU torch is nearly twice as
    fast for windows, several times for stripes, and does not compile for seconds in the first call.
    """

    def __init__(self, engine: str | None = None) -> None:
        super().__init__()
        self.engine = check_choice(ENGINES, engine=engine)

    @abstractmethod
    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        """Returns the pairs of `keys` positions that are kept; under a causal mask pairs with the
        past."""

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        # For FlexAttention: on CUDA in the caller's precision, which is fast.
        dtype = call.dtype if call.query.is_cuda else call.query.dtype
        tensors = call.query.to(dtype), call.key.to(dtype), call.value.to(dtype)
        if self._takes_flex(call, unsupported_reason(*tensors, call.kernel)):
            return self._by_flex(call, tensors)
        return block_sparse_attention(call, self._pattern_of(call))

    @uncompiled  # in a compiled model each call would make, and compile for, a pattern
    def _by_flex(self, call: Call, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        pattern = self._pattern_of(call)
        return flex_kernel_attention(*tensors, call.kernel, call.attn_mask, pattern)

    def _pattern_of(self, sizes: Call | Sizes) -> Pattern:
        if sizes.queries > sizes.keys:
            raise ValueError(
                f"{type(self).__name__} got {sizes.queries} queries and {sizes.keys} keys; queries "
                f"are the last positions of its pattern, so there are at most as many as keys"
            )
        return self.pattern(sizes.keys, is_causal=sizes.is_causal)

    def _takes_flex(self, call: Call, reason: str | None) -> bool:
        if self.engine == "flex" and reason:
            raise ValueError(f"engine is 'flex', but {reason}; use engine='torch'")
        wanted = self.engine == "flex" or (self.engine is None and call.query.is_cuda)
        return wanted and reason is None

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts the pairs that the pattern keeps, one by one."""
        pattern = self._pattern_of(sizes)
        return pairs(pattern, sizes.queries, sizes.keys) / sizes.queries * sizes.one_key


class SparseFixedPattern(FixedPattern, SparseApproximation):
    """Keeps a fixed pattern of at most `r` keys per query, which can be named one by one."""

    queries_alone = False

    def __init__(self, r: int, engine: str | None = None) -> None:
        SparseApproximation.__init__(self, r)
        self.engine = check_choice(ENGINES, engine=engine)

    check_finite = Approximation.check_finite  # no number moves the choice of keys

    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        kept = _keys_kept(self._pattern_of(call), call.queries, call.keys)[call.rows.cpu()]
        kept = kept.to(call.query.device)
        scores = call.kernel.log_similarity(call.query, call.key)
        indices = kept.clamp_min(0).expand(*scores.shape[:-1], -1)
        seen = kept >= 0
        if call.attn_mask is not None:
            mask = call.attn_mask.expand(*call.attn_mask.shape[:-2], *scores.shape[-2:])
            seen = seen & mask.gather(-1, kept.clamp_min(0).expand(*mask.shape[:-1], -1))
        weights = masked_softmax(scores.gather(-1, indices), seen)
        weights = weights.expand(*call.batch, *kept.shape)
        return indices.expand(weights.shape), weights


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # kept for later calls, and autograd saves no inference tensors
def _keys_kept(pattern: Pattern, queries: int, keys: int) -> Int[Tensor, "N R"]:
    """Lists the keys of each query in order; -1 fills the rows of those that keep fewer."""
    mask = pattern.mask(queries, keys)
    row, key = mask.nonzero().unbind(dim=-1)
    counts = mask.sum(dim=-1)
    place = torch.arange(len(row)) - (counts.cumsum(dim=0) - counts)[row]
    kept = torch.full((queries, int(counts.max()) if queries else 0), -1)
    kept[row, place] = key
    return kept


def check_positions(global_positions: Sequence[int]) -> tuple[int, ...]:
    """Returns the positions in order, if all are integers >= 0; ValueError otherwise."""
    if not isinstance(global_positions, Collection):
        raise ValueError(f"global_positions is {global_positions!r}; it must be a list of integers")
    given = {check_at_least(0, **{"global position": one}) for one in global_positions}
    return tuple(sorted(given))


def check_positions_exist(global_positions: tuple[int, ...], keys: int) -> None:
    """Raises ValueError if a position lies beyond the last of `keys`."""
    if global_positions and global_positions[-1] >= keys:
        last = global_positions[-1]
        raise ValueError(f"global position is {last}; {keys} keys allow 0 to {keys - 1}")
