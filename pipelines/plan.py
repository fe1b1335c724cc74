"""Prints what a scale amounts to: parameters, tokens, steps, operations, and hours on a GPU.

python -m pipelines.plan scale=paper
python -m pipelines.plan scale=paper plan.one_step=true   # and one real step of each model
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from tabulate import tabulate
from torch import nn
from transformers import RobertaForMaskedLM

from pipelines.app import app
from pipelines.train import class_name
from value_aware_attention.kernels import Exponential
from value_aware_attention.models import CausalLanguageModel, build_roberta
from value_aware_attention.training.causal import CausalTraining
from value_aware_attention.training.masked import MaskedTraining
from value_aware_attention.training.module import LanguageModeling
from value_aware_attention.training.one_step import one_step
from value_aware_attention.training.schedules import LinearWarmupDecay

# Known before any text is read: the paper's vocabulary rule on WikiText-103, RoBERTa's BPE.
KNOWN_VOCABULARIES = {"WordLevel": 267_744, "PretrainedTokenizer": 50_265}
PAPER_INSTANCES, PAPER_EPOCHS, PAPER_BATCH = 10_000_000, 2, 8  # Table 4


@app("plan")
def main(cfg: DictConfig) -> None:
    """Prints one row a training stage; nothing is written."""
    rows = [causal_row(cfg), *masked_rows(cfg)]
    lines = [with_hours(cfg, row) for row in rows]
    print(tabulate(lines, headers="keys", intfmt=",", floatfmt=".2g"))
    print(f"\n{assumptions(cfg, sum(row['operations'] for row in rows))}")
    if cfg.scale == "paper":
        implied = PAPER_INSTANCES * PAPER_EPOCHS // PAPER_BATCH
        print(
            f"\nTable 4's {cfg.masked.long.steps:,} steps are not the {implied:,} that its "
            f"{PAPER_INSTANCES:,} instances, {PAPER_EPOCHS} epochs and batches of {PAPER_BATCH} "
            f"imply; they are {cfg.masked.long.steps * PAPER_BATCH // PAPER_EPOCHS:,} instances."
        )
    if cfg.one_step:
        print(tabulate([causal_step(cfg), masked_step(cfg)], headers="keys", floatfmt=".2f"))


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


def causal_row(cfg: DictConfig) -> dict[str, Any]:
    """The stage train_causal; sizes of one kernel's model, operations of all."""
    size = cfg.causal
    module = on_meta(lambda: causal_training(cfg))
    batch = torch.empty(size.batch_size, size.length + 1, device="meta")
    one_step = module.flops(batch, size.batch_size * size.length)
    return {
        "stage": f"train_causal ({len(cfg.kernels)} kernels)",
        "parameters": parameters(module),
        "sequence": size.length,
        "batch": size.batch_size,
        "steps": size.steps,
        "tokens read": size.steps * size.batch_size * size.length,
        "operations": len(cfg.kernels) * size.steps * one_step,
        "optimizer": recipe(size.optimizer, size.schedule),
    }


def masked_rows(cfg: DictConfig) -> list[dict[str, Any]]:
    """The stages train_masked_short and train_masked_long."""
    return [masked_row(cfg, name) for name in ("short", "long")]


def masked_row(cfg: DictConfig, name: str) -> dict[str, Any]:
    """One of them; its output layer sees the tokens that are asked for."""
    size = cfg.masked[name]
    module = on_meta(lambda: masked_training(cfg, size))
    batch = {"input_ids": torch.empty(size.batch_size, size.length, device="meta")}
    one_step = module.flops(batch, cfg.masked.fraction * size.batch_size * size.length)
    return {
        "stage": f"train_masked_{name}",
        "parameters": parameters(module),
        "sequence": size.length,
        "batch": size.batch_size,
        "steps": size.steps,
        "tokens read": size.steps * size.batch_size * size.length,
        "operations": size.steps * one_step,
        "optimizer": recipe(cfg.masked.optimizer, {**cfg.schedule, "peak": size.learning_rate}),
    }


def recipe(optimizer: Mapping[str, Any], schedule: Mapping[str, Any]) -> str:
    """The optimizer and its learning rates in words."""
    warmup = schedule.get("warmup_steps") or schedule.get("warmup_proportion")
    clip = optimizer.get("max_grad_norm")
    return (
        f"{class_name(optimizer)}, {class_name(schedule)}, lr {schedule['peak']:g}, "
        f"warm-up {warmup:g}" + (f", clip {clip:g} a tensor" if clip else "")
    )


def vocabulary(cfg: DictConfig, task: str) -> int:
    """Its size: given, or what the tokenizer of the scale makes."""
    tokenizer = cfg.tokens[f"{task}_tokenizer"]
    known = KNOWN_VOCABULARIES.get(tokenizer._target_.rpartition(".")[2])
    return cfg.vocabulary[task] or known or cfg.tokens.vocabulary_size


def causal_model(cfg: DictConfig) -> CausalLanguageModel:
    """The causal LM at the scale's size, random weights."""
    size = {key: cfg.causal[key] for key in ("layers", "width", "heads", "feedforward", "dropout")}
    return CausalLanguageModel(
        **size, kernel=Exponential(), vocabulary_size=vocabulary(cfg, "causal")
    )


def masked_model(cfg: DictConfig, length: int) -> RobertaForMaskedLM:
    """The masked LM at the scale's size, random weights."""
    keys = ("layers", "width", "heads", "feedforward", "block", "dropout")
    size = {key: cfg.masked[key] for key in keys}
    return build_roberta(**size, length=length, vocabulary_size=vocabulary(cfg, "masked"))


def causal_training(cfg: DictConfig) -> CausalTraining:
    """The causal LM in training, without warm-up."""
    return CausalTraining(
        causal_model(cfg),
        schedule=LinearWarmupDecay(peak=cfg.causal.learning_rate, warmup_proportion=0.0, steps=2),
        optimizer=instantiate(cfg.causal.optimizer),
        seed=cfg.seed,
    )


def masked_training(cfg: DictConfig, size: DictConfig) -> MaskedTraining:
    """The masked LM of a length in training, without warm-up."""
    return MaskedTraining(
        masked_model(cfg, size.length),
        schedule=LinearWarmupDecay(peak=size.learning_rate, warmup_proportion=0.0, steps=2),
        optimizer=instantiate(cfg.masked.optimizer),
        seed=cfg.seed,
    )


def on_meta(build: Callable[[], LanguageModeling]) -> LanguageModeling:
    """The module without memory for its weights."""
    with torch.device("meta"):
        return build()


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def causal_step(cfg: DictConfig) -> dict[str, object]:
    """One optimizer step on one sequence of random tokens."""
    tokens = torch.randint(vocabulary(cfg, "causal"), (1, cfg.causal.length + 1))
    return step_row("causal", causal_training(cfg), tokens, cfg.causal.length)


def masked_step(cfg: DictConfig) -> dict[str, object]:
    """One optimizer step on one long sequence of random tokens, 15% of them asked for."""
    long = cfg.masked.long
    tokens = torch.randint(5, vocabulary(cfg, "masked"), (1, long.length))
    labels = torch.where(torch.rand(tokens.shape) < cfg.masked.fraction, tokens, -100)
    batch = {"input_ids": tokens, "labels": labels}
    return step_row("masked_long", masked_training(cfg, long), batch, long.length)


def step_row(name: str, module: LanguageModeling, batch: object, length: int) -> dict[str, object]:
    """Loss, time and memory of one step, as a line of the table."""
    return {"one step of": name, "sequence": f"1 x {length}", **one_step(module, batch)}


if __name__ == "__main__":
    main()
