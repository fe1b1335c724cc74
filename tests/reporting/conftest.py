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
    "recorded_units": 8,
    "targets": 5000,
}
R_GRID = (1, 2, 4, 8, 16, 32, 64, 65, 128, 256)
METHODS = (
    ("oblivious_keys_optimal_weights", {}, 0.7),
    ("value_aware_keys_attention_weights", {}, 0.5),
    ("norm_weighted_keys", {"norm": 2}, 1.2),
    ("norm_weighted_keys", {"norm": 1}, 1.25),
    ("leave_one_out_keys", {}, 1.1),
)
SMALL_R = (1, 2, 4, 8, 16, 32)
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
        "relative_output_error": output_error * 1.25,
        "relative_output_error_low": output_error,
        "relative_output_error_high": output_error * 1.5,
        "relative_output_error_by_layer": [output_error, output_error * 1.5],
        "unit_squared_errors": [[output_error] * 8, [output_error * 1.5] * 8],
        "unit_squared_norms": [[1.0] * 8, [1.0] * 8],
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
    for name, parameters, factor in _baselines():
        rest = factor * parameters["r"] ** -rate
        perplexity = exact * math.exp(3 * rest)
        cells.append(_cell(name, parameters, exact, perplexity, 0.03 * rest * perplexity, rest))
    flatness = {"exponential": 0.2, "polynomial": 0.5, "elu": 0.9}[kernel]
    record = _record(f"causal_{kernel}", "causal", kernel, 256, cells)
    record["output_error"] = _output_error(kernel, rate, 256, 4)
    record["skewness_gap"] = _skewness_gap(kernel, flatness, 256, 4)
    return record


def _baselines():
    for (name, parameters, factor), r in product(METHODS, SMALL_R):
        yield name, {"r": r, **parameters}, factor
    for r, seed in product((1, 4, 16), range(3)):
        yield "sampled_keys", {"r": r, "seed": seed}, 1.4 + 0.1 * seed


def _output_error(kernel, rate, keys, layers):
    """Squared errors by size: powers of r times the norm of a layer."""
    norms = [1.0 + layer for layer in range(layers)]

    def curve(sizes, level, power, last):
        def layer_curve(norm):
            return [norm * level * max(r**-power - last**-power, 0.0) for r in sizes]

        return {
            "sizes": list(sizes),
            "layers": [layer_curve(n * 1.2**i) for i, n in enumerate(norms)],
        }

    few, powers = [*SMALL_R, 64, 65], [2**i for i in range(keys.bit_length()) if 2**i <= keys]
    methods = {
        "optimal_v_oblivious": curve(range(1, keys + 1), 2.0, rate, keys),
        "optimal_v_aware": curve(range(1, 66), 0.8, 1.5, 65),
        "maurey_bound": curve(powers, 3.0, 1.0, 1e9),
        "norm_weighted_keys_2": curve(few, 4.0, rate, 1e9),
        "norm_weighted_keys_1": curve(few, 4.2, rate, 1e9),
        **{name: curve(few, 2.0 * factor, rate, 1e9) for name, p, factor in METHODS if not p},
    }
    head = {"search": "default", "rows": 256, "keys": keys, "head_dim": 64, "kernel": kernel}
    matching = [
        {"layer": layer, "r": r, **_matching(keys, r, layer)}
        for layer in (None, *range(layers))
        for r in SMALL_R
    ]
    head |= {"units": 8, "matching_keys": matching}
    return {**head, "squared_norm": norms, "methods": methods}


def _matching(keys, r, layer):
    """More keys by weight than value-aware ones, an interval around them, and quartiles below."""
    needed = min(keys, int(3 * r**1.2) + (layer or 0))
    ends = {"low": needed - 1, "high": min(keys, needed + 2)}
    quartiles = {"lower_quartile": r, "median": r + needed // 4, "upper_quartile": needed}
    return {"keys": needed, **ends, **quartiles}


def _skewness_gap(kernel, flatness, keys, layers):
    """The flatter the weights, the wider the gap between the two approximations."""
    degrees = [(degree, 1.0 / (1 + degree / 2)) for degree in (0, 2, 4, 6)]
    own = (2 if kernel == "polynomial" else None, flatness)
    cells = []
    for layer, (i, (degree, flat)) in product(range(layers), enumerate([own, *degrees])):
        flat = flat * (1 - 0.08 * layer)
        gap = {"1": 1 + 3 * flat, "4": 2 + 30 * flat**2, "16": 50 * flat}
        cell = {"layer": layer, "kernel": kernel if i == 0 else "polynomial", "degree": degree}
        cell |= {"own": i == 0, "largest_weight": 0.5 - 0.4 * flat}
        cell |= {"effective_keys": keys * flat, "rows_over_half": 0.5 * (1 - flat)}
        cell |= {"aware": {r: 0.1 for r in gap}, "oblivious": {r: 0.1 * g for r, g in gap.items()}}
        cell["same_first_key"] = 1 - flat
        if degree == 0:
            cell |= {"smallest_norm_key": 0.1, "closest_to_mean_key": 1.0}
        cells.append(cell)
    return {"rows": 256, "cells": cells}


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
    for name, parameters, factor in _baselines():
        more = 40 * factor * parameters["r"] ** -0.4
        cells.append(_cell(name, parameters, exact, exact + more, 0.05 * more, more / 60))
    record = _record("masked_long", "masked", "exponential", 512, cells)
    record["output_error"] = _output_error("exponential", 0.5, 512, 2)
    record["skewness_gap"] = _skewness_gap("exponential", 0.3, 512, 2)
    return record


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
