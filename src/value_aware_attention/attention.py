"""Computes exact kernel attention (Eq. 1), the reference for every approximation.

Glossary of dimension letters, used in every shape of the library:
    batch  any leading dimensions (batch, heads), broadcast    N  queries    M  keys
    D      head_dim, numbers in a query or key                 V  value_dim, numbers in a value
    R      keys kept per query                                 F  random features
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from value_aware_attention.arguments import check_tensors, described
from value_aware_attention.kernels import Exponential, Kernel, check_kernel


def kernel_weights(
    query: Float[Tensor, "*#batch N D"],
    key: Float[Tensor, "*#batch M D"],
    kernel: Kernel,
    visible: Bool[Tensor, "*#batch #N #M"] | None,
) -> Float[Tensor, "*batch N M"]:
    """Computes alpha_i = kappa(q, k_i) / sum_j kappa(q, k_j) over the visible pairs."""
    return masked_softmax(kernel.log_similarity(query, key), visible)


def masked_softmax(
    scores: Float[Tensor, "*#batch #N M"], visible: Bool[Tensor, "*#batch #N #M"] | None
) -> Float[Tensor, "*batch N M"]:
    """Computes exp(score) / sum exp(score) over the visible pairs (None = all), 0 elsewhere."""
    if visible is None:
        return scores.softmax(dim=-1)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return weights.masked_fill(~visible, 0.0)  # a fully masked row's softmax is NaN


def attention(
    query: Float[Tensor, "*#batch N D"],
    key: Float[Tensor, "*#batch M D"],
    value: Float[Tensor, "*#batch M V"],
    *,
    kernel: Kernel = Exponential(),
    attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "*batch N V"]:
    """Computes sum_i kappa(q, k_i) v_i / sum_i kappa(q, k_i), Eq. 1 of the paper.

    `attn_mask` is True where a query may attend; a row without any visible key gives zeros. bf16
    and fp16 inputs are accumulated in fp32, also under autocast. Inputs of different precisions are
    promoted to the largest. Raises ValueError for shapes that do not fit and for arguments that are
    not floating-point tensors. Inputs are not checked for NaN. NaN in a query makes its output NaN.
    NaN in a key or value reaches every query that sees it, and some that do not, because 0 NaN is
    NaN. An infinite score has the same effect.

    The exponential kernel is computed by PyTorch's fused attention, on every device. The other two
    hold the N x M weights: batch x heads x N x M x 4 bytes in fp32, several times over with
    gradients.
    """
    check_inputs(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
    if isinstance(kernel, Exponential) and attn_mask is None:
        return _fused(query, key, value, kernel, is_causal=is_causal)
    return attention_over(query, key, value, kernel, _visible(query, key, attn_mask, is_causal))


def attention_weights(
    query: Float[Tensor, "*#batch N D"],
    key: Float[Tensor, "*#batch M D"],
    *,
    kernel: Kernel = Exponential(),
    attn_mask: Bool[Tensor, "*#batch #N #M"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "*batch N M"]:
    """Computes alpha_i = kappa(q, k_i) / sum_j kappa(q, k_j) in fp32 or fp64; 0 in masked rows."""
    check_inputs(query, key, key, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
    return weights_over(query, key, kernel, _visible(query, key, attn_mask, is_causal))


def attention_over(
    query: Float[Tensor, "*#batch N D"],
    key: Float[Tensor, "*#batch M D"],
    value: Float[Tensor, "*#batch M V"],
    kernel: Kernel,
    visible: Bool[Tensor, "*#batch #N #M"] | None,
) -> Float[Tensor, "*batch N V"]:
    """Computes `attention` of inputs that are known to fit, by the fastest way for the kernel."""
    if isinstance(kernel, Exponential):
        return _fused(query, key, value, kernel, visible)
    with without_autocast(value):
        query, key, values = map(working_precision, promoted(query, key, value))
        return (kernel_weights(query, key, kernel, visible) @ values).to(value.dtype)


def weights_over(
    query: Float[Tensor, "*#batch N D"],
    key: Float[Tensor, "*#batch M D"],
    kernel: Kernel,
    visible: Bool[Tensor, "*#batch #N #M"] | None,
) -> Float[Tensor, "*batch N M"]:
    """Computes `attention_weights` of inputs that are known to fit."""
    with without_autocast(query):
        query, key = map(working_precision, promoted(query, key))
        return kernel_weights(query, key, kernel, visible)


MASKED_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Backends for calls with a mask. cuDNN is left out: its releases differ in fully masked rows."""
VECTOR = 16
"""Largest vector width of a CPU; calls with fewer keys get the mask of `_all_visible`."""


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Exponential,
    visible: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Calls PyTorch's fused attention on four dimensions; it never holds the weights."""
    if visible is None and query.is_cpu and key.shape[-2] < VECTOR:
        visible = _all_visible(query, key, is_causal)
    tensors = [*promoted(query, key, value), *([] if visible is None else [visible])]
    missing = max(0, 4 - max(x.ndim for x in tensors))
    q, k, v, *mask = (x[(None,) * max(0, 4 - x.ndim)] for x in tensors)
    if 0 in (*q.shape, *k.shape):  # torch does not broadcast the batch of an empty call
        q = q.expand(*torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v))), -1, -1)
    options = {"attn_mask": mask[0]} if mask else {"is_causal": is_causal}
    backends = sdpa_kernel(MASKED_BACKENDS) if mask and query.is_cuda else nullcontext()
    with backends, without_autocast(value):
        output = scaled_dot_product_attention(
            q, k, v, scale=kernel.scale_for(query.shape[-1]), **options
        )
    return output[(0,) * missing].to(value.dtype)


