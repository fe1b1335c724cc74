"""Estimates the size and the operations of a training, and measures one step of it."""

import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from value_aware_attention.call import seconds_now
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.models import build_roberta
from value_aware_study.data.batches import Batch
from value_aware_study.training.modules import LanguageModeling
from value_aware_study.training.optimizers import LinearWarmupDecay

KNOWN_VOCABULARIES = {"WordLevel": 267_744, "PretrainedTokenizer": 50_265}
"""Sizes known before any text is read: the paper's rule on WikiText-103, and RoBERTa's BPE"""
COUNTED = (
    "Operations: 6 a token and parameter it is multiplied with, and 12 layers x width x "
    "sequence a token for attention; forward and backward, all kernels together."
)


def row(name: str, section: DictConfig, vocabulary: int) -> dict[str, Any]:
    """Computes sizes of a model and operations of its training, from the shapes alone."""
    size, length, steps = section.batches.batch_size, sequence(section), section.fit.steps
    with torch.device("meta"):  # no memory for weights
        module = untrained(section, vocabulary)
        batch = random_batch(section, vocabulary, size)
    # the output layer of a masked model reads only the masked tokens
    per_step = module.flops(batch, section.get("fraction", 1) * size * length)
    return {
        "stage": f"train_{name}",
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "sequence": length,
        "batch": size,
        "steps": steps,
        "tokens read": steps * size * length,
        "operations": steps * per_step,
        "optimizer": recipe(section.module.optimizer, section.module.schedule),
    }


def with_hours(row: Mapping[str, Any], operations_per_second: float | None) -> dict[str, Any]:
    """Adds the estimated hours to a row, unless the speed is None; the longest text stays last."""
    if operations_per_second is None:
        return dict(row)
    hours = row["operations"] / operations_per_second / 3600
    return {name: row[name] for name in row if name != "optimizer"} | {
        "hours": hours, "optimizer": row["optimizer"]
    }  # fmt: skip


def assumptions(operations: float, operations_per_second: float | None) -> str:
    """Explains what the last columns count, and the speed that the hours assume."""
    if operations_per_second is None:
        return COUNTED
    return (
        f"{COUNTED}\nHours: an estimate, not measured; {operations_per_second:.1e} operations "
        "a second are assumed (plan.operations_per_second), "
        f"{operations / operations_per_second / 3600:.2g} hours of training in all. Tokenizing and "
        "evaluating come on top."
    )


def class_name(component: Mapping[str, Any]) -> str:
    return str(component["_target_"].rpartition(".")[2])


def recipe(optimizer: Mapping[str, Any], schedule: Mapping[str, Any]) -> str:
    warmup = schedule.get("warmup_steps") or schedule.get("warmup_proportion")
    clip = optimizer.get("max_grad_norm")
    return (
        f"{class_name(optimizer)}, {class_name(schedule)}, lr {schedule['peak']:g}, "
        f"warm-up {warmup:g}" + (f", clip {clip:g} a tensor" if clip else "")
    )


def sequence(section: DictConfig) -> int:
    """Returns the number of tokens that a model reads at a time."""
    return int(section.get("positions", section.batches).length)


def vocabulary_size(section: DictConfig, chosen: DictConfig, tokens: DictConfig) -> int:
    """Returns a vocabulary's size: the chosen one, or that of the scale's tokenizer."""
    task = "masked" if "positions" in section else "causal"
    published = KNOWN_VOCABULARIES.get(class_name(tokens[f"{task}_tokenizer"]))
    return int(chosen[task] or published or tokens.vocabulary_size)


def untrained(section: DictConfig, vocabulary: int) -> LanguageModeling:
    """Builds a training module with random weights and no warm-up."""
    model = (
        build_roberta(**section.layers, **section.positions, vocabulary_size=vocabulary)
        if "positions" in section
        else instantiate(section.model, vocabulary_size=vocabulary)
    )
    module: LanguageModeling = instantiate(section.module, model)
    module.schedule = LinearWarmupDecay(
        peak=section.module.schedule.peak, warmup_proportion=0.0, steps=2
    )
    return module


def random_batch(section: DictConfig, vocabulary: int, count: int) -> Batch:
    """Draws `count` random sequences; a masked model predicts the share `fraction` of them."""
    length = sequence(section)
    if "positions" not in section:
        return torch.randint(vocabulary, (count, length + 1))
    tokens = torch.randint(5, vocabulary, (count, length))
    return {
        "input_ids": tokens,
        "labels": torch.where(torch.rand(tokens.shape) < section.fraction, tokens, IGNORED),
    }


def one_step(module: LanguageModeling, batch: Batch) -> dict[str, float]:
    """Measures loss (nats), seconds and peak memory (GiB) of a training step on `batch`.

    The module and the batch are on the same device. Memory is that of the GPU, or the most that the
    process ever held. Raises ValueError if the loss or a parameter is not finite afterwards.
    """
    on_gpu = module.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(module.device)
    optimizer = module.train().configure_optimizers()["optimizer"]
    start = seconds_now()
    loss = module.loss(batch)
    loss.backward()
    optimizer.step()
    value = float(loss.detach())
    seconds = seconds_now() - start
    if not (all(bool(p.isfinite().all()) for p in module.parameters()) and torch.isfinite(loss)):
        raise ValueError(f"the loss is {value} and the parameters are not all finite after a step")
    if on_gpu:
        memory = torch.cuda.max_memory_allocated(module.device)
    else:  # macOS counts bytes, others KiB
        unit = 1 if sys.platform == "darwin" else 1024
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"loss": value, "seconds": seconds, "peak_memory_gib": memory / 2**30}
