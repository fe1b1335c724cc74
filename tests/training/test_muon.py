"""Muon agrees with its definition on hidden matrices and with torch's AdamW elsewhere."""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.refusals import assert_refused
from value_aware_study.training.optimizers import Muon


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


def take(steps: range, made: Muon, *params: nn.Parameter) -> None:
    for step in steps:
        for p, grad in zip(params, gradients(step, *(p.shape for p in params)), strict=True):
            p.grad = grad
        made.step()


def test_hidden_matrices_move_along_the_orthogonal_factor_of_their_momentum() -> None:
    hidden, *_ = params = parameters()
    before, made = hidden.detach().clone(), optimizer(*params)
    take(range(1), made, *params)
    (grad, *_) = gradients(0, *(p.shape for p in params))
    u, _, v = torch.linalg.svd(grad, full_matrices=False)
    moved = before * (1 - 0.02 * 0.1) - hidden.detach()
    size = 0.02 * 0.2 * 6**0.5  # as large as AdamW's update: 0.2 in root mean square
    # five Newton-Schulz iterations leave singular values between about 0.7 and 1.2
    cosine = torch.cosine_similarity((moved / size).flatten(), (u @ v).flatten(), dim=0)
    assert cosine > 0.97
    assert torch.linalg.svdvals(moved / size).min() > 0.6
    assert torch.linalg.svdvals(moved / size).max() < 1.3


def test_everything_else_is_adamws() -> None:
    ours, theirs = parameters(), parameters()
    made = optimizer(*ours)
    settings = {"lr": 0.02 * 0.25, "betas": (0.9, 0.98), "eps": 1e-8, "fused": True}
    reference = [AdamW([theirs[1]], weight_decay=0.1, **settings)]
    reference.append(AdamW([theirs[2]], weight_decay=0.0, **settings))
    for step in range(5):
        take(range(step, step + 1), made, *ours)
        for p, grad in zip(theirs, gradients(step, *(p.shape for p in theirs)), strict=True):
            p.grad = grad
        for other in reference:
            other.step()
    assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2])


def test_what_cannot_be_trained_is_refused() -> None:
    assert_refused("2D", Muon, [{"params": [nn.Parameter(torch.zeros(3))], "hidden": True}], lr=1.0)
    assert_refused(
        r"adamw_rate is 0; it must be positive",
        Muon,
        [{"params": list(parameters())[:1], "hidden": True}],
        lr=1.0,
        adamw_rate=0,
    )
