"""Measures output errors where every query meets its values in a random order.

    python -m benchmarks.permuted_values FILE smollm2 gemma3 qwen   # minutes on one core
    python -m benchmarks.permuted_values FILE smollm2 --quick       # one window; writes nothing

A control of benchmarks.mean_candidate: in each head the values are permuted among the positions
that a query sees, anew for every query, so that a weight says nothing about its value. A lead then
comes from averaging alone. Errors are relative squared output errors, the mean over layers, of some
queries of 4 windows of 256 tokens; models' own weights and random ones of three seeds. Writes
results/benchmarks/permuted_values.json and .md.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import finish, header, markdown, options, setting
from value_aware_attention import approximations, kernels
from value_aware_attention.call import Call
from value_aware_attention.error import squared_output_error
from value_aware_attention.measurement.control import random_weights
from value_aware_attention.measurement.recorded import sample_rows
from value_aware_attention.measurement.task import Task
from value_aware_attention.named_models import named_models
from value_aware_attention.probe import loaded, window_task

LENGTH, WINDOWS, SIZES, SEEDS = 256, 4, (4, 16), (0, 1, 2)
QUERIES = 8
"""Queries of each head and window"""


def methods(r: int) -> dict[str, approximations.Approximation]:
    """Builds the methods whose choices depend on weights and values alone."""
    return {
        "by weight (OVO)": approximations.OptimalValueOblivious(r),
        "by weight and the mean, optimal weights": approximations.ObliviousKeysOptimalWeights(
            r, mean=True
        ),
        "for the output (OVA)": approximations.OptimalValueAware(r),
        "for the output and the mean": approximations.OptimalValueAware(r, mean=True),
    }


def permuted(call: Call) -> Call:
    """Permutes the scores of every query among the keys that it sees, and leaves the values.

    The scores become queries of one-hot keys under the kernel exp(<q, k>), which has the same
    weights in their new order.
    """
    scores = call.kernel.log_similarity(call.query, call.key).expand(*call.batch, -1, -1)
    visible = torch.ones_like(scores, dtype=torch.bool)
    if call.visible is not None:
        visible = call.visible.expand_as(scores)
    drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0))
    # Both orders list the visible keys first, one by position and one at random.
    source = drawn.masked_fill(~visible, 2.0).argsort(dim=-1)
    target = (~visible).byte().argsort(dim=-1, stable=True)
    mixed = torch.empty_like(scores).scatter(-1, target, scores.gather(-1, source))
    # A hidden key must not overflow: its score is never used.
    mixed = mixed.masked_fill(~visible, 0.0)
    one_hot = torch.eye(call.keys, dtype=mixed.dtype).expand(*call.batch[:-1], 1, -1, -1)
    return Call.of(
        mixed, one_hot, call.value, kernel=kernels.Exponential(1.0), attn_mask=visible
    )  # fmt: skip


def errors(calls: list[Call], r: int) -> dict[str, float]:
    """Averages the relative output error of every method over layers."""
    found: dict[str, list[float]] = {name: [] for name in methods(r)}
    for call in calls:
        exact = call.output()
        for name, method in methods(r).items():
            error = squared_output_error(method(**call.arguments()), exact)
            found[name].append((error.sum() / exact.square().sum()).item())
    return {name: float(np.mean(of_layers)) for name, of_layers in found.items()}


def rows_of(task: Task) -> list[Call]:
    """Takes `QUERIES` queries of each head in every layer, of all windows together."""
    windows = [task.layer_calls(number) for number in range(task.parts)]
    calls = [Call.joined(layer) for layer in zip(*windows, strict=True)]
    return [sample_rows(call, QUERIES * call.query.shape[:2].numel()) for call in calls]


def measured(name: str, text: str, windows: int) -> Iterator[dict[str, Any]]:
    """Measures a decoder: its own weights, then random ones; values in order, then permuted."""
    model, tokenizer = loaded(name)
    task, _ = window_task(
        model, tokenizer, text, windows=windows, length=LENGTH, seed=0, context=LENGTH // 2
    )
    orders: dict[str, Callable[[Call], Call]] = {"in order": replace, "permuted": permuted}
    for weights in ("own", *SEEDS[: 1 if windows == 1 else None]):
        if weights != "own":
            task.model = random_weights(model, weights)
        calls = rows_of(task)
        for values, order in orders.items():
            for r in SIZES:
                of_methods = errors([order(call) for call in calls], r)
                yield {"weights": weights, "values": values, "r": r, "errors": of_methods}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", choices=[*named_models()])
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    record = header("permuted_values") | {"text": arguments.text.stem, "models": {}}
    for name in arguments.models:
        cells = list(measured(name, text, 1 if arguments.quick else WINDOWS))
        record["models"][name] = {"model": named_models()[name]["model"], "cells": cells}
    finish("permuted_values", record, page(record), keep=not arguments.quick)


def page(record: dict[str, Any]) -> str:
    """Renders a table for each r: errors, and in brackets their ratio to OVA's."""
    lines = [
        "# Output errors where values are permuted\n",
        f"{setting(record)}\n",
        "Relative squared output error, the mean over layers; in brackets its ratio to that of the "
        "values chosen for the output (OVA). Permuted: every query meets its values in a random "
        f"order. Random weights: the mean over {len(SEEDS)} seeds.\n",
    ]
    for r in SIZES:
        rows = []
        for of in record["models"].values():
            for values in ("in order", "permuted"):
                for own in (True, False):
                    cells = [
                        cell["errors"] for cell in of["cells"]
                        if (cell["values"], cell["r"]) == (values, r)
                        if (cell["weights"] == "own") == own
                    ]  # fmt: skip
                    means = {name: np.mean([cell[name] for cell in cells]) for name in cells[0]}
                    base = means["for the output (OVA)"]
                    numbers = [f"{mean:.3g} ({mean / base:.2f})" for mean in means.values()]
                    rows.append([of["model"], "own" if own else "random", values, *numbers])
        head = [f"r = {r}", "weights", "values", *methods(r)]
        lines += [markdown(head, rows, names=3), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
