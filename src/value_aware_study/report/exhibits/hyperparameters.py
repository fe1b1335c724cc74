"""The paper's table of hyperparameters (Table 4, A.2), next to ours."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from value_aware_attention.records.estimate import DASH
from value_aware_study.report import published
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import FIRST, KERNEL_NAMES, Row
from value_aware_study.report.words import plain_text

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
"""Names of hyperparameters in Table 4, with the paper's abbreviations"""
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


def table_4(training: Mapping[str, Row]) -> list[Exhibit]:
    """Shows the masked models, and the causal ones, ours next to the paper's."""
    short, long = (_hyperparameters(training, f"masked_{name}") for name in ("short", "long"))
    causal = {
        f"ours, {kernel}": _hyperparameters(training, f"causal_{kernel}") for kernel in KERNEL_NAMES
    }
    causal = {name: settings for name, settings in causal.items() if settings}
    exhibits = [
        Exhibit(
            "table_4",
            "Table 4. Hyperparameters of the masked language models",
            "Ours beside the paper's.",
            [
                f"A {DASH} means: not stated, or not recorded. Our instances and batches count "
                "sequences of the model's full length (SQL), the paper's count instances of 512 "
                "tokens. The paper's numbers do not quite agree with each other: 2 epochs of 10M "
                "instances in batches of 8 are 2.5M steps, while 2.476M steps are 2 epochs of "
                "9.904M instances. The paper does not say whether its largest gradient norm is of "
                "the whole gradient or of each parameter; Bert-Adam's own clipping, which we use, "
                "is of each parameter."
            ],
            table=_settings(
                MASKED_ROWS,
                {"paper, RoBERTa-512": published.TABLE_4_SHORT, "ours, short": short}
                | {"paper, RoBERTa-4096": published.TABLE_4_LONG, "ours, long": long},
            ),
            folded=True,
        ),
        Exhibit(
            "table_4_causal",
            "Table 4, continued. Hyperparameters of the causal language models",
            "Ours beside the paper's.",
            [
                f"The paper's section A.2. A {DASH} means: not stated, or not recorded. The "
                "paper's 1,801,350 training examples are the lines of WikiText-103's training "
                "file, not blocks of 512 tokens."
            ],
            table=_settings(CAUSAL_ROWS, {"paper": published.CAUSAL_SETTINGS, **causal}),
            folded=True,
        ),
    ]
    return exhibits[: 1 + bool(causal)]


def _hyperparameters(training: Mapping[str, Row], model: str) -> Row:
    """Collects a model's hyperparameters, its size and steps, and the seeds of its trainings."""
    trainings = model_trainings(training, model)
    first = trainings.get(FIRST, {})
    settings = [metrics.get("hyperparameters", {}) for metrics in trainings.values()] or [{}]
    seeds = [values["seed"] for values in settings if "seed" in values]
    values = {name: first.get(name) for name in ("parameters", "steps")} | settings[0]
    values |= {"seed": ", ".join(map(str, seeds))} if len(seeds) > 1 else {}
    return {name: value for name, value in values.items() if value is not None}


def model_trainings(training: Mapping[str, Row], model: str) -> dict[str, Row]:
    """Maps the names of a model's trainings to their measurements, starting with the first."""
    names = (name for name in sorted(training) if f"{name}_".startswith(f"{model}_"))
    return {name.removeprefix(model).strip("_") or FIRST: training[name] for name in names}


def _settings(rows: Mapping[str, str], columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """Tabulates hyperparameters by model; keys without a row of their own get rows at the end."""
    present = {key for settings in columns.values() for key in settings}
    labels = {key: label for key, label in rows.items() if key in present}
    labels |= {key: key.replace("_", " ") for key in sorted(present - set(rows))}
    return Table(
        pd.DataFrame(
            [
                {"hyperparameter": key}
                | {name: values.get(key) for name, values in columns.items()}
                for key in labels
            ],
            dtype=object,
        ),
        [
            {"hyperparameter": label}
            | {name: setting_value(values.get(key)) for name, values in columns.items()}
            for key, label in labels.items()
        ],
    )


def setting_value(value: Any) -> str:
    """Writes a hyperparameter as text, with flags as y and n like Table 4."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else plain_text(str(value))
