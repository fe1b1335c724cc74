"""The README.md of a trained model's folder: data, training, held-out metrics, how to load it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData
from tabulate import tabulate

from value_aware_study.safe_text import escaped


class Task(NamedTuple):
    """Names a kind of language model as the hub and transformers do."""

    tag: str
    name: str
    auto_class: str
    imports: str  # registers the model type with transformers


CARD_TASKS = {
    "perplexity": Task(
        "text-generation",
        "causal language model",
        "AutoModelForCausalLM",
        "import value_aware_attention.models\n",
    ),
    "error_percent": Task("fill-mask", "masked language model", "AutoModelForMaskedLM", ""),
}
METRIC_NAMES = {
    "loss": "loss (nats a token)",
    "perplexity": "perplexity",
    "error_percent": "error (% of masked tokens predicted wrongly)",
}


def model_card(metrics: Mapping[str, Any], *, data: str, scale: str, kernel: str) -> str:
    """Writes a model card in the hub's format: metadata, settings and results of a training run.

    `metrics` is what the run records: model, parameters, steps, tokens, hyperparameters, the
    learning curve, and the last loss with the perplexity (causal) or error in percent (masked).
    `data` names the text, `scale` the run's size, `kernel` what attention computes.
    """
    metric = "perplexity" if "perplexity" in metrics else "error_percent"
    task = CARD_TASKS[metric]
    attention = metrics["hyperparameters"].get("attention", "exact attention")
    return f"""---
{_metadata(metrics, metric, data=data, kernel=kernel).to_yaml().strip()}
---

# {escaped(metrics["model"])}

A {task.name} with {_number(metrics["parameters"])} parameters,
trained with {escaped(attention)} and the {escaped(kernel)} kernel to measure approximations of
attention (*Value-aware Approximate Attention*, Gupta & Berant, EMNLP 2021).

Scale: {escaped(scale)}. Data: {escaped(data)}. It saw {_number(metrics["tokens"])} tokens in
{_number(metrics["steps"])} optimizer steps ({escaped(metrics["hyperparameters"]["optimizer"])}).

```python
{_loading(metrics, task)}
```

## On held-out text

Measured during training, on the first batches of the held-out documents.

{_table(metrics["curve"], {"step": "step"} | METRIC_NAMES)}

## Training

{_hyperparameters(metrics["hyperparameters"])}
"""


def _metadata(metrics: Mapping[str, Any], metric: str, *, data: str, kernel: str) -> ModelCardData:
    """Returns the hub's metadata, with the loss and the `metric` on held-out text."""
    task = CARD_TASKS[metric].tag
    return ModelCardData(
        language="en",
        library_name="transformers",
        pipeline_tag=task,
        tags=["value-aware-attention", "attention", kernel],
        model_name=metrics["model"],
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type="text",
                dataset_name=f"held-out documents of {data}",
                metric_type=name,
                metric_value=metrics[name],
            )
            for name in ("loss", metric)
        ],
    )


def _loading(metrics: Mapping[str, Any], task: Task) -> str:
    """Writes code that loads the model from its folder."""
    name = json.dumps(metrics["model"], ensure_ascii=False)
    if task is CARD_TASKS["error_percent"] and "attention" in metrics["hyperparameters"]:
        return f"""from transformers import AutoTokenizer
from value_aware_attention.models import load_masked

model = load_masked({name})
tokenizer = AutoTokenizer.from_pretrained({name})"""
    return f"""{task.imports}from transformers import {task.auto_class}, AutoTokenizer

model = {task.auto_class}.from_pretrained({name})
tokenizer = AutoTokenizer.from_pretrained({name})"""


def _hyperparameters(values: Mapping[str, object]) -> str:
    return _table(
        [
            {"name": name.replace("_", " "), "value": values[name]}
            for name in sorted(values)
            if values[name] is not None
        ],
        {"name": "hyperparameter", "value": "value"},
    )


def _table(rows: Sequence[Mapping[str, object]], columns: Mapping[str, str]) -> str:
    """Writes a Markdown table without the columns that no row has."""
    used = {key: label for key, label in columns.items() if any(key in row for row in rows)}
    cells = [[_number(row.get(key, "")) for key in used] for row in rows]
    return tabulate(cells, list(used.values()), tablefmt="pipe", disable_numparse=True)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else escaped(str(value))
