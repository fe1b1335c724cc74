"""Defines approximations: their interface, exact attention, and sparse ones of few keys a query."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from value_aware_attention.approximations.sparse_weights import (
    SparseWeights,
    combination,
    rows_in_fp64,
)
from value_aware_attention.arguments import arguments_shown, check_at_least
from value_aware_attention.attention import attention
from value_aware_attention.call import Call, refuse
from value_aware_attention.error import Sizes, squared_output_error
from value_aware_attention.kernels import Exponential, Kernel

FEW_DIGITS = 1e-8
"""Errors below this fraction of the largest ||v||^2 are nearly all rounding in fp32"""


class Approximation(nn.Module, ABC):
    """Approximates exact attention; inputs and output shape are those of `attention`.

    Attributes:
        supports_causal: Whether causal masks are supported; False if the choice of keys would
            depend on later positions.
        needs_shared_keys: Whether a mask must hide the same keys from every query (padding), shape
            (..., 1, keys).
        kernels: The supported kernels; empty = all kernels.
        queries_alone: Whether a query's output is independent of the other queries and of its index
            among them.
        differentiable_weights: False if weights are searched for or drawn; only `value` then gets a
            gradient.
    """

    supports_causal: bool = True
    needs_shared_keys: bool = False
    kernels: tuple[type, ...] = ()
    queries_alone: bool = False
    differentiable_weights: bool = True

    def forward(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch N V"]:
        """Returns the approximate output in the dtype of `value`; fully masked rows give zeros.

        Raises ValueError for NaN and infinity in queries and in visible keys and values if the
        check is free: on the CPU, outside training, torch.compile and torch.func. Otherwise they
        give NaN. Methods that choose keys by their content always raise it.
        """
        call = self.check(
            Call.of(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
        )
        if call.is_empty:
            return call.zeros().to(value.dtype)
        with torch.autocast(value.device.type, enabled=False):
            return self.approximate(call).to(value.dtype)

    def check(self, call: Call) -> Call:
        """Returns the call if this method supports it; ValueError otherwise."""
        name, mask = type(self).__name__, call.attn_mask
        if call.is_causal and not self.supports_causal:
            raise ValueError(f"{name} does not support is_causal: its choice of keys would leak")
        if self.needs_shared_keys and mask is not None and mask.shape[-2] != 1:
            raise ValueError(
                f"{name} got an attn_mask of shape {tuple(mask.shape)}; it supports key "
                f"padding only, shape (..., 1, keys)"
            )
        if self.kernels and not isinstance(call.kernel, self.kernels):
            allowed = ", ".join(kernel.__name__ for kernel in self.kernels)
            raise ValueError(f"{name} got the kernel {call.kernel}; it approximates {allowed}")
        self.check_finite(call)
        return call

    def check_finite(self, call: Call) -> None:
        """Raises ValueError for visible NaN and infinity where the check is free; see forward."""
        tensors = call.query, call.key, call.value
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if not traced and not trained and all(x.is_cpu for x in tensors):
            refuse_non_finite(call, call.attn_mask)

    @abstractmethod
    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        """Computes the approximate output of a call with at least one query and one key."""

    @abstractmethod
    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts the multiply-adds per query; see `error.budget`."""

    def extra_repr(self) -> str:
        """Lists the constructor's arguments; records of a method are looked up by this text."""
        return arguments_shown(self)


