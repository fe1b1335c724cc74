"""Attention over a fixed pattern: the keys a query sees depend on positions alone."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from value_aware_attention.approximations.approximation import (
    Approximation,
    Inputs,
    SparseApproximation,
    renormalised,
)
from value_aware_attention.approximations.block_sparse import block_sparse_attention, pairs
from value_aware_attention.approximations.patterns import Pattern
from value_aware_attention.attention import check_inputs, visibility
from value_aware_attention.error import Sizes
from value_aware_attention.flex import flex_kernel_attention, obstacle
from value_aware_attention.kernels import Kernel

__all__ = [
    "ENGINES",
    "FixedPattern",
    "SparseFixedPattern",
    "check_engine",
    "check_positions",
    "check_positions_exist",
]

ENGINES = ("flex", "torch")


@dataclass(frozen=True)
class PatternInputs(Inputs):
    """A call whose causal mask is left to the pattern: `visible` is the caller's mask alone."""

    dtype: torch.dtype

    def output(self) -> Float[Tensor, "*batch N V"]:
        tensors = self.query, self.key, self.value
        masked = visibility(*tensors, attn_mask=self.visible, is_causal=self.is_causal)
        return Inputs(*tensors, self.kernel, masked, self.is_causal).output()

    def for_flex(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value: on CUDA in the caller's precision, for fast products."""
        on_gpu = self.query.is_cuda
        query, key, value = (
            x.to(self.dtype) if on_gpu else x for x in (self.query, self.key, self.value)
        )
        return query, key, value


class FixedPattern(Approximation):
    """Eq. 1 over the pairs of a pattern; a query whose visible keys are all left out gives zeros.

    Queries are the last N of M positions. `engine` is "torch" (any device, with gradients), "flex"
    (FlexAttention: CUDA, or inference on a CPU that has a C++ compiler), or None to choose: flex on
    CUDA, torch on a CPU. There torch is nearly twice as fast for windows, several times for
    stripes, and it needs none of the seconds that flex compiles for in the first call
    (`benchmarks/patterns.py`).
    """

    def __init__(self, engine: str | None = None) -> None:
        super().__init__()
        self.engine = check_engine(engine)

    @abstractmethod
    def pattern(self, keys: int, *, is_causal: bool = False) -> Pattern:
        """Which of `keys` positions each may see; under a causal mask a subset of its past."""

    def inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> PatternInputs:
        """The call, checked; the N x N causal mask is never drawn."""
        check_inputs(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
        checked = super().inputs(query, key, value, kernel, attn_mask, False)
        parts = {field.name: getattr(checked, field.name) for field in fields(checked)}
        return PatternInputs(**(parts | {"is_causal": is_causal, "dtype": value.dtype}))

    def approximate(self, inputs: Inputs) -> Float[Tensor, "*batch N V"]:
        assert isinstance(inputs, PatternInputs)
        tensors = inputs.for_flex()
        if self._takes_flex(inputs, obstacle(*tensors, inputs.kernel)):
            return self._by_flex(inputs, tensors)
        return block_sparse_attention(inputs, self._pattern_of(inputs))

    @torch.compiler.disable  # in a compiled model each call would make, and compile for, a pattern
    def _by_flex(self, inputs: PatternInputs, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        pattern = self._pattern_of(inputs)
        return flex_kernel_attention(*tensors, inputs.kernel, inputs.visible, pattern)

    def _pattern_of(self, inputs: Inputs) -> Pattern:
        return self.pattern(inputs.keys, is_causal=inputs.is_causal)

    def _takes_flex(self, inputs: Inputs, reason: str | None) -> bool:
        if self.engine == "flex" and reason:
            raise ValueError(f"engine is 'flex', but {reason}; use engine='torch'")
        wanted = self.engine == "flex" or (self.engine is None and inputs.query.is_cuda)
        return wanted and reason is None

    def multiply_adds(self, sizes: Sizes) -> float:
        """The pairs that the pattern keeps, counted one by one."""
        pattern = self.pattern(sizes.keys, is_causal=sizes.is_causal)
        return pairs(pattern, sizes.queries, sizes.keys) / sizes.queries * sizes.one_key

    def extra_repr(self) -> str:
        return "" if self.engine is None else f"engine={self.engine!r}"


class SparseFixedPattern(FixedPattern, SparseApproximation):
    """A fixed pattern of at most `r` keys per query, which can be named one by one."""

    queries_alone = False

    def __init__(self, r: int, engine: str | None = None) -> None:
        SparseApproximation.__init__(self, r)
        self.engine = check_engine(engine)

    check_finite = Approximation.check_finite  # no number moves the choice of keys

    def choose(
        self, inputs: Inputs
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        pattern = self.pattern(inputs.keys, is_causal=inputs.is_causal)
        kept = _keys_kept(pattern, inputs.query.shape[-2], inputs.keys).to(inputs.query.device)
        parts, first = [], 0
        for block in inputs.blocks():
            rows = kept[first : first + block.query.shape[-2]]
            parts.append(_weights(block, rows).expand(*inputs.batch, *rows.shape))
            first += len(rows)
        weights = torch.cat(parts, dim=-2)
        return kept.clamp_min(0).expand(weights.shape), weights

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (f"r={self.r}", super().extra_repr())))


def _keys_kept(pattern: Pattern, queries: int, keys: int) -> Int[Tensor, "N R"]:
    """The keys of each query in order; -1 fills the rows of those that keep fewer."""
    mask = pattern.mask(queries, keys)
    row, key = mask.nonzero().unbind(dim=-1)
    counts = mask.sum(dim=-1)
    place = torch.arange(len(row)) - (counts.cumsum(dim=0) - counts)[row]
    kept = torch.full((queries, int(counts.max()) if queries else 0), -1)
    kept[row, place] = key
    return kept


def _weights(inputs: Inputs, kept: Int[Tensor, "N R"]) -> Float[Tensor, "*batch N R"]:
    scores = inputs.kernel.log_similarity(inputs.query, inputs.key)
    if inputs.visible is not None:
        scores = scores.masked_fill(~inputs.visible, -torch.inf)
    scores = scores.gather(-1, kept.clamp_min(0).expand(*scores.shape[:-1], -1))
    scores = scores.masked_fill(kept < 0, -torch.inf)
    if not kept.shape[-1]:
        return scores
    largest = scores.detach().amax(dim=-1, keepdim=True)
    return renormalised((scores - largest.clamp_min(torch.finfo(scores.dtype).min)).exp())


def check_engine(engine: str | None) -> str | None:
    """The engine given, if it is one of ENGINES or None; ValueError otherwise."""
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; it must be None or one of {', '.join(ENGINES)}")
    return engine


def check_positions(global_positions: Sequence[int]) -> tuple[int, ...]:
    """The positions in order, if all are integers >= 0; ValueError otherwise."""
    for position in global_positions:
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ValueError(f"global position is {position!r}; it must be an integer >= 0")
    return tuple(sorted(set(global_positions)))


def check_positions_exist(global_positions: tuple[int, ...], keys: int) -> None:
    """ValueError if a position lies beyond the last of `keys`."""
    if global_positions and global_positions[-1] >= keys:
        last = global_positions[-1]
        raise ValueError(f"global position is {last}; {keys} keys allow 0 to {keys - 1}")
