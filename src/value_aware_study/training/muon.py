"""Muon for the hidden matrices, AdamW for everything else, as one optimizer."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as MatrixMuon

__all__ = ["Muon"]


class Muon(Optimizer):
    """Orthogonalises the momentum of hidden matrices; embeddings, norms and biases get AdamW.

    Parameter groups say which they are: `hidden` true (2-D parameters only, Jordan et al. 2024,
    with updates as large as AdamW's, Liu et al. 2025) or false. `lr` is that of the hidden
    matrices, the others' is `adamw_rate` times as much. `torch.optim` has both; here they are one
    optimizer with one state, so that one schedule drives both and a checkpoint holds both.
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
        self._hidden: dict[str, Any] = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
        self._others: dict[str, Any] = {"betas": tuple(betas), "eps": eps, "fused": True}
        self._parts()  # refuses now what cannot be trained, and completes the groups

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
        for part in self._parts():
            part.step()
        return loss

    def _parts(self) -> list[Optimizer]:
        """torch's optimizers over our groups and state: a loaded checkpoint replaces both."""
        parts: list[Optimizer] = [
            MatrixMuon([group], **self._hidden)
            if group["hidden"]
            else AdamW([group], **self._others)
            for group in self.param_groups
        ]
        for part in parts:
            part.state = self.state
        return parts
