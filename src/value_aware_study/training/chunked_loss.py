"""Computes the cross-entropy over a large vocabulary on GPUs, in chunks of tokens."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear


class SummedCrossEntropy(nn.Module):
    """Computes nats of the targets from hidden states, with the logits in autocast's precision.

    It is a module, so that torch.compile can fuse the passes over the logits.
    """

    def forward(
        self,
        hidden: Float[Tensor, "N width"],
        weight: Float[Tensor, "vocabulary width"],
        targets: Int[Tensor, " N"],
    ) -> Float[Tensor, ""]:
        return cross_entropy(linear(hidden, weight).float(), targets, reduction="sum")


def chunked_cross_entropy(
    summed: nn.Module,
    rows: int,
    hidden: Float[Tensor, "N width"],
    weight: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, " N"],
) -> Float[Tensor, ""]:
    """Computes nats of the targets, with the logits of at most `rows` of them in memory.

    `summed` is a `SummedCrossEntropy`. torch.nn.functional.linear_cross_entropy does the same in
    the precision of its arguments; autocast does not lower it.
    """
    if torch.is_grad_enabled():
        return _Chunked.apply(summed, rows, hidden, weight, targets)
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.stack([summed(part, weight, wanted) for part, wanted in parts]).sum()


class _Chunked(Function):
    """Computes a chunk's gradients right after its logits, so that no logits are computed twice."""

    @staticmethod
    def forward(
        ctx: Any, summed: nn.Module, rows: int, hidden: Tensor, weight: Tensor, targets: Tensor
    ) -> Tensor:
        nats, of_hidden, of_weight = [], [], torch.zeros_like(weight, dtype=torch.float32)
        leaf = weight.detach().requires_grad_()
        for chunk, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
            states = chunk.detach().requires_grad_()
            with torch.enable_grad():
                part = summed(states, leaf, wanted)
            gradients = torch.autograd.grad(part, (states, leaf))
            nats.append(part.detach())
            of_hidden.append(gradients[0])
            of_weight += gradients[1]
        ctx.save_for_backward(torch.cat(of_hidden), of_weight.to(weight.dtype))
        return torch.stack(nats).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return None, None, of_hidden * scale, of_weight * scale, None
