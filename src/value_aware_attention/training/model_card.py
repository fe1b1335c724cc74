"""The README.md of a trained model's folder: data, training, held-out metrics, how to load it."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

__all__ = ["model_card"]

PACKAGE = "value-aware-attention"
PAPER = "*Value-aware Approximate Attention*, Gupta & Berant, EMNLP 2021"
TASKS = {
    "perplexity": ("text-generation", "causal language model"),
    "error": ("fill-mask", "masked language model"),
}
METRICS = {
    "loss": "loss (nats a token)",
    "perplexity": "perplexity",
    "error": "error (% of masked tokens predicted wrongly)",
}


def model_card(metrics: Mapping[str, Any], *, data: str, scale: str, kernel: str) -> str:
    """A model card in the hub's format: metadata, and what a training run measured and set.

    `metrics` is what the run records: model, parameters, steps, tokens, hyperparameters, the
    learning curve, and the last loss with the perplexity (causal) or error (masked). `data` names
    the text, `scale` the run's size, `kernel` what attention computes.
    """
    metric = "perplexity" if "perplexity" in metrics else "error"
    task, kind = TASKS[metric]
    attention = metrics["hyperparameters"].get("attention", "exact attention")
    header = ModelCardData(
        language="en",
        library_name="transformers" if metric == "error" else PACKAGE,
        pipeline_tag=task,
        tags=[PACKAGE, "attention", kernel],
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
    return f"""---
{header.to_yaml().strip()}
---

# {metrics["model"]}

A {kind} with {_number(metrics["parameters"])} parameters, trained with {attention} and the
{kernel} kernel to measure approximations of attention ({PAPER}).

Scale: {scale}. Data: {data}. It saw {_number(metrics["tokens"])} tokens in
{_number(metrics["steps"])} optimizer steps ({metrics["hyperparameters"]["optimizer"]}).

```python
{_loading(metrics, metric)}
```

## On held-out text

Measured during training, on the first batches of the held-out documents.

{_table(metrics["curve"], {"step": "step"} | METRICS)}

## Training

{_hyperparameters(metrics["hyperparameters"])}
"""


def _loading(metrics: Mapping[str, Any], metric: str) -> str:
    """Code that runs beside the model's folder."""
    name = metrics["model"]
    if metric == "error" and "attention" not in metrics["hyperparameters"]:
        lines = [
            "from transformers import AutoModelForMaskedLM, AutoTokenizer",
            "",
            f'model = AutoModelForMaskedLM.from_pretrained("{name}")',
        ]
    else:
        load = "load_masked" if metric == "error" else "CausalLanguageModel"
        call = f'{load}("{name}")' if metric == "error" else f'{load}.load(Path("{name}"))'
        lines = [
            *(["from pathlib import Path", ""] if metric != "error" else []),
            "from transformers import AutoTokenizer",
            f"from value_aware_attention.models import {load}",
            "",
            f"model = {call}",
        ]
    return "\n".join([*lines, f'tokenizer = AutoTokenizer.from_pretrained("{name}")'])


def _hyperparameters(values: Mapping[str, Any]) -> str:
    given = [
        {"name": name.replace("_", " "), "value": values[name]}
        for name in sorted(values)
        if values[name] is not None
    ]
    return _table(given, {"name": "hyperparameter", "value": "value"})


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Markdown; columns that no row has are left out."""
    used = {key: label for key, label in columns.items() if any(key in row for row in rows)}
    lines = [used.values(), ["---"] * len(used)]
    lines += [[_number(row.get(key, "")) for key in used] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