def _all_visible(query: Tensor, key: Tensor, is_causal: bool) -> Bool[Tensor, "#N M"]:
    """Returns an all-true or causal mask, which keeps NaN as NaN and changes no other output.

    Without a mask, torch's CPU kernel returns zeros for a row of NaN scores if the row has fewer
    scores than a vector holds.
    """
    rows = query.shape[-2] if is_causal else 1
    visible = torch.ones(rows, key.shape[-2], dtype=torch.bool)
    return visible.tril() if is_causal else visible


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Disables autocast, which would compute products of fp32 factors in bf16."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def working_precision(x: Tensor) -> Tensor:
    """Converts x to at least fp32, the precision of every sum in the library."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def promoted(*tensors: Tensor) -> list[Tensor]:
    """Converts tensors to the precision that holds them all."""
    dtype = reduce(torch.promote_types, {x.dtype for x in tensors})
    return [x.to(dtype) for x in tensors]


def in_chunks(x: Shaped[Tensor, "*batch L W"], chunk: int) -> Shaped[Tensor, "*batch chunks K W"]:
    """Cuts positions into chunks, at least one; zeros, later than all positions, fill the last."""
    length = x.shape[-2]
    chunks = max(1, -(-length // chunk))
    missing = chunks * chunk - length
    filled = pad(x, (0, 0, 0, missing)) if missing else x
    return filled.unflatten(-2, (chunks, chunk))


def visibility(
    attn_mask: Bool[Tensor, "*batch #N #M"] | None,
    is_causal: bool,
    rows: Int[Tensor, "*#batch N"],
    keys: int,
) -> Bool[Tensor, "*batch #N #M"] | None:
    """Combines `attn_mask` and `is_causal` into the visible pairs; None = all.

    `rows` are the positions of the queries; `is_causal` compares them with those of the keys.
    """
    if not is_causal:
        return attn_mask
    causal = torch.arange(keys, device=rows.device) <= rows[..., None]
    return causal if attn_mask is None else causal & attn_mask


def _visible(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> Bool[Tensor, "*batch #N #M"] | None:
    """Returns the visible pairs of a whole call; its mask may cover keys alone."""
    mask = None if attn_mask is None else torch.atleast_2d(attn_mask)
    rows = torch.arange(query.shape[-2], device=query.device)
    return visibility(mask, is_causal, rows, key.shape[-2])


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Raises ValueError, naming the argument, unless the arguments make one attention call."""
    check_tensors(query=query, key=key, value=value)
    check_kernel(kernel)
    leading = _check_shapes(query, key, value)
    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal is {described(is_causal)}; it must be True or False")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}: is_causal needs as many queries "
            f"as keys; pass attn_mask instead"
        )
    if attn_mask is not None:
        _check_mask(attn_mask, (*leading, query.shape[-2], key.shape[-2]))


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Returns the leading dimensions, broadcast; ValueError where the shapes do not fit."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(f"{shapes}: each must have at least 2 dimensions, (..., length, width)")
    (keys, head_dim), (values, value_dim) = key.shape[-2:], value.shape[-2:]
    for holds, rule in (
        (query.shape[-1] == head_dim, "query and key must have the same last dimension (head_dim)"),
        (0 not in (query.shape[-1], value_dim), "the last dimension must be at least 1"),
        (keys == values, "key and value must have the same number of keys"),
    ):
        if not holds:
            raise ValueError(f"{shapes}: {rule}")
    try:
        return torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except RuntimeError:
        raise ValueError(f"{shapes}: the leading dimensions must broadcast together") from None


