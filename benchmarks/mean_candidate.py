"""Measures what the mean of the values is worth as a candidate, on named decoders, with controls.

    python -m benchmarks.mean_candidate FILE smollm2 gemma3 qwen    # hours on one core each
    python -m benchmarks.mean_candidate FILE qwen-1.5b --few        # r = 4 alone, seven of the rows
    python -m benchmarks.mean_candidate FILE smollm2 --quick        # one window; writes nothing

FILE is a text; the published record has the test set of WikiText-103, joined as in
docs/pretrained.md. `make models` fetches the decoders. Of 8 windows of 256 tokens the second halves
are scored: KL from the exact prediction, with r vectors a query in every layer and head. A stopped
run continues. Writes results/benchmarks/mean_candidate.json and .md.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.record import FOLDER, finish, header, markdown, options, setting
from value_aware_attention import approximations
from value_aware_attention.approximations import closest_combination
from value_aware_attention.approximations.missing_mass import MeanValueSlot
from value_aware_attention.call import Call
from value_aware_attention.measurement.control import random_weights
from value_aware_attention.measurement.measure import Setting, measure
from value_aware_attention.measurement.task import Task
from value_aware_attention.named_models import named_models
from value_aware_attention.probe import loaded, window_task
from value_aware_attention.records.estimate import ratio_of_sums
from value_aware_attention.records.record import Cell
from value_aware_attention.weights import mean_of_visible, weighted_sum

LENGTH, WINDOWS, RANDOM_WINDOWS = 256, 8, 2
SIZES = (4, 16)
SEEDS = (0, 1, 2)
MORE = {4: (5, 6, 8), 16: (17, 20, 24)}
"""Numbers of keys of OVA that may lose as little as r vectors with the mean among them"""
Candidate = Callable[[Call, Tensor], Tensor]
"""(call, values (..., M, V)) -> one vector for each query (..., N, V)"""


class OtherCandidate(approximations.OptimalValueAware):
    """The search with another vector than the mean as the last candidate, in fp64."""

    def __init__(self, r: int, candidate: Candidate) -> None:
        super().__init__(r, mean=True)
        self.candidate = candidate

    def extra_repr(self) -> str:
        return f"r={self.r}, candidate={self.candidate.__name__}"

    @torch.no_grad()
    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        call = replace(call, **{n: getattr(call, n).double() for n in ("query", "key", "value")})
        problem = closest_combination.flatten(call, mean=True)
        vector = self.candidate(call, call.value).expand(*call.batch, -1, -1)
        problem = replace(problem, mean=_moved(call, problem, vector))
        indices, weights = closest_combination.solve(problem, self.r, self.search, self.engine)
        indices, weights = closest_combination.mean_apart(problem, indices, weights)
        indices, weights = (x.reshape(*call.batch, *x.shape[-2:]) for x in (indices, weights))
        return weighted_sum(indices, weights[..., :-1], call.value) + weights[..., -1:] * vector


def _moved(call: Call, problem: closest_combination.Problem, vector: Tensor) -> Tensor:
    """Converts a vector of each query to the centred values of the problem, in its unit.

    Every key is visible to a query, as no text has padding.
    """
    centre = (call.value - call.centred.value)[..., :1, :]
    return (vector - centre).flatten(0, -3) / problem.unit[:, None, None]


def zeros(call: Call, value: Tensor) -> Tensor:
    """Lets the weights sum to less than 1."""
    return torch.zeros_like(value[..., :1, :]).expand(*value.shape[:-2], call.query.shape[-2], -1)


def mean_of_half(call: Call, value: Tensor) -> Tensor:
    """Averages a random half of the visible values."""
    half = torch.rand(call.keys, generator=torch.Generator().manual_seed(0)) < 0.5
    half[0] = True
    visible = half[None] if call.visible is None else call.visible & half
    return mean_of_visible(value, visible, call.query.shape[-2])


class MeanOfOthers(approximations.OptimalValueAware):
    """Keeps the keys of OVA with the mean; the candidate is the mean of the values left out."""

    def __init__(self, r: int) -> None:
        super().__init__(r, mean=True)

    def _others(self, call: Call, chosen: approximations.SparseWeights) -> tuple[Tensor, Tensor]:
        """Returns the mean of the values left out, and how many these are."""
        dense = approximations.SparseWeights(chosen.indices, chosen.weights, chosen.error)
        left_out = dense.dense(call.keys) <= 0
        if call.visible is not None:
            left_out = left_out & call.visible
        return mean_of_visible(call.value, left_out, left_out.shape[-2]), left_out.sum(dim=-1)

    @torch.no_grad()
    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        call = replace(call, **{n: getattr(call, n).double() for n in ("query", "key", "value")})
        chosen = self.select(**{**call.arguments(), "value": call.value})
        vector, _ = self._others(call, chosen)
        problem = closest_combination.flatten(call, mean=True)
        used = torch.cat([chosen.indices, torch.full_like(chosen.indices[..., :1], -1)], dim=-1)
        used = used.where(used >= 0, problem.mean_key).flatten(0, -3)
        unused = torch.nn.functional.pad(chosen.weights <= 0, (0, 1)).flatten(0, -3)
        repeated = used[..., -1:].expand_as(used)
        used = repeated.where(unused, used)
        problem = replace(problem, mean=_moved(call, problem, vector))
        weights = closest_combination.optimal_weights(problem, used)
        weights = weights.reshape(*call.batch, *weights.shape[-2:])
        used = used.reshape(weights.shape)
        is_mean = used == problem.mean_key
        share = (weights * is_mean).sum(dim=-1, keepdim=True)
        output = weighted_sum(used.masked_fill(is_mean, 0), weights * ~is_mean, call.value)
        return output + share * vector


class AttentionWeights(MeanOfOthers):
    """Keeps the keys of OVA with the mean, with attention's weights; the mean has the rest."""

    @torch.no_grad()
    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        chosen = self.select(**call.arguments())
        alpha = call.weights.expand(*call.batch, -1, -1).gather(-1, chosen.indices)
        alpha = alpha * (chosen.weights > 0)
        others, count = self._others(call, chosen)
        missing = (1 - alpha.sum(dim=-1, keepdim=True)).clamp_min(0) * (count > 0)[..., None]
        return weighted_sum(chosen.indices, alpha, call.value) + missing * others


