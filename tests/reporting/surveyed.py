"""SYNTHETIC records of methods at equal budgets: invented, measured on nothing."""


def cell(approximation, parameters, budget, error, value):
    low, high = value * 0.98, value * 1.02
    measured = {"value": value, "low": low, "high": high, "difference": value - 100.0}
    measured |= {"difference_low": low - 100.0, "difference_high": high - 100.0, "count": 50}
    place = {} if budget is None else {"budget": budget, "cost": budget * 1.02}
    layers = {"relative_output_error": 2 * error, "relative_output_error_low": 1.5 * error}
    layers |= {"relative_output_error_high": 3 * error}
    layers |= {"relative_output_error_by_layer": [error, 3 * error]}
    return {"approximation": approximation, "parameters": parameters} | measured | layers | place


def survey_record(task="causal"):
    """SYNTHETIC: invented numbers of one model at two budgets."""
    cells = [cell("exact", {}, None, 0.0, 100.0)]
    for budget in (16, 64):
        cells += [
            cell("optimal_v_oblivious", {"r": budget}, budget, 0.2, 110.0),
            cell("optimal_v_aware", {"r": budget}, budget, 0.02 if budget < 64 else 0.0, 101.0),
            cell("strided", {"stride": budget // 2}, budget, 0.1, 105.0),
            cell("sliding_window", {"r": budget}, budget, 0.3, 120.0),
            cell("sampled_keys", {"r": budget, "seed": 0}, budget, 0.05, 104.0),
            *(
                cell("random_keys", {"r": budget, "seed": s}, budget, 0.4, 130.0 + s)
                for s in (0, 2)
            ),
        ]
    run_on = {"hardware": "none", "versions": {"torch": "0"}, "data": "synthetic", "targets": 50}
    run_on |= {"evaluation_units": 40, "recorded_units": 8}
    weights = [[1.0, 0.0], [0.5, -0.25]]
    panels = [
        {"approximation": "exact", "parameters": {}, "cost": None, "weights": weights},
        {"approximation": "nystrom", "parameters": {}, "cost": 2.5, "weights": weights},
    ]
    return {
        **{"model": f"{task}_elu", "task": task, "kernel": "elu", "length": 256, "head_dim": 64},
        "metric": "perplexity" if task == "causal" else "error",
        **{"scale": "synthetic", "unit": "window", "run_on": run_on, "cells": cells},
        "picture": {"tokens": ["def", "f"], "kernel": "elu", "panels": panels},
    }