def _check_mask(attn_mask: Tensor, shape: tuple[int, ...]) -> None:
    kind = attn_mask.dtype if isinstance(attn_mask, Tensor) else described(attn_mask)
    if kind != torch.bool:
        raise ValueError(f"attn_mask is {kind}; it must be torch.bool, True = visible")
    try:
        fits = torch.broadcast_shapes(attn_mask.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {shape}"
        )


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Holds sum_j kappa_j v_j and sum_j kappa_j of each query, both divided by exp(log_scale).

    Attributes:
        log_scale: Largest log-similarity of a visible key; -inf if no key is visible.
    """

    values: Float[Tensor, "*#batch N V"]
    total: Float[Tensor, "*#batch N 1"]
    log_scale: Float[Tensor, "*#batch #N 1"]

    def merge(self, other: "AttentionState") -> "AttentionState":
        """Returns the state over the keys of both states."""
        log_scale = torch.maximum(self.log_scale, other.log_scale)
        mine, others = ((x.log_scale - finite(log_scale)).exp() for x in (self, other))
        return AttentionState(
            mine * self.values + others * other.values,
            mine * self.total + others * other.total,
            log_scale,
        )

    def rearranged(self, function: Callable[[Tensor], Tensor]) -> "AttentionState":
        """Rearranges the queries of the state by applying `function` to each tensor."""
        return AttentionState(*map(function, (self.values, self.total, self.log_scale)))

    def output(self, smallest_total: float = 0.0) -> Float[Tensor, "*batch N V"]:
        """Returns the weighted mean of the values; zeros where no key is visible.

        The total may be negative; its magnitude is taken as at least `smallest_total`.
        """
        size = self.total.abs().clamp_min(smallest_total)
        total = size.where(size > 0, 1.0)
        return self.values / total.where(self.total >= 0, -total)


def attention_state(
    scores: Float[Tensor, "*#batch N M"],
    value: Float[Tensor, "*#batch M V"],
    visible: Bool[Tensor, "*#batch #N M"] | None = None,
    factor: Float[Tensor, "*#batch N M"] | None = None,
) -> AttentionState:
    """Computes the state over the visible keys (None = all), kappa = factor exp(score)."""
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    log_scale = scores.detach().amax(dim=-1, keepdim=True)
    weights = (scores - finite(log_scale)).exp()
    weights = weights if factor is None else weights * factor
    return AttentionState(weights @ value, weights.sum(dim=-1, keepdim=True), log_scale)


def finite(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Replaces -inf, the logarithm of 0, by 0."""
    return x.where(x > -torch.inf, 0.0)
