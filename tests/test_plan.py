"""What pipelines.plan estimates, against what torch counts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipelines import plan
from value_aware_attention.kernels import Exponential
from value_aware_attention.models import CausalLanguageModel, build_roberta

ROOT = Path(__file__).parents[1]
SIZE = {"vocabulary_size": 320, "layers": 2, "width": 32, "heads": 2, "feedforward": 64}


def planned(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return compose("plan", list(overrides)).plan


def causal() -> nn.Module:
    return CausalLanguageModel(**SIZE, kernel=Exponential(), dropout=0.0)


def masked(block: int = 64) -> nn.Module:
    model = build_roberta(**SIZE, length=64, block=block, dropout=0.0)
    model.config._attn_implementation = "eager"
    return model


def counted(model: nn.Module, length: int) -> int:
    """Operations of forward and backward through all logits, as torch counts them."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = model(torch.zeros(1, length, dtype=torch.long))
        (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("build", [causal, masked, partial(masked, block=32)])
@pytest.mark.parametrize("length", [32, 64])
def test_operations_are_what_torch_counts(build: Callable[[], nn.Module], length: int) -> None:
    model = build()
    estimate = length * plan.operations_per_token(model, layers=2, length=length)
    assert counted(model, length) == estimate


def test_the_output_layer_counts_for_what_is_asked() -> None:
    model = masked()
    all_, some = (
        plan.operations_per_token(model, layers=2, length=64, asked=a) for a in (1.0, 0.15)
    )
    assert all_ - some == pytest.approx(6 * 0.85 * 320 * 32)


@pytest.mark.filterwarnings("ignore")
def test_the_gpu_scale_is_half_an_hour_of_training() -> None:
    """At a quarter of an A100's bf16 peak, which is what its file says."""
    cfg = planned("scale=gpu")
    rows = [plan.causal_row(cfg), *plan.masked_rows(cfg)]
    operations = sum(row["operations"] for row in rows)
    assert cfg.operations_per_second == pytest.approx(312e12 / 4)
    assert 0.4 < plan.hours_of(cfg, operations) < 0.55
    assert rows[0]["operations"] == pytest.approx(3 * 286.9e6 * 1600 * 128 * 512, rel=1e-3)
    assert all("hours" in plan.with_hours(cfg, row) for row in rows)


@pytest.mark.filterwarnings("ignore")
def test_a_scale_for_the_cpu_has_no_hours() -> None:
    cfg = planned("scale=laptop")
    row = plan.with_hours(cfg, plan.causal_row(cfg))
    assert "hours" not in row and list(row)[-1] == "optimizer"
    assert "Hours" not in plan.assumptions(cfg, row["operations"])
