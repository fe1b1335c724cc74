"""Learning rates: functions of n, the number of optimizer steps already taken."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["InverseSquareRoot", "LinearWarmupDecay", "Schedule"]


class Schedule(Protocol):
    """Computes the learning rate of the optimizer step that follows n others."""

    def __call__(self, n: int) -> float: ...


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
