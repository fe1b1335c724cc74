"""Stage survey: every method on a trained model at equal budgets, and what each attends to.

python -m pipelines.survey model=masked length=long
python -m pipelines.survey kernel=elu 'survey.budgets=[32]'
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedTokenizerFast

from pipelines.app import app, plain, write_json
from pipelines.evaluate import build_cell, header, summary
from pipelines.provenance import file_hash
from pipelines.tracking import tracked
from value_aware_attention.evaluation.attention_picture import effective_weights, first_head
from value_aware_attention.evaluation.budgets import (
    Affordable,
    closest_to_budget,
    cost_in_keys,
)
from value_aware_attention.evaluation.cells import Cell
from value_aware_attention.evaluation.grid import RecordCache, evaluate_grid
from value_aware_attention.evaluation.output_error import rounded
from value_aware_attention.evaluation.task import LayerCall, Task

NO_SEED = (None,)


@app("survey")
def main(cfg: DictConfig) -> None:
    """Writes <records>/<model>.json: the cells with their budgets, and the picture's weights."""
    if not Path(cfg.checkpoint).exists():
        raise FileNotFoundError(f"{cfg.checkpoint} is missing: train the model first (dvc repro)")
    hashes = {"checkpoint": file_hash([cfg.checkpoint]), "data": file_hash([cfg.tokens])}
    task = instantiate(cfg.task, device="cuda" if torch.cuda.is_available() else "cpu")
    calls = task.layer_calls()
    plan = [entry for budget in cfg.budgets for entry in cells(cfg, task, calls[0], budget)]
    with tracked(cfg, "survey", cfg.name, **{f"{k}_sha256": v for k, v in hashes.items()}):
        cache = RecordCache(cfg.cache, hashes | {"task": plain(cfg.task)})
        measured, _ = evaluate_grid(task, [cell for cell, _ in plan], cache)
        record = header(cfg, task, measured[0]) | hashes | {"cells": measured[:1]}
        record["cells"] += [
            result | budget for result, (_, budget) in zip(measured[1:], plan, strict=True)
        ]
        record["picture"] = picture(cfg, task, calls[0])
        write_json(Path(cfg.records) / f"{cfg.name}.json", record)
        write_json(Path(cfg.metrics) / "survey" / f"{cfg.name}.json", summary(record))


def cells(
    cfg: DictConfig, task: Task, call: LayerCall, budget: int
) -> Iterator[tuple[Cell, dict[str, float]]]:
    """Every method that this model can use, near one budget; random ones once for each seed."""
    for name, method in plain(cfg.methods).items():
        found = affordable(cfg, name, task, call, budget)
        if found is None or found.cost > task.length or not usable(build(cfg, name, found), call):
            continue
        if cfg.vary[name] is None and budget != cfg.budgets[0]:
            continue  # nothing to vary: one cell is enough
        given = method | argument(cfg, name, found)
        seeds = plain(cfg.seeds) if "seed" in method else NO_SEED
        for seed in seeds:
            seeded = given if seed is None else given | {"seed": seed}
            yield build_cell(cfg, name, seeded), {"budget": budget, "cost": rounded(found.cost)}


def affordable(
    cfg: DictConfig,
    name: str,
    task: Task,
    call: LayerCall,
    budget: int,
    within: float | None = None,
) -> Affordable | None:
    """The parameter that brings a method near a budget; what it costs where it has none."""
    sizes: dict[str, Any] = {"head_dim": task.head_dim, "is_causal": call.is_causal}
    sizes["length"] = call.key.shape[-2]
    if cfg.vary[name] is None:
        return Affordable(0, cost_in_keys(build(cfg, name, Affordable(0, 0.0)), **sizes))
    within = cfg.within if within is None else within
    make = lambda value: build(cfg, name, Affordable(value, 0.0))  # noqa: E731
    return closest_to_budget(make, budget, within=within, **sizes)


def argument(cfg: DictConfig, name: str, found: Affordable) -> dict[str, int]:
    """The varied parameter by its name."""
    return {} if cfg.vary[name] is None else {cfg.vary[name]: found.parameter}


def build(cfg: DictConfig, name: str, found: Affordable) -> nn.Module:
    """A method with the varied parameter set."""
    return instantiate(cfg.methods[name], **argument(cfg, name, found))


def usable(method: nn.Module, call: LayerCall) -> bool:
    """Whether the method approximates this kernel, under this mask."""
    kernels = getattr(method, "kernels", ())
    fits = not kernels or isinstance(call.kernel, kernels)
    return fits and (getattr(method, "supports_causal", True) or not call.is_causal)


def picture(cfg: DictConfig, task: Task, call: LayerCall) -> dict[str, Any]:
    """The weights of every method on a sentence's first tokens, in the first layer and head."""
    shown = first_head(call, cfg.picture.tokens)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(cfg.tokenizer)
    text = [tokenizer.decode([token]).strip() for token in task.first_tokens(cfg.picture.tokens)]
    panels = []
    for name in cfg.methods:
        found = affordable(cfg, name, task, shown, cfg.picture.keys, within=float("inf"))
        if found is None or not usable(method := build(cfg, name, found), shown):
            continue
        weights = effective_weights(method, shown)
        panels.append(
            {"approximation": name, "parameters": argument(cfg, name, found)}
            | {"cost": rounded(found.cost), "weights": rows(weights)}
        )
    return {"tokens": text, "kernel": cfg.kernel, "panels": panels}


def rows(weights: torch.Tensor) -> list[list[float]]:
    """A matrix as plain numbers, three digits after the point."""
    return [[round(number, 3) for number in row] for row in weights.tolist()]


if __name__ == "__main__":
    main()