def methods(r: int) -> dict[str, approximations.Approximation]:
    """Builds the rows of the table: how keys are chosen, with or without the mean, and weights."""
    of = approximations
    return {
        "by weight, attention's weights": of.OptimalValueOblivious(r),
        "by weight, optimal weights": of.ObliviousKeysOptimalWeights(r),
        "by weight and the mean of the others, attention's weights": MeanValueSlot(r, "exact"),
        "by weight and the mean of the others, its weight that of their mean key": MeanValueSlot(
            r, "mean_key"
        ),
        "by weight and the mean, optimal weights": of.ObliviousKeysOptimalWeights(r, mean=True),
        "for the output, attention's weights": of.ValueAwareKeysAttentionWeights(r),
        "for the output, optimal weights (OVA)": of.OptimalValueAware(r),
        "for the output and the mean of the others, attention's weights": AttentionWeights(r),
        "for the output and the mean, optimal weights": of.OptimalValueAware(r, mean=True),
        "control: zeros in place of the mean": OtherCandidate(r, zeros),
        "control: the mean of a random half": OtherCandidate(r, mean_of_half),
        "control: the mean of the values left out": MeanOfOthers(r),
        **{f"control: OVA with {more} keys": of.OptimalValueAware(more) for more in MORE[r]},
    }


AT_RANDOM = (
    "by weight, attention's weights",
    "by weight and the mean of the others, its weight that of their mean key",
    "for the output, optimal weights (OVA)",
    "for the output and the mean, optimal weights",
)
"""Methods that are measured with random weights too"""
OVA, WITH_MEAN, SLOT = AT_RANDOM[2], AT_RANDOM[3], AT_RANDOM[1]
FEW = (
    *AT_RANDOM, "by weight and the mean, optimal weights", "control: zeros in place of the mean",
    "control: OVA with 5 keys",
)  # fmt: skip
"""Methods of a large decoder, with 4 vectors a query"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", choices=[*named_models()])
    parser.add_argument("--few", action="store_true", help="r = 4 alone, seven of the rows")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    kept = FOLDER / "mean_candidate.json"
    record = header("mean_candidate")
    record |= {"text": arguments.text.stem, "length": LENGTH, "models": {}}
    if kept.exists() and not arguments.quick:
        before = json.loads(kept.read_text())
        if before["source"] == record["source"]:
            record["models"] = before["models"]
    for name in arguments.models:
        windows = 1 if arguments.quick else WINDOWS
        record["models"][name] = {
            "measured": f"{record['date']}, {record['run_on']['hardware']}",
            **measured(name, text, windows, few=arguments.few),
        }
        finish("mean_candidate", record, page(record), keep=not arguments.quick)


def measured(name: str, text: str, windows: int, *, few: bool) -> dict[str, Any]:
    """Measures a decoder with its own weights, and with random ones; `few` = r = 4 and `FEW`."""
    sizes, rows = (SIZES[:1], FEW) if few else (SIZES, ())
    model, tokenizer = loaded(name)
    task, read = window_task(
        model, tokenizer, text, windows=windows, length=LENGTH, seed=0, context=LENGTH // 2
    )
    exact, own = cells(task, name, sizes, rows)
    of_seeds = {}
    task.texts, task.exact = task.texts[:RANDOM_WINDOWS], {}
    for seed in SEEDS[: 1 if windows == 1 else None]:
        task.model, task.exact = random_weights(model, seed), {}
        _, of_seeds[str(seed)] = cells(task, f"{name}, random weights {seed}", sizes, AT_RANDOM)
    return {
        "model": named_models()[name]["model"], "windows": len(read), "exact": exact,
        "cells": own, "random": of_seeds,
    }  # fmt: skip


def cells(
    task: Task, name: str, sizes: Sequence[int], names: Sequence[str]
) -> tuple[float, list[dict[str, Any]]]:
    """Returns exact attention's perplexity, and the KL of the named methods; no names = all."""
    rows = []
    for r in sizes:
        settings = [
            Setting(m, {"r": r}, partial(_same, made))
            for m, made in methods(r).items()
            if not names or m in names
        ]
        record = measure(
            task, settings, layers=None, cell_errors=False, name=name,
            cache=Path(".cache/benchmark/mean_candidate"), progress=True,
        )  # fmt: skip
        exact, *others = record.cells
        ova = next(cell for cell in others if cell.approximation == OVA)
        rows += [told(cell, ova, r) for cell in others]
    return exact.value, rows


