"""Computes attention over kept and later keys by PyTorch's fused attention, on a GPU.

No call waits for the device. On a CPU later_token.py is faster.
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from value_aware_attention.decoding.pages import Room
from value_aware_attention.kernels import Exponential, Kernel

LARGEST_DISTANCE = 0.05  # of a first output of varlen_attn, relative to the length of the exact one
WASTE = 1 / 5  # share of unused slots below which heads are padded to the largest


_TRUSTED: dict[torch.device, bool] = {}


def trusted(
    device: torch.device, compute: Callable[[], Tensor | None], reference: Callable[[], Tensor]
) -> Tensor | None:
    """Returns the result of `compute`, unless its first result on a device was wrong.

    It then warns once, and returns None from then on. Half precision may differ by 5%.
    """
    if not _TRUSTED.get(device, True):
        return None
    try:
        output = compute()
        if output is None or device in _TRUSTED:
            return output
        expected = reference().float()
        distance = (output.float() - expected).norm() / expected.norm()
        problem = "" if distance <= LARGEST_DISTANCE else f"off by {float(distance):.2g}"
    except (RuntimeError, NotImplementedError) as error:
        problem = str(error).splitlines()[0]
    _TRUSTED[device] = not problem
    if problem:
        warnings.warn(
            f"varlen_attn does not run as it should on {device} ({problem}); later tokens are "
            f"read by pages",
            stacklevel=2,
        )
    return None if problem else output


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
    than the exponential one and for mixed precisions.
    """
    if type(kernel) is not Exponential or not query.dtype == key.dtype == value.dtype:
        return None
    heads, shape = key.shape[1], query.shape[:3]
    rows, mask = query.unflatten(1, (heads, -1)).flatten(2, 3), None
    if bias is not None or pairs is not None:
        hidden = torch.finfo(query.dtype).min  # fused attention gives NaN for a row of -inf
        mask = query.new_zeros(*shape, key.shape[2])
        if bias is not None:
            of_group = bias.clamp_min(hidden).repeat_interleave(shape[1] // heads, dim=1)
            mask[..., : bias.shape[-1]] = of_group[:, :, None]
        if pairs is not None:
            mask[..., -pairs.shape[-1] :].masked_fill_(~pairs, hidden)
        mask = mask.unflatten(1, (heads, -1)).flatten(2, 3)
    return scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, scale=kernel.scale_for(query.shape[-1])
    ).reshape(*shape, -1)


def of_sequences(
    query: Float[Tensor, "B heads 1 D"], later: int, kernel: Kernel, room: Room | None
) -> Float[Tensor, "B heads 1 V"] | None:
    """Computes attention over the pages and the first `later` later keys of a room, in one call.

    The pages and the later keys of each cache are two sequences for the same queries, the query
    heads of its group. Their outputs are averaged by their sums of weights. Returns None where
    `varlen_attn` does not run, for keys with log-weights, and for several tokens.
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
    places = torch.arange(0, 2 * caches * groups + 1, groups, device=query.device)
    used = torch.cat([counts, counts.new_full((caches,), later)])
    output, log_totals = varlen.varlen_attn(
        query.reshape(-1, 1, query.shape[-1]).repeat(2, 1, 1), room.key[:, None],
        room.value[:, None], places.int(), room.bounds, groups,
        max(room.pages.slots, room.later_key.shape[2]), seqused_k=used.int(),
        return_aux=varlen.AuxRequest(lse=True), scale=kernel.scale_for(query.shape[-1]),
    )  # fmt: skip
    paged, after = output.float().view(2, caches, groups, -1)
    log_total = log_totals.view(2, caches, groups, 1)
    share = (log_total[0] - log_total[1]).sigmoid() * (counts > 0)[:, None, None]
    return after.lerp(paged, share).to(output.dtype).view(*query.shape[:3], -1)


@cache
def has_varlen(device: torch.device, dtype: torch.dtype, dim: int, width: int) -> bool:
    """Returns whether `varlen_attn` takes keys of `dim` and values of `width` numbers here."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dim == width <= 256
        and dim % 8 == 0
    )
