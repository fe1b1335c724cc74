"""Hyperparameters of the masked and causal language models beside Table 4 and section A.2."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import DASH, setting_value
from value_aware_study.report.published import (
    CAUSAL_SETTINGS,
    TABLE_4_LONG,
    TABLE_4_SHORT,
)
from value_aware_study.report.results import KERNELS

__all__ = ["exhibit"]

# Key of the `hyperparameters` dictionary -> the row's name, with the paper's abbreviation.
MASKED_ROWS = {
    "initialisation": "initialisation (init)",
    "instances": "training instances (INS)",
    "batch_size": "instances in a batch (BSZ)",
    "instance_length": "instance size (ISZ)",
    "length": "sequence length (SQL)",
    "learning_rate": "learning rate (LR)",
    "warmup_proportion": "linear warm-up, proportion (WRM)",
    "epochs": "epochs (EP)",
    "steps": "optimizer steps (STP)",
    "gradient_accumulation": "gradient accumulation (GAC)",
    "block_positions": "block part of the positions (POSq)",
    "dropout": "dropout",
    "optimizer": "optimizer",
    "beta_1": "β₁",
    "beta_2": "β₂",
    "momentum": "momentum (Muon)",
    "adamw_rate": "AdamW's learning rate, in parts of Muon's",
    "weight_decay": "weight decay",
    "max_grad_norm": "largest gradient norm",
    "seed": "seed",
    "schedule": "learning-rate schedule",
    "layers": "layers",
    "width": "hidden size",
    "heads": "heads",
    "feedforward": "feed-forward size",
    "block": "positions of the initial model (block)",
    "vocabulary_size": "vocabulary",
    "parameters": "parameters",
}
CAUSAL_ROWS = {
    "data": "data",
    "layers": "decoder layers",
    "width": "hidden size",
    "heads": "heads",
    "head_dim": "head size",
    "feedforward": "feed-forward size",
    "vocabulary_size": "vocabulary",
    "parameters": "parameters",
    "training_examples": "training examples",
    "length": "sequence length",
    "batch_size": "batch size",
    "epochs": "epochs",
    "steps": "optimizer steps",
    "learning_rate": "learning rate",
    "schedule": "learning-rate schedule",
    "warmup_steps": "warm-up steps",
    "optimizer": "optimizer",
    "beta_1": "β₁",
    "beta_2": "β₂",
    "momentum": "momentum (Muon)",
    "adamw_rate": "AdamW's learning rate, in parts of Muon's",
    "weight_decay": "weight decay",
    "max_grad_norm": "largest gradient norm",
    "dropout": "dropout",
    "context": "least context in evaluation",
    "seed": "seed",
}

Column = tuple[str, Mapping[str, Any]]


def _hyperparameters(training: Mapping[str, Mapping[str, Any]], model: str) -> dict[str, Any]:
    """A model's hyperparameters, with what else its metrics say about its size and length."""
    metrics = training.get(model, {})
    totals = {name: metrics.get(name) for name in ("parameters", "steps")}
    known = totals | metrics.get("hyperparameters", {})
    return {name: value for name, value in known.items() if value is not None}


def _with_seeds(training: Mapping[str, Mapping[str, Any]], model: str) -> dict[str, Any]:
    """A model's hyperparameters, with the seeds of all its trainings."""
    names = [model, *sorted(name for name in training if name.startswith(f"{model}_"))]
    every = [_hyperparameters(training, name) for name in names]
    seeds = [str(values["seed"]) for values in every if "seed" in values]
    return every[0] | ({"seed": ", ".join(seeds)} if len(seeds) > 1 else {})


def _settings(rows: Mapping[str, str], columns: Sequence[Column]) -> Table:
    """Hyperparameters down, models across; a key that no row names gets a row at the end."""
    others = sorted({key for _, values in columns for key in values} - set(rows))
    labels = {**rows, **{key: key.replace("_", " ") for key in others}}
    used = {key: label for key, label in labels.items() if any(key in v for _, v in columns)}
    text = [
        {"hyperparameter": label}
        | {column: setting_value(values.get(key)) for column, values in columns}
        for key, label in used.items()
    ]
    data = [
        {"hyperparameter": key} | {column: values.get(key) for column, values in columns}
        for key in used
    ]
    return Table(pd.DataFrame(data, dtype=object), pd.DataFrame(text))


def exhibit(training: Mapping[str, Mapping[str, Any]]) -> list[Exhibit]:
    """The masked models, and the causal ones, ours beside the paper's."""
    return [_masked(training), _causal(training)]


def _masked(training: Mapping[str, Mapping[str, Any]]) -> Exhibit:
    columns: list[Column] = [
        ("paper, RoBERTa-512", TABLE_4_SHORT),
        ("ours, short", _hyperparameters(training, "masked_short")),
        ("paper, RoBERTa-4096", TABLE_4_LONG),
        ("ours, long", _hyperparameters(training, "masked_long")),
    ]
    note = (
        f"A {DASH} is not stated, or not recorded. Our instances and batches count sequences of "
        "the model's full length (SQL), the paper's count instances of 512 tokens. The paper's "
        "numbers do not quite agree with each other: 2 epochs of 10M instances in batches of 8 are "
        "2.5M steps, while 2.476M steps are 2 epochs of 9.904M instances. The paper does not say "
        "whether its largest gradient norm is of the whole gradient or of each parameter; "
        "Bert-Adam's own clipping, which we use, is of each parameter."
    )
    title = "Table 4. Hyperparameters of the masked language models"
    table = _settings(MASKED_ROWS, columns)
    return Exhibit("table_4", title, "Ours beside the paper's.", [note], table=table, folded=True)


def _causal(training: Mapping[str, Mapping[str, Any]]) -> Exhibit:
    ours = {kernel: _with_seeds(training, f"causal_{kernel}") for kernel in KERNELS}
    trained = {kernel: values for kernel, values in ours.items() if values}
    columns: list[Column] = [("paper", CAUSAL_SETTINGS)]
    columns += [(f"ours, {kernel}", values) for kernel, values in trained.items()] or [("ours", {})]
    note = (
        f"The paper's section A.2. A {DASH} is not stated, or not recorded. The paper's 1,801,350 "
        "training examples are the lines of WikiText-103's training file, not blocks of 512 tokens."
    )
    title = "Table 4, continued. Hyperparameters of the causal language models"
    table = _settings(CAUSAL_ROWS, columns)
    caption = "Ours beside the paper's."
    return Exhibit("table_4_causal", title, caption, [note], table=table, folded=True)
