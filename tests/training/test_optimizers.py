"""Optimizers and schedules agree with transformers, torch and a transcription of their formulas."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_linear_schedule_with_warmup

from tests.refusals import assert_refused
from value_aware_study.training.optimizers import (
    BertAdam,
    InverseSquareRoot,
    LinearWarmupDecay,
    Muon,
)


def rates(scheduler: LRScheduler, steps: int) -> list[float]:
    taken = []
    for _ in range(steps):
        taken.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return taken


def rate_of(lr: float) -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize(("steps", "proportion"), [(40, 0.1), (41, 0.1), (10, 0.0), (10, 1.0)])
def test_linear_is_that_of_transformers(steps: int, proportion: float) -> None:
    schedule = LinearWarmupDecay(peak=5e-6, warmup_proportion=proportion, steps=steps)
    theirs = get_linear_schedule_with_warmup(rate_of(5e-6), int(steps * proportion), steps)
    ours = LambdaLR(rate_of(1.0), schedule)
    assert rates(ours, steps + 2) == pytest.approx(rates(theirs, steps + 2), rel=1e-12, abs=0.0)


def test_inverse_square_root_without_warm_up_begins_at_its_peak() -> None:
    assert InverseSquareRoot(peak=0.5, warmup_steps=0)(0) == 0.5


def parameters() -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    hidden, embedding, norm = (
        nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((6, 4), (9, 4), (4,))
    )
    return hidden, embedding, norm


def optimizer(hidden: nn.Parameter, embedding: nn.Parameter, norm: nn.Parameter) -> Muon:
    groups = [
        {"params": [hidden], "hidden": True},
        {"params": [embedding], "hidden": False},
        {"params": [norm], "hidden": False, "weight_decay": 0.0},
    ]
    return Muon(groups, lr=0.02, adamw_rate=0.25, weight_decay=0.1)


def gradients(step: int, *shapes: torch.Size) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def take(step: int, optimizer: Optimizer, *params: nn.Parameter) -> None:
    for p, grad in zip(params, gradients(step, *(p.shape for p in params)), strict=True):
        p.grad = grad
    optimizer.step()


def test_hidden_matrices_move_along_the_orthogonal_factor_of_their_momentum() -> None:
    hidden, *_ = params = parameters()
    before, made = hidden.detach().clone(), optimizer(*params)
    take(0, made, *params)
    (grad, *_) = gradients(0, *(p.shape for p in params))
    u, _, v = torch.linalg.svd(grad, full_matrices=False)
    moved = before * (1 - 0.02 * 0.1) - hidden.detach()
    size = 0.02 * 0.2 * 6**0.5  # as large as AdamW's update: 0.2 in root mean square
    # five Newton-Schulz iterations leave singular values between about 0.7 and 1.2
    assert torch.cosine_similarity((moved / size).flatten(), (u @ v).flatten(), dim=0) > 0.97
    least, most = torch.linalg.svdvals(moved / size).aminmax()
    assert least > 0.6 and most < 1.3


def test_everything_else_is_adamws() -> None:
    ours, theirs = parameters(), parameters()
    made = optimizer(*ours)
    settings = {"lr": 0.02 * 0.25, "betas": (0.9, 0.98), "eps": 1e-8, "fused": True}
    groups = [
        {"params": [p], "weight_decay": d} for p, d in zip(theirs[1:], (0.1, 0.0), strict=True)
    ]
    reference = AdamW(groups, **settings)
    for step in range(5):
        take(step, made, *ours)
        take(step, reference, *theirs)
    assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2])


Array = NDArray[np.float64]
SHAPES = [(3, 4), (4,), (2, 3, 2)]


class Transcription:
    """google-research/bert's AdamWeightDecayOptimizer, with pytorch-pretrained-bert's clipping."""

    def __init__(self, p: Array, *, decay: float, clip: float) -> None:
        self.p, self.m, self.v = p, np.zeros_like(p), np.zeros_like(p)
        self.decay, self.clip = decay, clip

    def step(self, g: Array, lr: float) -> None:
        norm = np.sqrt((g * g).sum())
        if self.clip > 0 and norm + 1e-6 > self.clip:
            g = g * self.clip / (norm + 1e-6)
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.98 * self.v + 0.02 * g * g
        update = self.m / (np.sqrt(self.v) + 1e-6)
        update += self.decay * self.p
        self.p = self.p - lr * update


@pytest.mark.parametrize("clip", [5.0, 1.0, 0.0])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.3])
def test_equals_the_transcription(clip: float, decay: float) -> None:
    rng = np.random.default_rng(0)
    start = [rng.normal(size=shape) for shape in SHAPES]
    ours = [nn.Parameter(torch.tensor(p)) for p in start]
    theirs = [Transcription(p, decay=decay, clip=clip) for p in start]
    settings = {"betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": decay, "max_grad_norm": clip}
    optimizer = BertAdam(ours, lr=1.0, **settings)
    for step in range(6):
        lr = 0.1 / (1 + step)
        optimizer.param_groups[0]["lr"] = lr
        for p, other in zip(ours, theirs, strict=True):
            g = rng.normal(size=p.shape) * (10.0 if step % 2 else 0.1)
            p.grad = torch.tensor(g)
            other.step(g, lr)
        optimizer.step()
        for p, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), other.p, rtol=1e-12, atol=1e-14)


def test_a_parameter_without_gradient_stays() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    BertAdam([{"params": [used]}, {"params": [unused]}], lr=0.1).step()
    assert torch.equal(unused, torch.ones(2)) and not torch.equal(used, torch.ones(2))


HIDDEN = [{"params": [nn.Parameter(torch.zeros(2, 2))], "hidden": True}]
VECTOR = [{"params": [nn.Parameter(torch.zeros(3))], "hidden": True}]
PROPORTION = {"peak": 1.0, "warmup_proportion": 10, "steps": 4}


@pytest.mark.parametrize(
    ("build", "settings", "line"),
    [
        (BertAdam, {"params": VECTOR, "lr": -1.0}, "must"),
        (BertAdam, {"params": VECTOR, "lr": 1.0, "betas": (0.9, 1.0)}, "must"),
        (Muon, {"params": HIDDEN, "lr": 1.0, "adamw_rate": 0}, "adamw_rate is 0; it must be posi"),
        (Muon, {"params": VECTOR, "lr": 1.0}, "2D"),
        (LinearWarmupDecay, PROPORTION, "warmup_proportion is 10; it must lie between 0 and 1"),
    ],
)
def test_impossible_settings(build: type, settings: dict[str, object], line: str) -> None:
    assert_refused(line, build, **settings)