class Exact(Approximation):
    """Computes Eq. 1 with all keys, the baseline of every table."""

    def forward(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch N V"]:
        """Calls `attention`, which chooses its own precision and fused code."""
        return attention(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        return call.output()

    def multiply_adds(self, sizes: Sizes) -> float:
        return sizes.kept(sizes.keys) * sizes.one_key


class FewKeys(Approximation):
    """Reads at most `r` keys per query, chosen by their content."""

    queries_alone = True

    def __init__(self, r: int) -> None:
        super().__init__()
        self.r = check_at_least(1, r=r)

    def check_finite(self, call: Call) -> None:
        """Checks hidden keys too: a ranking of NaN scores has no meaning."""
        refuse_non_finite(call, None)

    def multiply_adds(self, sizes: Sizes) -> float:
        return sizes.kept(self.r) * sizes.one_key


class SparseApproximation(FewKeys):
    """Keeps at most `r` keys per query.

    Attributes:
        solves_for_weights: Whether weights come from a solver; evaluations then record its largest
            support and error.
        mean: Whether the mean of the visible values may take the place of a key.
    """

    solves_for_weights: bool = False
    mean: bool = False

    def select(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
    ) -> SparseWeights:
        """Returns the keys kept per query, their weights, and the output error."""
        call = self.check(
            Call.of(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
        )
        with torch.autocast(value.device.type, enabled=False):
            indices, weights = self.choose_all(call)
            visible = call.visible if weights.shape[-1] > indices.shape[-1] else None
            output = combination(indices, weights, call.centred.value, visible)
            error = squared_output_error(output, call.centred.output())
            small = error <= FEW_DIGITS * call.centred.largest_squared_norm()
            # If all keys of a pattern are masked, o~ = 0 in the original, uncentred values.
            if (nothing := weights.sum(dim=-1) == 0).any():
                error = call.seen.output().square().sum(dim=-1).where(nothing, error)
                small = small & ~(nothing & (error > 0))
            return self.recomputed(call, SparseWeights.of(indices, weights, error, visible), small)

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        # Block by block up to the output: the indices of all kept keys may be N x M numbers.
        return torch.cat(
            [
                combination(*self.choose(block), call.value, block.visible)
                for block in call.blocks(self.elements_per_query(call))
            ],
            -2,
        )

    def choose_all(
        self, call: Call
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N W"]]:
        """Runs `choose` block by block and concatenates the blocks."""
        if call.is_empty:
            shape = (*call.batch, call.query.shape[-2], min(self.r, call.keys))
            weights = call.value.new_zeros(*shape[:-1], shape[-1] + self.mean)
            return call.query.new_zeros(shape, dtype=torch.long), weights
        indices, weights = (
            torch.cat(x, dim=-2)
            for x in zip(*map(self.choose, call.blocks(self.elements_per_query(call))), strict=True)
        )
        return indices, weights

    def elements_per_query(self, call: Call) -> int:
        """Counts the elements held while choosing the keys of one query; 0 = its M weights."""
        return 0

    @abstractmethod
    def choose(self, call: Call) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N W"]]:
        """Returns the indices and weights of the kept keys, in at most M slots.

        A method that may use the mean adds a column to the weights, for the mean's.
        """

    @torch.no_grad()
    def recomputed(
        self, call: Call, chosen: SparseWeights, small: Bool[Tensor, "*batch N"]
    ) -> SparseWeights:
        """Recomputes small errors in fp64; in fp32 they are nearly all rounding."""
        for rows in rows_in_fp64(call, small) if chosen.error.dtype == torch.float32 else ():
            before = chosen.error[..., rows.place]
            chosen.error[..., rows.place] = (
                rows.error(chosen).float().where(small[..., rows.place], before)
            )
        return chosen


def refuse_non_finite(call: Call, visible: Bool[Tensor, "*#batch #N #M"] | None) -> None:
    """Raises ValueError for NaN or infinity in visible keys and values and in queries that see."""
    tensors = [call.query, call.key, call.value]
    is_bad = _are_non_finite(tensors)
    if visible is not None and is_bad.any():
        of_keys = visible.any(dim=-2).unsqueeze(-1)
        masks = visible.any(dim=-1, keepdim=True), of_keys, of_keys
        is_bad = _are_non_finite([x.where(m, 0.0) for x, m in zip(tensors, masks, strict=True)])
    place = "" if call.layer.number is None else f" of layer {call.layer.number}"

    def message() -> str:
        name = ("query", "key", "value")[is_bad.tolist().index(True) // 2]
        return f"{name}{place} holds NaN or infinity; it must be finite"

    refuse(is_bad.any(), message)


def _are_non_finite(tensors: Sequence[Tensor]) -> Bool[Tensor, " T"]:
    """Returns whether the smallest and largest number of each tensor are NaN or infinite."""
    pairs = [x.aminmax() if x.numel() else x.new_zeros(2).unbind() for x in tensors]
    bounds = torch.stack([bound for pair in pairs for bound in pair])
    return bounds - bounds != 0
