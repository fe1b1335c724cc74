"""Optimizers and learning rates: those of the paper (A.1, A.2, Table 4), and Muon."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT


class _StepwiseOptimizer(Optimizer):
    """Implements `step` for optimizers that define `_take`, the update of their parameters."""

    def _take(self) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._take()
        return loss


class BertAdam(_StepwiseOptimizer):
    """Runs Adam without bias correction; eps after the root; weight decay before the learning rate.

        g <- g min(1, max_grad_norm / (||g|| + 1e-6))    for every parameter tensor on its own
        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        p <- p - lr (m / (sqrt(v) + eps) + weight_decay p)

    This is `pytorch-pretrained-bert`'s BertAdam. It clips each tensor, not all parameters together.
    torch.optim.AdamW cannot switch the bias correction off. Gradients are clipped in place.
    max_grad_norm <= 0 clips nothing.
    """

    def __init__(
        self,
        params: ParamsT,
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
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "max_grad_norm": max_grad_norm,
            },
        )

    def _take(self) -> None:
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        beta1, beta2 = group["betas"]
        if group["max_grad_norm"] > 0:
            _clip(grads, group["max_grad_norm"])
        for p in params:
            if not self.state[p]:
                self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        m, v = ([self.state[p][name] for p in params] for name in ("m", "v"))
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_add_(denominator, group["eps"])
        update = torch._foreach_div(m, denominator)
        torch._foreach_add_(update, params, alpha=group["weight_decay"])
        torch._foreach_add_(params, update, alpha=-group["lr"])


def _clip(grads: list[Tensor], max_norm: float) -> None:
    scales = torch._foreach_norm(grads)
    torch._foreach_add_(scales, 1e-6)
    torch._foreach_reciprocal_(scales)
    torch._foreach_mul_(scales, max_norm)
    torch._foreach_clamp_max_(scales, 1.0)
    torch._foreach_mul_(grads, scales)


class Muon(_StepwiseOptimizer):
    """Orthogonalises the momentum of hidden matrices; embeddings, norms and biases get AdamW.

    Parameter groups with `hidden` true hold the hidden matrices, 2-D only (Jordan et al. 2024).
    Their updates are as large as AdamW's (Liu et al. 2025). `lr` is that of the hidden matrices;
    the other groups get `adamw_rate` times as much. `torch.optim` has both optimizers; here they
    are one with one state, so that one schedule drives both and a checkpoint holds both.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        adamw_rate: float = 0.4,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if adamw_rate <= 0:
            raise ValueError(f"adamw_rate is {adamw_rate}; it must be positive")
        groups = [group if group["hidden"] else group | {"lr": lr * adamw_rate} for group in params]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._muon = partial(torch.optim.Muon, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = partial(AdamW, betas=(betas[0], betas[1]), eps=eps, fused=True)
        self._optimizers()  # rejects untrainable parameters now, and completes the groups

    def _take(self) -> None:
        for optimizer in self._optimizers():
            optimizer.step()

    def _optimizers(self) -> list[Optimizer]:
        """Builds torch's optimizers over our groups and state; a checkpoint replaces the state."""
        optimizers: list[Optimizer] = [
            self._muon([group]) if group["hidden"] else self._adamw([group])
            for group in self.param_groups
        ]
        for optimizer in optimizers:
            optimizer.state = self.state
        return optimizers


Schedule = Callable[[int], float]  # the learning rate of the optimizer step after n others


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot:
    """Computes fairseq's schedule (A.2), W warm-up steps up to the peak.

    n < W:   initial + n (peak - initial) / W
    n >= W:  peak sqrt(W / n)
    """

    peak: float
    warmup_steps: int
    initial: float = 1e-7

    def __call__(self, n: int) -> float:
        if n < self.warmup_steps:
            return self.initial + n * (self.peak - self.initial) / self.warmup_steps
        return self.peak * (max(1, self.warmup_steps) / max(1, n)) ** 0.5


@dataclass(frozen=True, kw_only=True)
class LinearWarmupDecay:
    """Computes BERT's schedule (A.1): up to the peak over a share of the steps, then down to zero.

    W = warmup_proportion * steps
    n < W:   peak n / W
    n >= W:  peak (steps - n) / (steps - W)
    """

    peak: float
    warmup_proportion: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_proportion <= 1:
            raise ValueError(
                f"warmup_proportion is {self.warmup_proportion}; it must lie between 0 and 1"
            )

    def __call__(self, n: int) -> float:
        warmup = int(self.warmup_proportion * self.steps)
        if n < warmup:
            return self.peak * n / warmup
        return self.peak * max(0, self.steps - n) / max(1, self.steps - warmup)
