"""Computes causal attention of the elu and polynomial kernels without their N x M weights.

Training on a GPU spends much of its time and memory on these weights. Both forms equal `attention`
but for rounding, and have gradients.

The elu kernel is linear attention, <Phi(q), Phi(k)>. The sequence is cut into chunks. Pairs within
a chunk are multiplied directly; sums of Phi(k) v and of Phi(k) stand for all earlier chunks
(Katharopoulos et al., 2020, section 3.3).

The polynomial kernel is PyTorch's `flex_attention` with the log-similarity as its score. It is
linear attention too, but a square has head_dim (head_dim + 1) / 2 features. These are 2,080
features at head_dim 64; fewer than 2,080 keys are less work directly.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad, relu

from value_aware_attention.approximations.approximation import Exact
from value_aware_attention.attention import check_inputs, in_chunks, promoted, working_precision
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial

CHUNK = 64
"""Positions of a chunk of `elu_in_chunks`"""
FLEX_WIDTH = 16
"""Smallest head_dim and value_dim that a compiled `flex_attention` takes"""


class LinearMemory(Exact):
    """Computes Eq. 1 with all keys, in memory linear in the length for causal calls on a GPU.

    This holds for the elu kernel, and for the polynomial kernel in fp32 and bf16 within
    torch.compile. `attention` computes the exponential kernel, for which it has fused code, and all
    other calls: on a CPU, with `attn_mask`, or without `is_causal`.
    """

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
        """Returns the output of `attention`, and raises its ValueErrors."""
        tensors = (query, key, value)
        options: dict[str, Any] = {"kernel": kernel, "attn_mask": attn_mask, "is_causal": is_causal}
        check_inputs(*tensors, **options)
        if query.is_cuda and is_causal and attn_mask is None:
            if isinstance(kernel, Elu):
                return elu_in_chunks(*tensors, kernel)
            if isinstance(kernel, Polynomial) and _fits_flex(*tensors):
                return polynomial_by_flex(*tensors, kernel)
        return super().forward(*tensors, **options)


def with_linear_memory(model: nn.Module) -> nn.Module:
    """Gives `LinearMemory` to the layers of a model that attend with `Exact`; returns the model.

    Weights, their names and what `save_pretrained` writes stay as they are.
    """
    for module in model.modules():
        if type(getattr(module, "approximation", None)) is Exact:
            module.approximation = LinearMemory()
    return model


def elu_in_chunks(
    query: Float[Tensor, "*#batch L D"],
    key: Float[Tensor, "*#batch L D"],
    value: Float[Tensor, "*#batch L V"],
    kernel: Elu,
    *,
    chunk: int = CHUNK,
) -> Float[Tensor, "*batch L V"]:
    """Computes causal attention with the elu kernel in O(L) time and memory.

    Products of bf16 inputs are rounded to bf16, as those of fused attention are. Products of fp16
    inputs are in fp32, and so are sums over chunks and normalisers.
    """
    with torch.autocast(value.device.type, enabled=False):
        q, k, v = (in_chunks(x, chunk) for x in promoted(query, key, value))
        work = working_precision
        precision = q.dtype if q.dtype == torch.bfloat16 else work(q).dtype
        q, k = _relative_features(work(q)), kernel.features(work(k))
        # Features that vanish become the smallest that keep their digits: no row divides by 0.
        k = k.clamp_min(torch.finfo(precision).tiny / torch.finfo(precision).eps)
        q, k, v = (x.to(precision) for x in (q, k, v))
        weights = (q @ k.mT).tril()
        earlier = _sums_before(work(k.mT @ v)).to(precision)
        output = work(weights @ v) + work(q @ earlier)
        totals = work(q) * _sums_before(work(k).sum(dim=-2, keepdim=True))
        total = work(weights).sum(dim=-1, keepdim=True) + totals.sum(dim=-1, keepdim=True)
        return (output / total).flatten(-3, -2)[..., : query.shape[-2], :].to(value.dtype)


def polynomial_by_flex(
    query: Float[Tensor, "batch heads L D"],
    key: Float[Tensor, "batch heads L D"],
    value: Float[Tensor, "batch heads L V"],
    kernel: Polynomial,
) -> Float[Tensor, "batch heads L V"]:
    """Computes causal attention with the polynomial kernel by `flex_attention`.

    Outside torch.compile `flex_attention` holds the L x L weights.
    """

    def log_similarity(score: Tensor, *_: Tensor) -> Tensor:
        # as in `Polynomial.log_similarity`
        return kernel.degree * score.abs().clamp_min(torch.finfo(score.dtype).tiny).log()

    length = query.shape[-2]
    return flex_attention(
        query,
        key,
        value,
        score_mod=log_similarity,
        scale=1.0,
        block_mask=create_block_mask(_is_past, None, None, length, length, device=query.device),
    )


def _is_past(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


def _fits_flex(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Returns whether a compiled `flex_attention` takes these shapes and precisions."""
    return (
        torch.compiler.is_compiling()
        and query.ndim == 4
        and query.numel() > 0
        and query.shape[:-1] == key.shape[:-1] == value.shape[:-1]
        and min(query.shape[-1], value.shape[-1]) >= FLEX_WIDTH
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.float32, torch.bfloat16)  # fp16 has a larger smallest number
    )


def _relative_features(x: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape D"]:
    """Computes Phi(x) / exp(min(0, max x)), so that a row's largest feature is at least 1.

    The factor of a query is that of all its weights, and cancels.
    """
    largest = x.detach().amax(dim=-1, keepdim=True).clamp_max(0)
    return relu(x) + (x.clamp_max(0) - largest).exp()


def _sums_before(x: Float[Tensor, "*batch chunks K W"]) -> Float[Tensor, "*batch chunks K W"]:
    """Sums all earlier chunks for each chunk."""
    return pad(x, (0, 0, 0, 0, 1, -1)).cumsum(dim=-3)
