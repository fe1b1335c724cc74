"""Computes attention over kept and later keys by PyTorch's fused attention, on a GPU.

No call waits for the device. On a CPU later_token.py is faster.
"""

from functools import cache
from inspect import signature

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from value_aware_attention.decoding.room import Room
from value_aware_attention.kernels import Exponential, Kernel

WASTE = 1 / 5
"""Share of unused slots below which heads of different sizes are padded to the largest"""
SMALLEST_CAPABILITY = (8, 0)
"""Compute capability from which `varlen_attn` runs"""
LARGEST_HEAD = 256
"""Most numbers in a query or key of `varlen_attn`"""


def is_fused(x: Tensor) -> bool:
    """Returns whether attention over this tensor is left to PyTorch's fused attention."""
    return not x.is_cpu


def padded(
    query: Float[Tensor, "B heads N D"],
    key: Float[Tensor, "B H M D"],
    value: Float[Tensor, "B H M V"],
    kernel: Kernel,
    pairs: Bool[Tensor, "B heads N L"] | None,
    bias: Float[Tensor, "B H R"] | None,
) -> Float[Tensor, "B heads N V"] | None:
    """Computes attention over the first keys with their biases and L later ones.

    `pairs` are the visible later keys of each query; None = all. Returns None for another kernel
    than the exponential one.
    """
    if type(kernel) is not Exponential:
        return None
    heads, shape = key.shape[1], query.shape[:3]
    rows, mask = query.unflatten(1, (heads, -1)).flatten(2, 3), None
    if bias is not None or pairs is not None:
        hidden = torch.finfo(query.dtype).min  # of -inf alone fused attention would make NaN
        mask = query.new_zeros(*shape, key.shape[2])
        if bias is not None:
            of_group = bias.clamp_min(hidden).repeat_interleave(shape[1] // heads, dim=1)
            mask[..., : bias.shape[-1]] = of_group[:, :, None]
        if pairs is not None:
            mask[..., -pairs.shape[-1] :].masked_fill_(~pairs, hidden)
        mask = mask.unflatten(1, (heads, -1)).flatten(2, 3)
    inputs = (x.to(value.dtype) for x in (rows, key))
    output = scaled_dot_product_attention(
        *inputs, value, attn_mask=mask, scale=kernel.scale_for(query.shape[-1])
    )
    return output.reshape(*shape, -1)


def of_sequences(
    query: Float[Tensor, "B heads 1 D"], later: int, kernel: Kernel, room: Room | None
) -> Float[Tensor, "B heads 1 V"] | None:
    """Computes attention over the pages and the first `later` later keys of a room, in one call.

    The two places of each cache are two sequences for the same queries, the query heads of its
    group; their outputs are averaged by their sums of weights. Returns None where `varlen_attn`
    does not run, for keys with log-weights, and for several tokens.
    """
    if (
        type(kernel) is not Exponential
        or query.shape[2] > 1
        or room is None
        or room.pages is None
        or room.pages.is_weighted
        or not {query.dtype, room.value.dtype} <= {room.key.dtype}
        or not has_varlen(room.key.device, room.key.dtype, room.key.shape[1], room.value.shape[1])
    ):
        return None
    caches, counts = room.pages.caches, room.pages.spans[1]
    groups = query.shape[:2].numel() // caches
    most = max(room.pages.longest, room.later_key.shape[2])
    places = torch.arange(0, 2 * caches * groups + 1, groups, device=query.device)
    used = torch.cat([counts, counts.new_full((caches,), later)])
    output, log_totals = varlen(
        query.reshape(-1, 1, query.shape[-1]).repeat(2, 1, 1), room.key[:, None],
        room.value[:, None], places.int(), room.bounds, groups, most, used.int(),
        kernel.scale_for(query.shape[-1]),
    )  # fmt: skip
    paged, after = output.float().view(2, caches, groups, -1)
    log_total = log_totals.view(2, caches, groups, 1)
    share = (log_total[0] - log_total[1]).sigmoid() * (counts > 0)[:, None, None]
    return after.lerp(paged, share).to(output.dtype).view(*query.shape[:3], -1)


def varlen(
    query: Float[Tensor, "Q 1 D"],
    key: Float[Tensor, "T 1 D"],
    value: Float[Tensor, "T 1 V"],
    query_bounds: Int[Tensor, " S+1"],
    key_bounds: Int[Tensor, " S+1"],
    most_queries: int,
    most_keys: int,
    used: Int[Tensor, " S"],
    scale: float,
) -> tuple[Float[Tensor, "Q 1 V"], Float[Tensor, " Q"]]:
    """Computes attention of S sequences over their first `used` keys, and log sum exp(score)."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    output, log_totals = varlen_attn(
        query, key, value, query_bounds, key_bounds, most_queries, most_keys,
        return_aux=AuxRequest(lse=True), scale=scale, seqused_k=used,
    )  # fmt: skip
    return output, log_totals.flatten()


@cache
def has_varlen(device: torch.device, dtype: torch.dtype, dim: int, width: int) -> bool:
    """Returns whether `varlen_attn` takes keys of `dim` and values of `width` numbers here."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return (
        torch.cuda.get_device_capability(device) >= SMALLEST_CAPABILITY
        and dim == width <= LARGEST_HEAD
        and dim % 8 == 0
        and {"return_aux", "scale", "seqused_k"} <= _arguments_of_varlen()
    )


def _arguments_of_varlen() -> set[str]:
    """Returns the names of `varlen_attn`'s arguments, which differ between releases of PyTorch."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return set()
    return set(signature(varlen_attn).parameters)
