"""Options that make a step cheaper or measure its cost change no weight."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from tests.training.processes import exit_code, start
from tests.training.test_fit import logged, same
from tests.training.tiny import (
    ADAMW,
    VOCABULARY,
    Batches,
    causal_batch,
    causal_module,
    masked_batch,
    masked_module,
    module_for,
    on_the_cpu,
)
from value_aware_attention.kernels import Elu, Polynomial
from value_aware_attention.models import CausalLanguageModel
from value_aware_study.training.fit import fit, missing_compiler, peak_flops_of
from value_aware_study.training.modules import CausalTraining, LanguageModeling, training_flops
from value_aware_study.training.optimizers import InverseSquareRoot

pytestmark = pytest.mark.slow


def trained(
    module: LanguageModeling, folder: Path, *, breaks_at: int | None = None, **trainer: Any
) -> list[dict[str, float]]:
    """Trains six steps; returns the learning curve."""
    masked = not isinstance(module, CausalTraining)
    return fit(
        module,
        Batches(6, masked=masked, breaks_at=breaks_at),
        Batches(2, masked=masked),
        evaluate_every=3,
        checkpoint_every=2,
        checkpoint_folder=folder / "checkpoints",
        fingerprint="",
        log_every_n_steps=2,
        logger=CSVLogger(folder / "logs", name="", version=""),
        **on_the_cpu(**trainer),
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("option", [{"workers": 2}, {"checkpoint_activations": True}])
def test_workers_and_checkpointed_activations_change_nothing(
    tmp_path: Path, masked: bool, option: dict[str, Any]
) -> None:
    plain, other = module_for(masked), module_for(masked)
    assert trained(plain, tmp_path / "plain") == trained(other, tmp_path / "other", **option)
    assert same(plain.state_dict(), other.state_dict())


@pytest.mark.parametrize("masked", [False, True])
def test_checkpointed_activations_give_the_same_gradients(masked: bool) -> None:
    """Dropout is drawn as in the forward pass, though each layer is computed twice."""
    results, calls = [], []
    for again in (False, True):
        module = module_for(masked).train()
        if again:
            module.checkpoint_activations()
        for layer in module.layers():
            first = next(block for block in layer.modules() if isinstance(block, nn.Linear))
            first.register_forward_pre_hook(lambda *arguments: calls.append(1))
        torch.manual_seed(5)
        loss = module.loss(masked_batch(0) if masked else causal_batch(0))
        loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        results.append((loss.detach(), gradients, len(calls)))
        calls.clear()
    (loss, gradients, once), (again_loss, again_gradients, twice) = results
    assert torch.equal(loss, again_loss)
    assert gradients.keys() == again_gradients.keys() and same(gradients, again_gradients)
    assert (once, twice) == (2, 4)


def one_layer() -> CausalTraining:
    torch.manual_seed(0)
    size = {"vocabulary_size": VOCABULARY, "layers": 1, "width": 16, "heads": 2, "feedforward": 16}
    # not the exponential kernel: Adam enlarges the rounding of its keys' bias, which is noise
    model = CausalLanguageModel(**size, kernel=Elu(), dropout=0.0)
    schedule = InverseSquareRoot(peak=1e-2, warmup_steps=5)
    return CausalTraining(model, schedule=schedule, optimizer=ADAMW, seed=3)


def compiled_run(folder: Path) -> None:
    """Runs without the tests' checks of shapes, which would be compiled too.

    torch.compile stops before its last stage, the C++ compiler, which takes most of a minute.
    """
    torch.set_num_threads(1)
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")
    plain, compiled = one_layer(), one_layer()
    names = list(plain.state_dict())
    expected = trained(plain, folder / "plain")
    with pytest.raises(KeyError):
        trained(one_layer(), folder, breaks_at=5, compile=True)
    curve = trained(compiled, folder, compile=True)
    assert all(part._compiled_call_impl is not None for part in compiled.compiled())
    assert counters["stats"]["unique_graphs"] == 2  # training and evaluation
    assert list(compiled.state_dict()) == names
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), rtol=1e-3, atol=2e-5)
    for point, other in zip(curve, expected, strict=True):
        assert point == pytest.approx(other, rel=1e-5)
    compiled.model.save_pretrained(folder / "model")
    loaded = CausalLanguageModel.from_pretrained(folder / "model")
    assert same(loaded.state_dict(), compiled.model.state_dict())


def test_a_compiled_run_is_the_same_and_continues(tmp_path: Path) -> None:
    assert exit_code(start(compiled_run, tmp_path)) == 0


def test_without_a_compiler_compiling_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    missing_compiler.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"compile is true, but it needs a C\+\+ compiler"):
            trained(causal_module(), tmp_path, compile=True)
    finally:
        missing_compiler.cache_clear()


def test_what_compiling_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = missing_compiler.__wrapped__
    find_spec = "value_aware_study.training.fit.find_spec"
    monkeypatch.setattr(find_spec, lambda name: name == "triton")
    assert missing("cpu") is None and missing("cuda") is None
    monkeypatch.setattr(find_spec, lambda name: None)
    assert missing("cuda") == "it needs Triton and a C compiler on CUDA"


def test_flops_are_those_that_torch_counts() -> None:
    """Attention is eager, as torch counts no fused attention or fused losses on a CPU."""
    causal = causal_module(kernel=Polynomial(), dropout=0.0)
    batch = causal_batch(0)
    with FlopCounterMode(display=False) as counted:
        logits = causal.model(batch[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    assert causal.flops(batch, causal.count_targets(batch)) == counted.get_total_flops()
    masked, rows = masked_module(dropout=0.0), masked_batch(0)
    masked.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted:
        masked.loss(rows).backward()
    assert masked.flops(rows, masked.count_targets(rows)) == counted.get_total_flops()


def test_flops_of_the_papers_model() -> None:
    """A token takes 6 x (6 x 12 x 512^2 + 267,744 x 512) + 12 x 6 x 512 x 512 operations."""
    parameters = 6 * 12 * 512**2 + 267_744 * 512
    size = {"parameters": parameters, "layers": 6, "width": 512, "length": 512}
    assert training_flops(**size) == 954_630_144


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16-mixed", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16-true", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312e12),
        ("NVIDIA L40S", "bf16-mixed", 362e12),
        ("NVIDIA H200", "32-true", None),
        ("NVIDIA GeForce GTX 960", "bf16-mixed", None),
    ],
)
def test_peaks_of_named_gpus(name: str, precision: str, expected: float | None) -> None:
    assert peak_flops_of(name, precision) == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_utilisation_is_logged_where_a_peak_is_known(tmp_path: Path, accumulate: int) -> None:
    module = masked_module(dropout=0.0)
    trained(module, tmp_path, accumulate=accumulate, peak_flops=1e9)
    rows = [row for row in logged(tmp_path / "logs") if row["train/tokens_per_second"]]
    # the evaluation after step 3 is no training time, and the clock starts anew
    for row, numbers in zip(rows, [(0, 1), (3,), (4, 5)], strict=True):
        batches = [masked_batch(number) for number in numbers]
        flops = sum(module.flops(batch, module.count_targets(batch)) for batch in batches)
        seconds = sum(module.inputs(batch).numel() for batch in batches) / float(
            row["train/tokens_per_second"]
        )
        expected = flops / seconds / 1e9
        assert float(row["train/model_flops_utilisation"]) == pytest.approx(expected)


def test_without_a_peak_the_speed_alone_is_logged(tmp_path: Path) -> None:
    trained(causal_module(), tmp_path)
    assert "train/model_flops_utilisation" not in logged(tmp_path / "logs")[0]
    assert any(row["train/tokens_per_second"] for row in logged(tmp_path / "logs"))
