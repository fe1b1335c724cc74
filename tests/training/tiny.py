"""Makes models and step-indexed batches small enough to train in a test."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import Dataset

from value_aware_attention.approximations import Approximation
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Exponential, Kernel
from value_aware_attention.models import CausalLanguageModel, build_roberta
from value_aware_study.training.modules import CausalTraining, LanguageModeling, MaskedTraining
from value_aware_study.training.optimizers import BertAdam, InverseSquareRoot, LinearWarmupDecay

VOCABULARY = 40
ADAMW = partial(AdamW, lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, fused=True)
BERT_ADAM = partial(BertAdam, lr=1.0, betas=(0.9, 0.98), weight_decay=0.01, max_grad_norm=5.0)
CONF = Path(__file__).parents[2] / "conf"


class LearnedScale(Approximation):
    """Exact attention with a learned factor for each number of a query, drawn from the seed."""

    def __init__(self, head_dim: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = nn.Parameter(1 + torch.rand(head_dim, generator=generator))

    def approximate(self, call: Call) -> Tensor:
        return replace(call, query=call.query * self.scale).output()

    def multiply_adds(self, sizes: Sizes) -> float:
        return 0.0


class Batches(Dataset[Any]):
    """Random batches, item s from seed s; remembers those it gave and can break at one."""

    def __init__(self, count: int, *, masked: bool = False, breaks_at: int | None = None) -> None:
        self.count, self.masked, self.breaks_at = count, masked, breaks_at
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, step: int) -> Any:
        if not 0 <= step < self.count:
            raise IndexError(step)
        if step == self.breaks_at:
            raise KeyError("killed")
        self.read.append(step)
        return masked_batch(step) if self.masked else causal_batch(step)


def on_the_cpu(**trainer: Any) -> dict[str, Any]:
    """Returns the shipped settings of the trainer, on the CPU and silent."""
    shipped = yaml.safe_load((CONF / "trainer/default.yaml").read_text())
    return {**shipped, "accelerator": "cpu", "enable_progress_bar": False, **trainer}


def causal_batch(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, 13), generator=torch.Generator().manual_seed(seed))


def masked_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, VOCABULARY, (4, 12), generator=generator)
    asked = torch.rand(tokens.shape, generator=generator) < 0.3
    return {"input_ids": tokens.where(~asked, 4), "labels": tokens.where(asked, -100)}


def causal_module(
    *, kernel: Kernel | None = None, dropout: float = 0.1, seed: int = 3, peak: float = 1e-2
) -> CausalTraining:
    torch.manual_seed(0)
    model = CausalLanguageModel(
        vocabulary_size=VOCABULARY,
        layers=2,
        width=16,
        heads=2,
        feedforward=32,
        kernel=kernel or Exponential(),
        dropout=dropout,
    )
    schedule = InverseSquareRoot(peak=peak, warmup_steps=5)
    return CausalTraining(model, schedule=schedule, optimizer=ADAMW, seed=seed)


def masked_module(*, dropout: float = 0.1, length: int = 12) -> MaskedTraining:
    torch.manual_seed(0)
    model = build_roberta(
        vocabulary_size=VOCABULARY,
        layers=2,
        width=16,
        heads=2,
        feedforward=32,
        length=length,
        block=4,
        dropout=dropout,
    )
    schedule = LinearWarmupDecay(peak=1e-2, warmup_proportion=0.1, steps=30)
    return MaskedTraining(model, schedule=schedule, optimizer=BERT_ADAM, seed=3)


def module_for(masked: bool) -> LanguageModeling:
    return masked_module() if masked else causal_module()
