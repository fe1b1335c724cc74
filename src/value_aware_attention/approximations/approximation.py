"""The interface of every approximation, and of those that keep a few keys per query."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from value_aware_attention.attention import attention_over, attention_weights, visibility
from value_aware_attention.attention import working_precision as _working
from value_aware_attention.error import Sizes, squared_output_error
from value_aware_attention.kernels import Exponential, Kernel

__all__ = [
    "Approximation",
    "Inputs",
    "SparseApproximation",
    "SparseWeights",
    "check_at_least",
    "chunked",
    "numbers_at_once",
    "numbers_within",
    "weighted_sum",
]

_NUMBERS_AT_ONCE: ContextVar[int] = ContextVar("numbers_at_once", default=2**24)
BYTES_A_NUMBER = 64
"""What a method holds at its peak for each number of a block's largest matrix: 16 of fp32."""


FEW_DIGITS = 1e-8
"""An error below this part of the largest ||v||^2 is nearly all rounding in fp32."""


@contextmanager
def chunked(numbers: int) -> Iterator[None]:
    """Within the context the largest matrix of a block of queries holds at most `numbers`.

    2**24 without it, 64 MiB of fp32. What a single query needs is held in any case; outputs and
    inputs are not counted. Smaller blocks change results by rounding alone. Raises ValueError for
    numbers below 1.
    """
    token = _NUMBERS_AT_ONCE.set(check_at_least(1, numbers=numbers))
    try:
        yield
    finally:
        _NUMBERS_AT_ONCE.reset(token)


def numbers_at_once() -> int:
    """What `chunked` allows here."""
    return _NUMBERS_AT_ONCE.get()


