"""The optimizer of Table 4, "Bert-Adam": Adam as Google's BERT code had it."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["BertAdam"]


class BertAdam(Optimizer):
    """Runs Adam without bias correction; eps after the root; weight decay before the learning rate.

        g <- g min(1, max_grad_norm / (||g|| + 1e-6))    for every parameter tensor on its own
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        p <- p - lr (m / (sqrt(v) + eps) + weight_decay p)

    This is `pytorch-pretrained-bert`'s BertAdam, whose clipping is per tensor and not over all
    parameters together. torch.optim.AdamW cannot switch the bias correction off. Gradients are
    clipped in place. max_grad_norm <= 0 clips nothing.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(
                f"lr {lr}, eps {eps}, weight_decay {weight_decay} must not be negative"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}; both must lie in [0, 1)")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        grads = [p.grad for p in params]
        beta1, beta2 = group["betas"]
        if group["max_grad_norm"] > 0:
            _clip(grads, group["max_grad_norm"])
        m, v = self._moments(params)
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_add_(denominator, group["eps"])
        update = torch._foreach_div(m, denominator)
        torch._foreach_add_(update, params, alpha=group["weight_decay"])
        torch._foreach_add_(params, update, alpha=-group["lr"])

    def _moments(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        return [self.state[p]["m"] for p in params], [self.state[p]["v"] for p in params]


def _clip(grads: list[Tensor], max_norm: float) -> None:
    scales = torch._foreach_norm(grads)
    torch._foreach_add_(scales, 1e-6)
    torch._foreach_reciprocal_(scales)
    torch._foreach_mul_(scales, max_norm)
    torch._foreach_clamp_max_(scales, 1.0)
    torch._foreach_mul_(grads, scales)
