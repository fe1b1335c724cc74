"""A small SYNTHETIC set of records: invented by the formulas below, measured on nothing."""

import math
import random
from itertools import product

import pytest

RUN_ON = {
    "hardware": "no hardware, synthetic",
    "versions": {"torch": "0.0"},
    "data": "synthetic test records",
    "evaluation_units": 90,
    "targets": 5000,
}
R_GRID = (1, 2, 4, 8, 16, 32, 64, 65, 128, 256)
KERNEL_RATES = {"exponential": 0.55, "polynomial": 0.3, "elu": 0.38}


def _cell(approximation, parameters, exact, value, spread, output_error, count=5000):
    """One cell in the plan's format; `spread` is the half-width of its made-up interval."""
    low, high = value - spread, value + spread
    return {
        "approximation": approximation,
        "parameters": parameters,
        "count": count,
        "value": value,
        "low": low,
        "high": high,
        "difference": value - exact,
        "difference_low": low - exact,
        "difference_high": high - exact,
        "unit_totals": [1.0, 2.0],
        "unit_counts": [2500, 2500],
        "relative_output_error": [output_error, output_error * 1.5],
        "queries": 4096,
    }


def _record(model, task, kernel, length, cells):
    return {
        "model": model,
        "task": task,
        "kernel": kernel,
        "length": length,
        "head_dim": 64,
        "metric": "perplexity" if task == "causal" else "error",
        "scale": "synthetic",
        "unit": "window" if task == "causal" else "sequence",
        "run_on": RUN_ON,
        "cells": cells,
        "skewness": [
            {
                "layer": layer,
                "largest_weight": 0.4 - 0.1 * layer,
                "rows_over_half": 0.25 - 0.1 * layer,
                "effective_keys": 12.5 + layer,
                "keys_for_90_percent": 30.0 + layer,
            }
            for layer in range(2)
        ],
    }


def _causal(kernel, rate):
    exact, cells = 120.0 + 10 * len(kernel), []
    cells.append(_cell("exact", {}, exact, exact, 0.0, 0.0))
    for r in R_GRID:
        rest = 0.0 if r == R_GRID[-1] else r**-rate
        perplexity = exact * math.exp(3 * rest)
        spread = perplexity * 0.03 * rest
        cells.append(_cell("optimal_v_oblivious", {"r": r}, exact, perplexity, spread, rest * 0.8))
        rest = 0.0 if r >= 65 else 0.6 * r ** -(1.6 * rate) * (1 - r / 80)
        perplexity = exact * math.exp(3 * rest)
        spread = perplexity * 0.03 * rest
        cells.append(_cell("optimal_v_aware", {"r": r}, exact, perplexity, spread, rest * 0.5))
    return _record(f"causal_{kernel}", "causal", kernel, 256, cells)


def _optimal_and_window():
    for r in (*R_GRID, 512):
        yield "optimal_v_oblivious", {"r": r}, 0.0 if r == 512 else 45 * r**-0.45
        yield "optimal_v_aware", {"r": r}, 0.0 if r >= 65 else 38 * r**-0.7 * (1 - r / 80)
        yield "sliding_window", {"r": r}, 0.0 if r == 512 else 48 * r**-0.25


def _random(noise):
    for rounds, r, seed in product((1, 4, 16), (16, 64, 128, 256, 512), range(3)):
        more = 0.0 if r == 512 else 50 * (r * rounds) ** -0.2 * (1 + 0.04 * noise.random())
        yield "lsh", {"r": r, "rounds": rounds, "seed": seed}, more
    scalings = (("paper", 0.01), ("performer", 0.25))
    for (scaling, power), features, seed in product(scalings, (16, 64, 256, 1024), range(3)):
        more = 45 * (features / 16) ** -power * (1 - 0.05 * noise.random())
        yield "orf", {"features": features, "scaling": scaling, "seed": seed}, more


def _masked_long(noise):
    exact = 45.0
    settings = [("exact", {}, 0.0), *_optimal_and_window(), *_random(noise)]
    cells = [
        _cell(name, parameters, exact, exact + more, 0.05 * more, more / 60)
        for name, parameters, more in settings
    ]
    return _record("masked_long", "masked", "exponential", 512, cells)


@pytest.fixture(scope="session")
def records():
    """Synthetic records of all five models."""
    short = _record(
        "masked_short", "masked", "exponential", 64, [_cell("exact", {}, 49.0, 49.0, 0.0, 0.0)]
    )
    causal = [_causal(kernel, rate) for kernel, rate in KERNEL_RATES.items()]
    return [*causal, short, _masked_long(random.Random(0))]


def _metrics(model, metric, first, last, hyperparameters):
    steps = range(200, 2001, 200)
    curve = [
        {"step": s, "loss": last / 10 + 4 * math.exp(-s / 500), metric: last + first * 0.9**s}
        for s in steps
    ]
    if metric == "error":
        for point in curve:
            point["error"] = last + first * math.exp(-point["step"] / 400)
    return {
        "model": model,
        "parameters": 1_234_567,
        "steps": 2000,
        "tokens": 2000 * 4096,
        "curve": curve,
        "loss": curve[-1]["loss"],
        metric: curve[-1][metric],
        "hyperparameters": hyperparameters,
    }


@pytest.fixture(scope="session")
def training():
    """Synthetic training metrics; the short model's hyperparameters lack most keys on purpose."""
    masked = {"batch_size": 8, "learning_rate": 5e-4, "block_positions": True, "length": 512}
    causal = {"layers": 4, "width": 128, "learning_rate": 5e-4, "precision": "32-true"}
    metrics = {
        f"causal_{kernel}": _metrics(f"causal_{kernel}", "perplexity", 500, 40 + 3 * i, causal)
        for i, kernel in enumerate(KERNEL_RATES)
    }
    metrics["masked_short"] = _metrics("masked_short", "error", 40, 49, {"block_positions": False})
    metrics["masked_long"] = _metrics("masked_long", "error", 20, 45, masked)
    return metrics


@pytest.fixture(scope="session")
def tokens():
    """Synthetic token counts of two sources, one without evaluation text."""
    split = {"documents": 12, "characters": 60_000, "tokens": 15_000, "instances": 29}
    train = {**split, "instance_tokens": 14_790}
    held = {"documents": 2, "characters": 9000, "tokens": 2200, "instances": 4}
    return {
        "sources": {
            "numpy": {"train": train, "evaluation": {**held, "instance_tokens": 2040}},
            "scipy": {"train": train},
        },
        "vocabulary_size": 4096,
    }
