"""Prints what a scale amounts to: parameters, tokens, steps, operations, and hours on a GPU.

python -m pipelines.plan scale=paper
python -m pipelines.plan scale=paper plan.one_step=true   # and one real step of each model
"""

from collections.abc import Mapping
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from tabulate import tabulate
from torch import nn

from pipelines.app import app, composed
from pipelines.app.training import class_name
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.models import build_roberta
from value_aware_study.training.modules import LanguageModeling
from value_aware_study.training.one_step import one_step
from value_aware_study.training.optimizers import LinearWarmupDecay

# Known before any text is read: the paper's vocabulary rule on WikiText-103, RoBERTa's BPE.
KNOWN_VOCABULARIES = {"WordLevel": 267_744, "PretrainedTokenizer": 50_265}
PAPER_INSTANCES, PAPER_EPOCHS, PAPER_BATCH = 10_000_000, 2, 8  # Table 4


@app("plan")
def main(cfg: DictConfig) -> None:
    """Prints one row a training stage; nothing is written."""
    overrides = list(HydraConfig.get().overrides.task)
    found = rows(cfg, overrides)
    lines = [with_hours(cfg, row) for row in found]
    print(tabulate(lines, headers="keys", intfmt=",", floatfmt=".2g"))
    print(f"\n{assumptions(cfg, operations(found))}")
    if cfg.scale == "paper":
        implied, steps = PAPER_INSTANCES * PAPER_EPOCHS // PAPER_BATCH, found[-1]["steps"]
        print(
            f"\nTable 4's {steps:,} steps are not the {implied:,} that its "
            f"{PAPER_INSTANCES:,} instances, {PAPER_EPOCHS} epochs and batches of {PAPER_BATCH} "
            f"imply; they are {steps * PAPER_BATCH // PAPER_EPOCHS:,} instances."
        )
    if cfg.one_step:
        stages = trainings(overrides)
        steps_taken = [step(cfg, name, stages[name]) for name in ("causal", "masked_long")]
        print(tabulate(steps_taken, headers="keys", floatfmt=".2f"))


def with_hours(cfg: DictConfig, row: dict[str, Any]) -> dict[str, Any]:
    """A row with the estimated hours, where the scale is meant for a GPU."""
    hours = {"hours": hours_of(cfg, row["operations"])} if cfg.accelerator == "gpu" else {}
    optimizer = row.pop("optimizer")  # the longest text comes last
    return row | hours | {"optimizer": optimizer}


def hours_of(cfg: DictConfig, operations: float) -> float:
    """At the speed that is assumed."""
    return operations / cfg.operations_per_second / 3600


def assumptions(cfg: DictConfig, operations: float) -> str:
    """What the last columns count and what they take for granted."""
    counted = (
        "Operations: 6 a token and parameter it is multiplied with, and 12 layers x width x "
        "sequence a token for attention; forward and backward, all kernels together."
    )
    if cfg.accelerator != "gpu":
        return counted
    return (
        f"{counted}\nHours: an estimate, not measured; {cfg.operations_per_second:.1e} operations "
        "a second are assumed (plan.operations_per_second), "
        f"{hours_of(cfg, operations):.2g} hours of training in all. Tokenizing and evaluating come "
        "on top."
    )


def trainings(overrides: list[str]) -> dict[str, DictConfig]:
    """The sections of the training stages as their apps get them, by the model's name."""
    shared = [o for o in overrides if not o.lstrip("+~").startswith("plan.")]
    masked = {
        f"masked_{length}": composed("train_masked", [*shared, f"length={length}"]).train_masked
        for length in ("short", "long")
    }
    return {"causal": composed("train_causal", shared).train_causal} | masked


def rows(cfg: DictConfig, overrides: list[str]) -> list[dict[str, Any]]:
    """A row for every training stage; that of the causal models is about all kernels."""
    kernels = len(cfg.kernels)
    causal, *masked = (row(cfg, *training) for training in trainings(overrides).items())
    causal["stage"] += f" ({kernels} kernels)"
    causal["operations"] *= kernels
    return [causal, *masked]


def row(cfg: DictConfig, name: str, section: DictConfig) -> dict[str, Any]:
    """Sizes of a model and operations of its training, by the shapes alone."""
    size, length, steps = section.batches.batch_size, sequence(section), section.fit.steps
    with torch.device("meta"):  # no memory for weights
        module = training(cfg, section)
        batch = random_batch(cfg, section, size)
    # the output layer of a masked model sees the tokens that are asked for
    per_step = module.flops(batch, section.get("fraction", 1) * size * length)
    return {
        "stage": f"train_{name}",
        "parameters": parameters(module),
        "sequence": length,
        "batch": size,
        "steps": steps,
        "tokens read": steps * size * length,
        "operations": steps * per_step,
        "optimizer": recipe(section.module.optimizer, section.module.schedule),
    }


def operations(found: list[dict[str, Any]]) -> float:
    """Of all stages."""
    return sum(row["operations"] for row in found)


def recipe(optimizer: Mapping[str, Any], schedule: Mapping[str, Any]) -> str:
    """The optimizer and its learning rates in words."""
    warmup = schedule.get("warmup_steps") or schedule.get("warmup_proportion")
    clip = optimizer.get("max_grad_norm")
    return (
        f"{class_name(optimizer)}, {class_name(schedule)}, lr {schedule['peak']:g}, "
        f"warm-up {warmup:g}" + (f", clip {clip:g} a tensor" if clip else "")
    )


def sequence(section: DictConfig) -> int:
    """How many tokens a model reads at a time."""
    return section.get("positions", section.batches).length


def vocabulary(cfg: DictConfig, section: DictConfig) -> int:
    """Its size: given, or what the tokenizer of the scale makes."""
    task = "masked" if "positions" in section else "causal"
    tokenizer = cfg.tokens[f"{task}_tokenizer"]
    known = KNOWN_VOCABULARIES.get(tokenizer._target_.rpartition(".")[2])
    return cfg.vocabulary[task] or known or cfg.tokens.vocabulary_size


def training(cfg: DictConfig, section: DictConfig) -> LanguageModeling:
    """A model with random weights in training, without warm-up."""
    size = {"vocabulary_size": vocabulary(cfg, section)}
    if "positions" in section:
        model = build_roberta(**section.layers, **section.positions, **size)
    else:
        model = instantiate(section.model, **size)
    module: LanguageModeling = instantiate(section.module, model)
    peak = section.module.schedule.peak
    module.schedule = LinearWarmupDecay(peak=peak, warmup_proportion=0.0, steps=2)
    return module


def random_batch(cfg: DictConfig, section: DictConfig, count: int) -> Any:
    """`count` sequences of random tokens; of a masked model's the usual share is asked for."""
    size, length = vocabulary(cfg, section), sequence(section)
    if "positions" not in section:
        return torch.randint(size, (count, length + 1))
    tokens = torch.randint(5, size, (count, length))
    asked = torch.rand(tokens.shape) < section.fraction
    return {"input_ids": tokens, "labels": torch.where(asked, tokens, IGNORED)}


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def step(cfg: DictConfig, name: str, section: DictConfig) -> dict[str, Any]:
    """Loss, time and memory of one optimizer step on one sequence, as a line of the table."""
    found = one_step(training(cfg, section), random_batch(cfg, section, 1))
    return {"one step of": name, "sequence": f"1 x {sequence(section)}", **found}


if __name__ == "__main__":
    main()
