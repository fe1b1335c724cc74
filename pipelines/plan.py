"""Prints what a scale amounts to: parameters, tokens, steps, lengths, batches, optimizers.

python -m pipelines.plan scale=paper
python -m pipelines.plan scale=paper plan.one_step=true   # and one real step of each model
"""

import torch
from omegaconf import DictConfig
from tabulate import tabulate
from transformers import RobertaForMaskedLM

from pipelines.app import app
from value_aware_attention.kernels import Exponential
from value_aware_attention.models import CausalLanguageModel, build_roberta
from value_aware_attention.training.causal import CausalTraining
from value_aware_attention.training.masked import MaskedTraining
from value_aware_attention.training.module import LanguageModeling
from value_aware_attention.training.one_step import one_step
from value_aware_attention.training.schedules import InverseSquareRoot, LinearWarmupDecay

# Known before any text is read: the paper's vocabulary rule on WikiText-103, RoBERTa's BPE.
KNOWN_VOCABULARIES = {"WordLevel": 267_744, "PretrainedTokenizer": 50_265}
PAPER_INSTANCES, PAPER_EPOCHS, PAPER_BATCH = 10_000_000, 2, 8  # Table 4


@app("plan")
def main(cfg: DictConfig) -> None:
    """Prints one row a training stage; nothing is written."""
    print(tabulate([causal_row(cfg), *masked_rows(cfg)], headers="keys", intfmt=","))
    if cfg.scale == "paper":
        implied = PAPER_INSTANCES * PAPER_EPOCHS // PAPER_BATCH
        print(
            f"\nTable 4's {cfg.masked.long.steps:,} steps are not the {implied:,} that its "
            f"{PAPER_INSTANCES:,} instances, {PAPER_EPOCHS} epochs and batches of {PAPER_BATCH} "
            f"imply; they are {cfg.masked.long.steps * PAPER_BATCH // PAPER_EPOCHS:,} instances."
        )
    if cfg.one_step:
        print(tabulate([causal_step(cfg), masked_step(cfg)], headers="keys", floatfmt=".2f"))


def causal_row(cfg: DictConfig) -> dict[str, object]:
    """The stage train_causal; the same for every kernel."""
    size = cfg.causal
    return {
        "stage": f"train_causal ({len(cfg.kernels)} kernels)",
        "parameters": parameters(lambda: causal_model(cfg)),
        "sequence": size.length,
        "batch": size.batch_size,
        "steps": size.steps,
        "tokens read": size.steps * size.batch_size * size.length,
        "optimizer": f"AdamW, inverse sqrt, lr {size.learning_rate:g}, W {size.warmup_steps}",
    }


def masked_rows(cfg: DictConfig) -> list[dict[str, object]]:
    """The stages train_masked_short and train_masked_long."""
    return [
        {
            "stage": f"train_masked_{name}",
            "parameters": parameters(lambda size=size: masked_model(cfg, size.length)),
            "sequence": size.length,
            "batch": size.batch_size,
            "steps": size.steps,
            "tokens read": size.steps * size.batch_size * size.length,
            "optimizer": f"BertAdam, linear, lr {size.learning_rate:g}, "
            f"warm-up {size.warmup_proportion:g}, clip {cfg.masked.max_grad_norm:g} a tensor",
        }
        for name, size in (("short", cfg.masked.short), ("long", cfg.masked.long))
    ]


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


def parameters(build) -> int:
    """Counted without allocating any."""
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def causal_step(cfg: DictConfig) -> dict[str, object]:
    """One optimizer step on one sequence of random tokens."""
    schedule = InverseSquareRoot(peak=cfg.causal.learning_rate, warmup_steps=1)
    model = causal_model(cfg)
    module = CausalTraining(
        model, schedule=schedule, weight_decay=cfg.causal.weight_decay, seed=cfg.seed
    )
    tokens = torch.randint(vocabulary(cfg, "causal"), (1, cfg.causal.length + 1))
    return step_row("causal", module, tokens, cfg.causal.length)


def masked_step(cfg: DictConfig) -> dict[str, object]:
    """One optimizer step on one long sequence of random tokens, 15% of them asked for."""
    long, size = cfg.masked.long, vocabulary(cfg, "masked")
    schedule = LinearWarmupDecay(peak=long.learning_rate, warmup_proportion=0.0, steps=2)
    module = MaskedTraining(
        masked_model(cfg, long.length),
        schedule=schedule,
        weight_decay=cfg.masked.weight_decay,
        max_grad_norm=cfg.masked.max_grad_norm,
        seed=cfg.seed,
    )
    tokens = torch.randint(5, size, (1, long.length))
    labels = torch.where(torch.rand(tokens.shape) < cfg.masked.fraction, tokens, -100)
    return step_row("masked_long", module, {"input_ids": tokens, "labels": labels}, long.length)


def step_row(name: str, module: LanguageModeling, batch: object, length: int) -> dict[str, object]:
    """Loss, time and memory of one step, as a line of the table."""
    return {"one step of": name, "sequence": f"1 x {length}", **one_step(module, batch)}


if __name__ == "__main__":
    main()
