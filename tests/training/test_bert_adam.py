"""BertAdam agrees with a transcription of its formulas into numpy, in double precision."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from value_aware_study.training.optimizers import BertAdam

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
    optimizer = BertAdam([{"params": [used]}, {"params": [unused]}], lr=0.1)
    used.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert not torch.equal(used, torch.ones(2))


def test_a_closure_is_evaluated() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = BertAdam([p], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 1.0
    assert p.item() < 1.0


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"lr": 1.0, "betas": (0.9, 1.0)}])
def test_impossible_settings(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        BertAdam([nn.Parameter(torch.ones(1))], **settings)
