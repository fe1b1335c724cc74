"""Options that make a step cheaper change no weight, nor do kills and new starts."""

from functools import partialmethod
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from tests.refusals import assert_refused
from tests.training.processes import exit_code, start, train_app, write_tokens
from tests.training.test_fit import logged, run, same
from tests.training.tiny import (
    ADAMW,
    VOCABULARY,
    causal_batch,
    causal_module,
    masked_batch,
    masked_module,
    module_for,
)
from value_aware_attention.kernels import Elu, Polynomial
from value_aware_attention.models import CausalLanguageModel
from value_aware_study.training import fit as fitting
from value_aware_study.training.modules import CausalTraining, LanguageModeling
from value_aware_study.training.optimizers import InverseSquareRoot

pytestmark = pytest.mark.slow


def trained(module: LanguageModeling, folder: Path, **trainer: Any) -> list[dict[str, float]]:
    logger = CSVLogger(folder / "logs", name="", version="")
    options = {"steps": 6, "evaluate_every": 3, "checkpoint_every": 2, "log_every_n_steps": 2}
    options |= {"masked": not isinstance(module, CausalTraining), "logger": logger}
    return run(module, folder / "checkpoints", **options | trainer)[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("option", [{"workers": 2}, {"checkpoint_activations": True}])
def test_workers_and_checkpointed_activations_change_nothing(
    tmp_path: Path, masked: bool, option: dict[str, Any]
) -> None:
    plain, other = module_for(masked), module_for(masked)
    assert trained(plain, tmp_path / "plain") == trained(other, tmp_path / "other", **option)
    assert same(plain.state_dict(), other.state_dict())


@pytest.mark.parametrize("masked", [False, True])
def test_with_checkpointed_activations_each_layer_is_computed_twice(masked: bool) -> None:
    module, calls = module_for(masked).train(), []
    module.checkpoint_activations()
    for layer in module.layers():
        first = next(block for block in layer.modules() if isinstance(block, nn.Linear))
        first.register_forward_pre_hook(lambda *call: calls.append(call))
    module.loss(masked_batch(0) if masked else causal_batch(0)).backward()
    assert len(calls) == 2 * 2


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
    death = {"breaks_at": 5, "error": KeyError}
    assert_refused("killed", trained, one_layer(), folder, compile=True, **death)
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
    monkeypatch.setattr(
        fitting, "missing_compiler", fitting.missing_compiler.__wrapped__
    )  # not cached
    line = r"compile is true, but it needs a C\+\+ compiler"
    assert_refused(line, trained, causal_module(), tmp_path, compile=True)


@pytest.mark.parametrize(
    ("packages", "line"),
    [({"triton"}, None), (set(), "it needs Triton and a C compiler on CUDA")],
)
def test_what_compiling_needs(
    packages: set[str], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "find_spec", lambda name: name in packages)
    assert fitting.missing_compiler.__wrapped__("cuda") == line


def test_flops_are_those_that_torch_counts() -> None:
    """Attention is eager, as torch counts no fused attention or fused losses on a CPU."""
    causal, masked = causal_module(kernel=Polynomial(), dropout=0.0), masked_module(dropout=0.0)
    masked.model.set_attn_implementation("eager")
    for module, batch in ((causal, causal_batch(0)), (masked, masked_batch(0))):
        with FlopCounterMode(display=False) as counted:
            if module is causal:
                logits = causal.model(batch[:, :-1]).logits
                cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            else:
                masked.loss(batch).backward()
        assert module.flops(batch, module.count_targets(batch)) == counted.get_total_flops()


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
    assert fitting.peak_flops_of(name, precision) == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_utilisation_is_logged_where_a_peak_is_known(tmp_path: Path, accumulate: int) -> None:
    module = masked_module(dropout=0.0)
    trained(module, tmp_path, accumulate=accumulate, peak_flops=1e9)
    rows = [row for row in logged(tmp_path / "logs") if row["train/tokens_per_second"]]
    # the evaluation after step 3 is no training time, and the clock starts anew
    for row, numbers in zip(rows, [(0, 1), (3,), (4, 5)], strict=True):
        batches = [masked_batch(number) for number in numbers]
        flops = sum(module.flops(batch, module.count_targets(batch)) for batch in batches)
        tokens = sum(module.inputs(batch).numel() for batch in batches)
        expected = flops / 1e9 * float(row["train/tokens_per_second"]) / tokens
        assert float(row["train/model_flops_utilisation"]) == pytest.approx(expected)


CHECKPOINTS = ".cache/checkpoints/causal_exponential"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the hash of the weights of a run that nobody killed."""
    root = tmp_path_factory.mktemp("straight")
    write_tokens(root)
    assert exit_code(start(train_app, root)) == 0
    return weights(root)


def weights(root: Path) -> str:
    file = root / "outputs/smoke/models/causal_exponential/model.safetensors"
    return sha256(file.read_bytes()).hexdigest()


def saved_steps(root: Path) -> dict[str, int]:
    files = (root / CHECKPOINTS).glob("*.ckpt")
    return {file.stem: torch.load(file, weights_only=True)["global_step"] for file in files}


def test_a_process_killed_at_any_moment_ends_with_the_same_weights(
    tmp_path: Path, straight: str
) -> None:
    write_tokens(tmp_path)
    for dies, at, left in (
        ("while_training", 1, {}),
        ("while_training", 5, {"last": 4, "previous": 2}),
        ("while_writing", 6, {"last": 4, "previous": 2}),
        ("between_names", 8, {"previous": 6}),
        ("while_training", 11, {"last": 10, "previous": 8}),
    ):
        assert exit_code(start(train_app, tmp_path, dies, at)) == -9
        assert saved_steps(tmp_path) == left
        assert not (tmp_path / "outputs/smoke/models").exists()
    assert exit_code(start(train_app, tmp_path)) == 0
    assert weights(tmp_path) == straight
    assert not list((tmp_path / CHECKPOINTS).iterdir())


def test_a_process_asked_to_end_saves_the_step_it_is_at(tmp_path: Path, straight: str) -> None:
    write_tokens(tmp_path)
    # the second is asked before an evaluation, which it does not finish: that step is taken again
    for at, saved in ((2, 3), (4, 4), (8, 9)):
        assert exit_code(start(train_app, tmp_path, "when_asked", at)) == 143
        assert saved_steps(tmp_path)["last"] == saved
    assert exit_code(start(train_app, tmp_path)) == 0
    assert weights(tmp_path) == straight


def cut(content: bytes) -> bytes:
    return content[:-100]


def flip(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b""])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_continued(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    assert_refused("killed", run, causal_module(), tmp_path, breaks_at=8, error=KeyError)
    last = tmp_path / "last.ckpt"
    last.write_bytes(damage(last.read_bytes()))
    curve, _ = run(causal_module(), tmp_path / "straight")
    again, read = run(causal_module(), tmp_path)
    assert read == list(range(3, 13)) and again == curve
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/last.ckpt is damaged: the run continues from the one before it, if any"
    ]


def test_two_damaged_checkpoints_leave_the_start(tmp_path: Path) -> None:
    assert_refused("killed", run, causal_module(), tmp_path, breaks_at=8, error=KeyError)
    for file in tmp_path.glob("*.ckpt"):
        file.write_bytes(cut(file.read_bytes()))
    _, read = run(causal_module(), tmp_path)
    assert read == list(range(13))
