"""A small SYNTHETIC run of the pipeline: invented by the formulas below, measured on nothing."""

import math
import random
from itertools import product

from synthetic import (
    attention,
    curve,
    ends,
    error,
    gap_cell,
    match,
    output_error,
    record,
)

from value_aware_attention.records.record import Cell

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


def _cell(approximation, parameters, exact, value, spread, relative):
    """Builds one cell; `spread` is half the width of its invented interval."""
    return Cell(
        approximation=approximation,
        parameters=parameters,
        error=error(relative * 1.25, relative, relative * 1.5, (relative, relative * 1.5)),
        **ends(value, exact, value - spread, value + spread),
    )


def _causal(kernel, rate):
    exact, settings = 120.0 + 10 * len(kernel), [("exact", {}, 0.0, 1.0)]
    for r in R_GRID:
        by_weight = 0.0 if r == R_GRID[-1] else r**-rate
        aware = 0.0 if r >= 65 else 0.6 * r ** -(1.6 * rate) * (1 - r / 80)
        settings.append(("optimal_v_oblivious", {"r": r}, by_weight, 0.8))
        settings.append(("optimal_v_aware", {"r": r}, aware, 0.5))
    for name, parameters, factor in _baselines():
        settings.append((name, parameters, factor * parameters["r"] ** -rate, 1.0))
    cells = []
    for name, parameters, rest, share in settings:
        perplexity = exact * math.exp(3 * rest)
        spread = perplexity * 0.03 * rest
        cells.append(_cell(name, parameters, exact, perplexity, spread, rest * share))
    flatness = {"exponential": 0.2, "polynomial": 0.5, "elu": 0.9}[kernel]
    measured = _output_error(rate, 256, 4, unit="window")
    gaps = _skewness_gap(kernel, flatness, 256, 4)
    measurement = {"attention": (attention(kernel, measured, gaps),)}
    return record(f"causal_{kernel}", "causal", kernel, 256, cells, **measurement)


def _baselines():
    for (name, parameters, factor), r in product(METHODS, SMALL_R):
        yield name, {"r": r, **parameters}, factor
    for r, seed in product((1, 4, 16), range(3)):
        yield "sampled_keys", {"r": r, "seed": seed}, 1.4 + 0.1 * seed


def _output_error(rate, keys, layers, **more):
    """Builds squared errors by size: powers of r, scaled by the norm of a layer."""
    norms = [1.0 + layer for layer in range(layers)]

    def of(sizes, level, power, last):
        def layer_curve(norm):
            return [norm * level * max(r**-power - last**-power, 0.0) for r in sizes]

        return curve(sizes, [layer_curve(n * 1.2**i) for i, n in enumerate(norms)])

    few, powers = [*SMALL_R, 64, 65], [2**i for i in range(keys.bit_length()) if 2**i <= keys]
    methods = {
        "optimal_v_oblivious": of(range(1, keys + 1), 2.0, rate, keys),
        "optimal_v_aware": of(range(1, 66), 0.8, 1.5, 65),
        "maurey_bound": of(powers, 3.0, 1.0, 1e9),
        "norm_weighted_keys_2": of(few, 4.0, rate, 1e9),
        "norm_weighted_keys_1": of(few, 4.2, rate, 1e9),
        **{name: of(few, 2.0 * factor, rate, 1e9) for name, p, factor in METHODS if not p},
    }
    matching = [_matching(keys, r, layer) for layer in (None, *range(layers)) for r in SMALL_R]
    return output_error(keys, norms, methods, matching, **more)


def _matching(keys, r, layer):
    """Matches r value-aware keys with more keys by weight, an interval and quartiles."""
    needed = min(keys, int(3 * r**1.2) + (layer or 0))
    return match(layer, r, needed, high=min(keys, needed + 2), median=r + needed // 4)


def _skewness_gap(kernel, flatness, keys, layers):
    """Yields gaps between the two approximations that are wider where the weights are flatter."""
    degrees = [(degree, 1.0 / (1 + degree / 2)) for degree in (0, 2, 4, 6)]
    first = (2 if kernel == "polynomial" else None, flatness)
    for layer, (i, (degree, flat)) in product(range(layers), enumerate([first, *degrees])):
        flat = flat * (1 - 0.08 * layer)
        uniform = {"smallest_norm_key": 0.1, "closest_to_mean_key": 1.0} if degree == 0 else {}
        yield gap_cell(
            layer,
            degree,
            keys * flat,
            {"1": 1 + 3 * flat, "4": 2 + 30 * flat**2, "16": 50 * flat},
            own=i == 0,
            kernel=kernel if i == 0 else "polynomial",
            largest_weight=0.5 - 0.4 * flat,
            rows_over_half=0.5 * (1 - flat),
            same_first_key=1 - flat,
            **uniform,
        )


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
    settings += [(name, of, 40 * factor * of["r"] ** -0.4) for name, of, factor in _baselines()]
    cells = [
        _cell(name, parameters, exact, exact + more, 0.05 * more, more / 60)
        for name, parameters, more in settings
    ]
    measured = _output_error(0.5, 512, 2, unit="sequence")
    gaps = _skewness_gap("exponential", 0.3, 512, 2)
    measurement = {"attention": (attention("exponential", measured, gaps),)}
    return record("masked_long", "masked", "exponential", 512, cells, **measurement)


def records():
    exact = _cell("exact", {}, 49.0, 49.0, 0.0, 0.0)
    short = record("masked_short", "masked", "exponential", 64, [exact])
    causal = [_causal(kernel, rate) for kernel, rate in KERNEL_RATES.items()]
    return [*causal, short, _masked_long(random.Random(0))]


def _metrics(model, metric, first, last, hyperparameters):
    rest = {"perplexity": lambda s: 0.9**s, "error_percent": lambda s: math.exp(-s / 400)}[metric]
    curve = [
        {"step": s, "loss": last / 10 + 4 * math.exp(-s / 500), metric: last + first * rest(s)}
        for s in range(200, 2001, 200)
    ]
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


def training():
    """Synthetic training metrics; the short model's hyperparameters lack most keys on purpose."""
    masked = {"batch_size": 8, "learning_rate": 5e-4, "block_positions": True, "length": 512}
    causal = {"layers": 4, "width": 128, "learning_rate": 5e-4, "precision": "32-true"}
    metrics = {
        f"causal_{kernel}": _metrics(f"causal_{kernel}", "perplexity", 500, 40 + 3 * i, causal)
        for i, kernel in enumerate(KERNEL_RATES)
    }
    metrics["masked_short"] = _metrics(
        "masked_short", "error_percent", 40, 49, {"block_positions": False}
    )
    metrics["masked_long"] = _metrics("masked_long", "error_percent", 20, 45, masked)
    return metrics


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
