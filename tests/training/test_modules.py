"""Losses and metrics of the two tasks agree with the models' plain outputs."""

import math
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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
from value_aware_study.training.modules import SummedCrossEntropy, chunked_cross_entropy


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
    targets, summed = torch.randint(300, (50,)), SummedCrossEntropy()
    if compiled:
        if reason := missing_compiler("cpu"):
            pytest.skip(reason)
        summed.compile(dynamic=False)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, hidden, weight)]
    nats = chunked_cross_entropy(summed, rows, leaves[0], leaves[1], targets)
    expected = cross_entropy(leaves[2] @ leaves[3].T, targets, reduction="sum")
    (0.3 * nats).backward()
    (0.3 * expected).backward()
    with torch.no_grad():
        alone = chunked_cross_entropy(summed, rows, hidden, weight, targets)
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
        nats = chunked_cross_entropy(SummedCrossEntropy(), 16, hidden, weight, targets)
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