def _same(method: approximations.Approximation, layer: int) -> approximations.Approximation:
    return method


def told(cell: Cell, ova: Cell, r: int) -> dict[str, Any]:
    """Describes a cell; intervals are paired over windows."""
    kl = cell.predictions["kl"]
    totals, base = (np.array(c.predictions["kl"].unit_totals) for c in (cell, ova))
    ratio = [float(end) for end in ratio_of_sums(totals, base)]
    return {
        "method": cell.approximation, "r": r, "perplexity": cell.value,
        "kl": kl.value, "kl_interval": [kl.low, kl.high],
        "over_ova": ratio if np.isfinite(ratio).all() else None,
    }  # fmt: skip


def page(record: dict[str, Any]) -> str:
    """Writes a table for each number of vectors, a column for each model."""
    lines = [
        "# The mean of the values as a candidate\n",
        setting(record) + "\n",
        "".join(
            f"{of['model']}: {of['windows']} windows, measured on {of['measured']}.\n"
            for of in record["models"].values()
            if "measured" in of
        ),
        f"KL in nats a scored token of {WINDOWS} windows of {LENGTH} tokens of {record['text']}, "
        "with r vectors a query in every layer and head. In brackets is its ratio to OVA's, with "
        "the paired 95% interval over windows. A row says how keys are chosen, whether the mean is "
        "one of the r, and which weights they have. The mean is that of the values left out where "
        "the weights are attention's, and of all visible values elsewhere.\n",
    ]
    for r in SIZES:
        models = {
            name: of
            for name, of in record["models"].items()
            if any(cell["r"] == r for cell in of["cells"])
        }
        rows = []
        for method in methods(r):
            row: list[object] = [method]
            for of in models.values():
                found = [c for c in of["cells"] if (c["method"], c["r"]) == (method, r)]
                row.append(_shown(found[0]) if found else "")
            rows.append(row)
        headers = [f"r = {r}", *(of["model"] for of in models.values())]
        lines += [markdown(headers, rows), ""]
        random = [[m, *(_at_random(of, m, r) for of in models.values())] for m in AT_RANDOM]
        headers[0] = f"r = {r}, random weights ({len(SEEDS)} seeds, {RANDOM_WINDOWS} windows)"
        lines += [markdown(headers, random), ""]
    return "\n".join(lines)


def _shown(cell: dict[str, Any]) -> str:
    value, ratio = cell["kl"], cell["over_ova"]
    if ratio is None or cell["method"] == OVA:
        return f"{value:.3g}"
    return f"{value:.3g} ({ratio[0]:.2f}; {ratio[1]:.2f} to {ratio[2]:.2f})"


def _at_random(model: dict[str, Any], method: str, r: int) -> str:
    """Writes the mean KL over seeds, and its ratio to OVA's."""
    cells = [cell for of_seed in model["random"].values() for cell in of_seed if cell["r"] == r]
    means = {m: np.mean([c["kl"] for c in cells if c["method"] == m]) for m in (method, OVA)}
    return f"{means[method]:.3g} ({means[method] / means[OVA]:.2f})"


if __name__ == "__main__":
    main()
