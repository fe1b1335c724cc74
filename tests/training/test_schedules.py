"""Schedules agree step by step with their formula and with transformers."""

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_linear_schedule_with_warmup

from value_aware_study.training.optimizers import InverseSquareRoot, LinearWarmupDecay


def rates(scheduler: LRScheduler, steps: int) -> list[float]:
    taken = []
    for _ in range(steps):
        taken.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return taken


def optimizer(lr: float) -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_inverse_square_root_of_the_paper() -> None:
    schedule = InverseSquareRoot(peak=5e-4, warmup_steps=4000)
    taken = rates(LambdaLR(optimizer(1.0), schedule), 12_001)
    for n in (0, 1, 2, 1999, 3999):
        assert taken[n] == pytest.approx(1e-7 + n * (5e-4 - 1e-7) / 4000, rel=1e-12)
    assert taken[4000] == max(taken) == pytest.approx(5e-4)
    for n in (4001, 8000, 12_000):
        assert taken[n] == pytest.approx(5e-4 * (4000 / n) ** 0.5, rel=1e-12)


@pytest.mark.parametrize(("steps", "proportion"), [(40, 0.1), (41, 0.1), (10, 0.0), (10, 1.0)])
def test_linear_is_that_of_transformers(steps: int, proportion: float) -> None:
    schedule = LinearWarmupDecay(peak=5e-6, warmup_proportion=proportion, steps=steps)
    theirs = get_linear_schedule_with_warmup(optimizer(5e-6), int(steps * proportion), steps)
    ours = LambdaLR(optimizer(1.0), schedule)
    assert rates(ours, steps + 2) == pytest.approx(rates(theirs, steps + 2), rel=1e-12, abs=0.0)


def test_inverse_square_root_without_warm_up_begins_at_its_peak() -> None:
    assert InverseSquareRoot(peak=0.5, warmup_steps=0)(0) == 0.5


def test_a_proportion_is_a_proportion() -> None:
    with pytest.raises(ValueError, match="warmup_proportion is 10; it must lie between 0 and 1"):
        LinearWarmupDecay(peak=1.0, warmup_proportion=10, steps=4)
