"""Losses, metrics, optimizers and schedules agree with plain outputs, transformers and formulas."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_linear_schedule_with_warmup

from tests.refusals import assert_refused
from tests.training.tiny import (
    VOCABULARY,
    causal_batch,
    causal_module,
    masked_batch,
    masked_module,
    module_for,
)
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial
from value_aware_study.training import modules
from value_aware_study.training.fit import missing_compiler
from value_aware_study.training.optimizers import (
    BertAdam,
    InverseSquareRoot,
    LinearWarmupDecay,
    Muon,
)
from value_aware_study.training.plan import one_step


def assert_equal(module: nn.Module, ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected)
    gradients = [torch.autograd.grad(loss, [*module.parameters()]) for loss in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernel", [Exponential(), Polynomial(), Elu()])
def test_the_causal_loss_is_the_cross_entropy_of_the_next_token(kernel: Kernel) -> None:
    module, batch = causal_module(kernel=kernel, dropout=0.0), causal_batch(0)
    logits = module.model(batch[:, :-1]).logits.flatten(0, 1)
    assert_equal(module, module.loss(batch), cross_entropy(logits, batch[:, 1:].flatten()))


@pytest.mark.parametrize(
    ("rows", "compiled"),
    [
        (1, False),
        (7, False),
        (50, False),
        (64, False),
        pytest.param(16, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_loss_of_a_gpu_is_that_of_all_logits_at_once(rows: int, compiled: bool) -> None:
    hidden, weight = torch.randn(50, 16), torch.randn(300, 16)
    targets, summed = torch.randint(300, (50,)), modules.SummedCrossEntropy()
    if compiled:
        if reason := missing_compiler("cpu"):
            pytest.skip(reason)
        summed.compile(dynamic=False)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, hidden, weight)]
    nats = modules.chunked_cross_entropy(summed, rows, leaves[0], leaves[1], targets)
    expected = cross_entropy(leaves[2] @ leaves[3].T, targets, reduction="sum")
    (0.3 * nats).backward()
    (0.3 * expected).backward()
    with torch.no_grad():
        alone = modules.chunked_cross_entropy(summed, rows, hidden, weight, targets)
    torch.testing.assert_close((nats, alone), (expected, expected))
    torch.testing.assert_close([x.grad for x in leaves[:2]], [x.grad for x in leaves[2:]])


def test_a_gpu_computes_the_same_causal_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = causal_module(dropout=0.0), causal_batch(0)
    assert module.compiled() == [*module.layers(), module.summed]
    whole = module.loss(batch)
    expected = module.loss(batch, 5.0), module.totals(batch)["nats"]
    calls = Mock(wraps=module.summed.forward)
    monkeypatch.setattr(module.summed, "forward", calls)
    monkeypatch.setattr(modules, "CHUNK_ON_GPU", 7 * VOCABULARY)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with torch.no_grad():
        losses = module.loss(batch, 5.0), module.totals(batch)["nats"]
    torch.testing.assert_close(losses, expected)
    assert_equal(module, module.loss(batch), whole)
    assert calls.call_count == 3 * math.ceil(module.count_targets(batch) / 7)


def test_the_loss_of_a_gpu_multiplies_in_the_precision_of_autocast() -> None:
    hidden, weight = (torch.randn(rows, 16, requires_grad=True) for rows in (50, 300))
    targets = torch.randint(300, (50,))
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float()
    expected = cross_entropy(logits, targets, reduction="sum")
    gradients = torch.autograd.grad(expected, (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        nats = modules.chunked_cross_entropy(
            modules.SummedCrossEntropy(), 16, hidden, weight, targets
        )
    torch.testing.assert_close(nats, expected, rtol=1e-6, atol=0)
    ours = torch.autograd.grad(nats, (hidden, weight))
    torch.testing.assert_close(ours, gradients, rtol=2e-2, atol=2e-2)


def test_causal_metrics() -> None:
    module, batches = causal_module(dropout=0.0), [causal_batch(0), causal_batch(1)[:2]]
    totals = [module.totals(batch) for batch in batches]
    sums = {name: sum(total[name].item() for total in totals) for name in totals[0]}
    logits = torch.cat([module.model(batch[:, :-1]).logits for batch in batches]).flatten(0, 1)
    targets = torch.cat([batch[:, 1:] for batch in batches]).flatten()
    loss = cross_entropy(logits, targets).item()
    assert sums["targets"] == 6 * 12
    expected = {"loss": loss, "perplexity": math.exp(loss)}
    assert module.metrics(sums) == pytest.approx(expected, rel=1e-5)
    hopeless = module.metrics({"nats": 1e6, "targets": 1.0})["perplexity"]
    assert math.isfinite(hopeless) and hopeless > VOCABULARY


def test_the_masked_loss_is_that_of_plain_transformers() -> None:
    module, batch = masked_module(dropout=0.0), masked_batch(0)
    assert_equal(module, module.loss(batch), module.model(**batch).loss)


def test_masked_metrics() -> None:
    module, batch = masked_module(dropout=0.0), masked_batch(0)
    asked = batch["labels"] != -100
    predicted = module.model(input_ids=batch["input_ids"]).logits.argmax(-1)
    wrong = int((predicted != batch["labels"])[asked].sum())
    totals = {name: value.item() for name, value in module.totals(batch).items()}
    assert totals["targets"] == int(asked.sum())
    assert totals["wrong"] == wrong
    metrics = module.metrics(totals)
    assert set(metrics) == {"loss", "error_percent"}  # `error` is DVC's mark of a damaged file
    assert metrics["error_percent"] == pytest.approx(100 * wrong / int(asked.sum()))
    assert metrics["loss"] == pytest.approx(module.loss(batch).item())


@pytest.mark.parametrize("masked", [False, True])
def test_every_parameter_is_in_one_group_and_hidden_ones_are_matrices_of_layers(masked) -> None:
    """Biases and norms of the masked model do not decay."""
    module = module_for(masked)
    for group in module.configure_optimizers()["optimizer"].param_groups:
        decays = {0.01 if not masked or p.ndim > 1 else 0.0 for p in group["params"]}
        assert decays == {group["weight_decay"]}
    groups = module.parameter_groups()
    # ids: the tied output embedding is one parameter, in one group
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(map(id, module.parameters()))
    (hidden,) = [group["params"] for group in groups if group["hidden"]]
    in_layers = {id(p) for layer in module.layers() for p in layer.parameters() if p.ndim == 2}
    assert set(map(id, hidden)) == in_layers and hidden


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_a_step_of_that_module(masked: bool) -> None:
    module = module_for(masked)
    before = [p.detach().clone() for p in module.parameters()]
    result = one_step(module, masked_batch(0) if masked else causal_batch(0))
    assert math.isfinite(result["loss"])
    assert result["seconds"] > 0
    assert 0.05 < result["peak_memory_gib"] < 100
    moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    # BERT's warm-up begins at a rate of exactly zero, fairseq's does not
    assert any(moved) is not masked


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    module = masked_module()
    module.model.lm_head.bias.data[0] = float("nan")
    assert_refused("the loss is nan", one_step, module, masked_batch(0))


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