def numbers_within(memory_gib: float) -> int:
    """The numbers for `chunked` with which blocks take at most `memory_gib` GiB: 2**24 for each.

    Measured over the methods (`benchmarks/evaluation_memory.py`). Raises ValueError unless
    `memory_gib` is above 0.
    """
    if not memory_gib > 0:
        raise ValueError(f"memory_gib is {memory_gib}; it must be above 0")
    return max(1, int(memory_gib * 2**30) // BYTES_A_NUMBER)


@dataclass(frozen=True)
class Inputs:
    """One attention call, checked, in at least fp32."""

    query: Float[Tensor, "*#batch N D"]
    key: Float[Tensor, "*#batch M D"]
    value: Float[Tensor, "*#batch M V"]
    kernel: Kernel
    visible: Bool[Tensor, "*#batch #N M"] | None
    is_causal: bool

    @property
    def keys(self) -> int:
        """Number of keys M."""
        return self.key.shape[-2]

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading dimensions, broadcast."""
        leading = (x.shape[:-2] for x in (self.query, self.key, self.value))
        return tuple(torch.broadcast_shapes(*leading))

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no key: every output there is is zeros."""
        return 0 in (*self.batch, self.query.shape[-2], self.keys)

    def zeros(self) -> Float[Tensor, "*batch N V"]:
        """The output of queries that see nothing."""
        return self.value.new_zeros(*self.batch, self.query.shape[-2], self.value.shape[-1])

    def weights(self) -> Float[Tensor, "*batch N M"]:
        """The exact attention distribution alpha."""
        return attention_weights(self.query, self.key, kernel=self.kernel, attn_mask=self.visible)

    def output(self) -> Float[Tensor, "*batch N V"]:
        """The exact output o."""
        parts = [
            attention_over(part.query, self.key, self.value, self.kernel, part.visible)
            for part in self.blocks()
        ]
        return torch.cat(parts, dim=-2)

    def centred(self) -> "Inputs":
        """The same with values measured from the mean of those that the first row sees.

        A shift moves no distance, and values far from the origin keep their digits so. The first
        row that sees anything: under a causal mask no value moves an earlier row, not even by
        rounding. Values that no query sees become 0.
        """
        if self.visible is None or 0 in self.visible.shape:
            return replace(self, value=self.value - self.value.mean(dim=-2, keepdim=True))
        visible = self.visible
        first = visible.any(dim=-1, keepdim=True).int().argmax(dim=-2, keepdim=True)
        first = visible.take_along_dim(first, dim=-2).mT
        total = self.value.where(first, 0.0).sum(dim=-2, keepdim=True)
        mean = total / first.sum(dim=-2, keepdim=True).clamp_min(1)
        return replace(self, value=(self.value - mean).where(visible.any(dim=-2)[..., None], 0.0))

    def reach(self) -> Float[Tensor, "*batch N"]:
        """The largest ||v||^2 that each query sees."""
        if self.is_empty:
            return self.value.new_zeros(*self.batch, self.query.shape[-2])
        norms, parts = self.value.square().sum(dim=-1)[..., None, :], []
        for part in self.blocks():
            seen = norms if part.visible is None else norms.where(part.visible, 0.0)
            parts.append(seen.amax(dim=-1).expand(*self.batch, part.query.shape[-2]))
        return torch.cat(parts, dim=-1)

    def in_fp64(self, rows: Bool[Tensor, "*batch N"]) -> Iterator["RowsInFp64"]:
        """Some rows with their outputs in fp64, block by block; with a row, that of every head."""
        if self.is_empty:
            return
        first = 0
        for part in self.blocks():
            here = rows[..., first : first + part.query.shape[-2]]
            which, visible = (
                here.reshape(-1, here.shape[-1]).any(dim=0).nonzero()[:, 0],
                part.visible,
            )
            if visible is not None and visible.shape[-2] > 1:
                visible = visible[..., which, :]
            if len(which):
                alone = replace(part, query=part.query[..., which, :], visible=visible)
                yield RowsInFp64.of(first + which, alone)
            first += here.shape[-1]

    def blocks(self, numbers: int = 0) -> Iterator["Inputs"]:
        """The call in blocks of queries, so that all heads' N x M weights need not be held.

        `numbers`: how many a query needs, where that is more than its M weights.
        """
        heads = torch.Size(self.batch).numel()
        rows = max(1, numbers_at_once() // max(1, heads * max(self.keys, numbers)))
        for first in range(0, max(1, self.query.shape[-2]), rows):
            visible = self.visible
            if visible is not None and visible.shape[-2] > 1:
                visible = visible[..., first : first + rows, :]
            yield replace(self, query=self.query[..., first : first + rows, :], visible=visible)


@dataclass(frozen=True)
class RowsInFp64:
    """K queries; each head's values are measured from the smallest of their outputs."""

    place: Int[Tensor, " K"]
    """Which queries they are."""
    weights: Float[Tensor, "*batch K M"]
    value: Float[Tensor, "*batch M V"]
    output: Float[Tensor, "*batch K V"]
    centre: Float[Tensor, "*batch 1 V"]
    visible: Bool[Tensor, "*#batch #K M"] | None

    @classmethod
    def of(cls, place: Int[Tensor, " K"], rows: Inputs) -> "RowsInFp64":
        """From the same attention weights as everything else; values that no row sees become 0."""
        weights = renormalised(rows.weights().double()).expand(*rows.batch, -1, -1)
        value = rows.value.double()
        if rows.visible is not None:
            value = value.where(rows.visible.any(dim=-2)[..., None], 0.0)
        centre = smallest(weights @ value)
        value = value - centre
        return cls(place, weights, value, weights @ value, centre, rows.visible)

    def error(self, chosen: "SparseWeights") -> Float[Tensor, "*batch K"]:
        """||o - o~||^2 of what was chosen for these rows, its weights summing to 1 in fp64 too."""
        indices, weights = (x[..., self.place, :] for x in (chosen.indices, chosen.weights))
        weights = renormalised(weights.double())
        return squared_output_error(weighted_sum(indices, weights, self.value), self.output)


class Approximation(nn.Module, ABC):
    """Something that can stand in for exact attention: same inputs, an output of the same shape."""

    supports_causal: bool = True
    """False: the choice of keys would depend on later positions, so a causal mask is refused."""

    needs_shared_keys: bool = False
    """True: a mask must hide the same keys from every query (padding), shape (..., 1, keys)."""

    kernels: tuple[type, ...] = ()
    """The kernels it can approximate; empty = every kernel."""

    differentiable_weights: bool = True
    """False: its weights are searched for or drawn, so only `value` is given a gradient."""

    def forward(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),  # noqa: B008
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*batch N V"]:
        """The approximate output, in the dtype of `value`; fully masked rows give zeros.

        Raises ValueError for NaN and infinity in a query, or in a key or value that one sees, where
        looking for them is free: on the CPU, outside of training, torch.compile and torch.func.
        Elsewhere they give NaN. Methods that choose keys by their numbers always raise it.
        """
        inputs = self.inputs(query, key, value, kernel, attn_mask, is_causal)
        if inputs.is_empty:
            return inputs.zeros().to(value.dtype)
        with torch.autocast(value.device.type, enabled=False):
            return self.approximate(inputs).to(value.dtype)

    def inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Inputs:
        """The call, checked against what this method supports."""
        name = type(self).__name__
        visible = visibility(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
        if is_causal and not self.supports_causal:
            raise ValueError(f"{name} does not support is_causal: its choice of keys would leak")
        if self.needs_shared_keys and visible is not None and visible.shape[-2] != 1:
            raise ValueError(
                f"{name} got an attn_mask of shape {tuple(visible.shape)}; it supports key "
                f"padding only, shape (..., 1, keys)"
            )
        if self.kernels and not isinstance(kernel, self.kernels):
            allowed = ", ".join(kernel.__name__ for kernel in self.kernels)
            raise ValueError(f"{name} got the kernel {kernel}; it approximates {allowed}")
        if visible is not None:
            visible = visible.expand(*visible.shape[:-1], key.shape[-2])
        self.check_finite(query, key, value, visible)
        return Inputs(_working(query), _working(key), _working(value), kernel, visible, is_causal)

    def check_finite(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None
    ) -> None:
        """ValueError for NaN and infinity that a query sees, where looking is free; see forward."""
        tensors = query, key, value
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if not traced and not trained and all(x.is_cpu for x in tensors):
            _refuse_non_finite(*tensors, visible)

    @abstractmethod
    def approximate(self, inputs: Inputs) -> Float[Tensor, "*batch N V"]:
        """The approximate output; called with at least one query and one key."""

    @abstractmethod
    def multiply_adds(self, sizes: Sizes) -> float:
        """Multiply-adds per query; see `error.budget`."""


@dataclass(frozen=True)
class SparseWeights:
    """At most R keys per query with their weights: a point of C_r (section 3)."""

    indices: Int[Tensor, "*batch N R"]
    """Keys, each in range; an unused slot has weight 0."""
    weights: Float[Tensor, "*batch N R"]
    """>= 0, summing to 1, or to 0 where every key is masked."""
    error: Float[Tensor, "*batch N"]
    """||o - o~||^2, recomputed from indices and weights."""
    optimal: Bool[Tensor, "*batch N"] | None = None
    """Where the choice is proved optimal; None for methods that do not claim it."""

    def dense(self, keys: int) -> Float[Tensor, "*batch N M"]:
        """The weights on every key, zero where not kept."""
        return dense_weights(self.indices, self.weights, keys)

    def support(self) -> Int[Tensor, "*batch N"]:
        """Number of keys with a positive weight, per query."""
        return (self.weights > 0).sum(dim=-1)


def dense_weights(indices: Tensor, weights: Tensor, keys: int) -> Tensor:
    """Scatters kept weights onto all keys; a key named twice gets the sum."""
    zeros = weights.new_zeros(*weights.shape[:-1], keys)
    return zeros.scatter_add(-1, indices, weights)


def weighted_sum(
    indices: Int[Tensor, "*batch N R"],
    weights: Float[Tensor, "*batch N R"],
    value: Float[Tensor, "*#batch M V"],
) -> Float[Tensor, "*batch N V"]:
    """sum_r weights_r value[indices_r], reading only the keys kept where they are few."""
    keys, width = value.shape[-2:]
    if 8 * indices.shape[-1] > keys or indices.numel() == 0:
        return dense_weights(indices, weights, keys) @ value
    batch = indices.shape[:-2]
    every = value.expand(*batch, keys, width).reshape(-1, width)
    first = torch.arange(0, len(every), keys, device=value.device).view(*batch, 1, 1)
    bags = (indices + first).flatten(0, -2), every
    output = embedding_bag(*bags, per_sample_weights=weights.flatten(0, -2), mode="sum")
    return output.unflatten(0, indices.shape[:-1])


class SparseApproximation(Approximation):
    """An approximation that keeps at most `r` keys per query."""

    queries_alone: bool = True
    """False: what a query keeps depends on its place among the queries."""

    solves_for_weights: bool = False
    """True: weights come from a solver, so an evaluation keeps its largest support and error."""

    def __init__(self, r: int) -> None:
        super().__init__()
        self.r = check_at_least(1, r=r)

    def check_finite(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None
    ) -> None:
        """Always, hidden ones too: a choice among keys that are not numbers would mean nothing."""
        _refuse_non_finite(query, key, value, None)

    def select(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        *,
        kernel: Kernel = Exponential(),  # noqa: B008
        attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
        is_causal: bool = False,
    ) -> SparseWeights:
        """The keys kept for each query, their weights, and the output error they leave."""
        inputs = self.inputs(query, key, value, kernel, attn_mask, is_causal)
        with torch.autocast(value.device.type, enabled=False):
            indices, weights = self.choose_all(inputs)
            centred = inputs.centred()
            output = weighted_sum(indices, weights, centred.value)
            error = squared_output_error(output, centred.output())
            small = error <= FEW_DIGITS * centred.reach()
            chosen = SparseWeights(indices, weights, error)
            return self.checked(inputs, chosen, small)

    def approximate(self, inputs: Inputs) -> Float[Tensor, "*batch N V"]:
        # Block by block to the output: all keys kept, with their indices, may be N x M numbers.
        outputs = [
            weighted_sum(*self.choose(block), inputs.value) for block in self._blocks(inputs)
        ]
        return torch.cat(outputs, dim=-2)

    def choose_all(
        self, inputs: Inputs
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        """`choose`, block by block where each query can be answered alone."""
        if inputs.is_empty:
            shape = (*inputs.batch, inputs.query.shape[-2], min(self.r, inputs.keys))
            return inputs.query.new_zeros(shape, dtype=torch.long), inputs.value.new_zeros(shape)
        parts = zip(*[self.choose(block) for block in self._blocks(inputs)], strict=True)
        indices, weights = (torch.cat(part, dim=-2) for part in parts)
        return indices, weights

    def _blocks(self, inputs: Inputs) -> Iterable[Inputs]:
        return inputs.blocks(self.numbers_a_query(inputs)) if self.queries_alone else [inputs]

    def numbers_a_query(self, inputs: Inputs) -> int:
        """How many numbers the choice of one query's keys needs, where more than its weights."""
        return 0

    @abstractmethod
    def choose(
        self, inputs: Inputs
    ) -> tuple[Int[Tensor, "*batch N R"], Float[Tensor, "*batch N R"]]:
        """Indices and weights of the keys kept; more than M slots are never returned."""

    @torch.no_grad()
    def checked(
        self, inputs: Inputs, chosen: SparseWeights, small: Bool[Tensor, "*batch N"]
    ) -> SparseWeights:
        """The same with small errors, nearly all rounding in fp32, recomputed in fp64."""
        for rows in inputs.in_fp64(small) if chosen.error.dtype == torch.float32 else ():
            before = chosen.error[..., rows.place]
            error = rows.error(chosen).float().where(small[..., rows.place], before)
            chosen.error[..., rows.place] = error
        return chosen

    def multiply_adds(self, sizes: Sizes) -> float:
        return sizes.kept(self.r) * sizes.one_key

    def extra_repr(self) -> str:
        return f"r={self.r}"


def _refuse_non_finite(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> None:
    """ValueError for NaN and infinity in visible keys and values, and in queries that see any."""
    given = {"query": query, "key": key, "value": value}
    # Sums are several times faster, and where they are finite everything is.
    if torch.stack([x.sum().float() for x in given.values()]).isfinite().all():
        return
    if visible is not None:
        seen = visible.any(dim=-2).unsqueeze(-1)
        seeing = visible.any(dim=-1, keepdim=True)
        shown = {"query": seeing, "key": seen, "value": seen}
        given = {name: x.where(shown[name], 0.0) for name, x in given.items()}
    for name, x in given.items():
        if not x.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity; it must be finite")


def check_at_least(minimum: int, **arguments: int) -> int:
    """The one argument given, if it is an integer >= `minimum`; ValueError otherwise."""
    ((name, given),) = arguments.items()
    if isinstance(given, bool) or not isinstance(given, int) or given < minimum:
        raise ValueError(f"{name} is {given!r}; it must be an integer >= {minimum}")
    return given


def smallest(vectors: Float[Tensor, "*batch N V"]) -> Float[Tensor, "*batch 1 V"]:
    """The vector of least norm: of a few outputs, one that no value far away has moved far."""
    return vectors.take_along_dim(vectors.norm(dim=-1, keepdim=True).argmin(-2, keepdim=True), -2)


def renormalised(weights: Float[Tensor, "*batch N R"]) -> Float[Tensor, "*batch N R"]:
    """Weights divided by their sum; rows that sum to 0 stay 0."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.clamp_min(torch.finfo(weights.dtype).tiny)
