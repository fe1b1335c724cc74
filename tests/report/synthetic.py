"""SYNTHETIC records, invented by the formulas of the tests, and a look into the charts of them."""

from dataclasses import replace
from functools import partial

from value_aware_attention.records.cache_record import FULL, CacheCell, CacheRecord, Estimate
from value_aware_attention.records.record import (
    Attention,
    Cell,
    CellError,
    Curve,
    ErrorAtSize,
    GapCell,
    KeysNeeded,
    MatchingKeys,
    OutputError,
    Panel,
    Picture,
    Record,
    RunOn,
    Skewness,
    SkewnessGap,
    TextRead,
)
from value_aware_study.report.frame import Results

OBLIVIOUS, AWARE = "optimal_v_oblivious", "optimal_v_aware"
RUN_ON = RunOn(hardware="no hardware, synthetic", threads=1, versions={"torch": "0.0"})
TEXT = TextRead(description="synthetic test records", targets=5000, units=90, recorded_units=8)
UNKNOWN = {"low": None, "high": None, "difference_low": None, "difference_high": None}


def ends(value, exact, low, high):
    """Returns the end metric's part of a cell of two units."""
    return {
        "count": 5000,
        "value": value,
        "low": low,
        "high": high,
        "difference": value - exact,
        "difference_low": low - exact,
        "difference_high": high - exact,
        "unit_totals": (1.0, 2.0),
        "unit_counts": (2500.0, 2500.0),
    }


def error(relative, low, high, layers, **more):
    """Returns the output error's part of a cell of eight recorded units."""
    squared = tuple((layer,) * 8 for layer in layers)
    return CellError(
        relative=relative,
        low=low,
        high=high,
        by_layer=tuple(layers),
        unit_squared_errors=squared,
        unit_squared_norms=((1.0,) * 8,) * len(layers),
        queries=4096,
        cosine_by_layer=tuple(1 - min(layer, 2) / 2 for layer in layers),
        length_by_layer=tuple(1 + layer / 4 for layer in layers),
        **more,
    )


def record(model, task, kernel, length, cells, **more):
    entries = {
        "model": model,
        "task": task,
        "kernel": kernel,
        "length": length,
        "head_dim": 64,
        "metric": "perplexity" if task == "causal" else "error",
        "scale": "synthetic",
        "unit": "window" if task == "causal" else "sequence",
        "text": TEXT,
        "run_on": RUN_ON,
        "cells": tuple(cells),
    }
    return Record(**entries | more)


def with_cells(record, change):
    """Changes every cell of a record; a cell changed to None is left out."""
    changed = (change(cell) for cell in record.cells)
    return replace(record, cells=tuple(cell for cell in changed if cell is not None))


def trained_again(records, *factors, tasks=("causal",)):
    """Adds replicates of records, whose losses above exact are multiplied by factors."""

    def moved(cell, exact, factor):
        pairs = zip(cell.unit_totals, exact.unit_totals, strict=True)
        totals = tuple(before + factor * (total - before) for total, before in pairs)
        value = exact.value * (cell.value / exact.value) ** factor
        return replace(cell, value=value, unit_totals=totals)

    again = [
        replace(
            with_cells(first, partial(moved, exact=first.cells[0], factor=factor)),
            model=f"{first.model}_{name}",
        )
        for first in records
        if first.task in tasks
        for name, factor in zip(("second", "third"), factors, strict=False)
    ]
    return [*records, *again]


def with_attention(record, **changes):
    """Exchanges parts of the measurement with a record's own kernel."""
    first, *others = record.attention
    return replace(record, attention=(replace(first, **changes), *others))


def curve(sizes, layers):
    return Curve(sizes=tuple(sizes), layers=tuple(map(tuple, layers)))


def match(layer, r, keys, **more):
    """Builds matching keys with an interval around the count and quartiles below it."""
    counts = {"low": keys - 1, "high": keys + 2, "lower_quartile": r, "upper_quartile": keys}
    return MatchingKeys(**{"layer": layer, "r": r, "keys": keys, "median": r + 1} | counts | more)


def output_error(keys, norms, methods, matching, **more):
    entries = {"search": "default", "rows": 256, "units": 8, "unit": "window", "keys": keys}
    entries |= {"heads": 2, "head_dim": 64, "causal": True, "squared_norm": tuple(norms)}
    entries |= {"methods": methods, "matching_keys": tuple(matching)}
    return OutputError(**entries | {"keys_needed": (), "errors": ()} | more)


def skewness(layers=2):
    return tuple(
        Skewness(
            layer=layer,
            largest_weight=0.4 - 0.1 * layer,
            rows_over_half=0.25 - 0.1 * layer,
            effective_keys=12.5 + layer,
            keys_for_90_percent=30.0 + layer,
        )
        for layer in range(layers)
    )


def gap_cell(layer, degree, effective_keys, wider, own=False, **more):
    """Builds a cell in which OVO's error is `wider` times OVA's, by size."""
    entries = {"layer": layer, "kernel": "polynomial", "degree": degree, "own": own}
    entries |= {"effective_keys": effective_keys, "largest_weight": 0.3, "rows_over_half": 0.2}
    entries |= {"aware": dict.fromkeys(wider, 0.1), "same_first_key": 0.5}
    entries |= {"oblivious": {r: 0.1 * times for r, times in wider.items()}}
    return GapCell(**entries | more)


def attention(kernel, measured, gap_cells=None, post_hoc=False, skew=None):
    gap = gap_cells and SkewnessGap(rows=256, cells=tuple(gap_cells))
    return Attention(
        kernel=kernel,
        post_hoc=post_hoc,
        output_error=measured,
        skewness=skewness() if skew is None else skew,
        skewness_gap=gap,
    )


def probed(kernels=("exponential",), layers=2, heads=4, sizes=(1, 2, 4, 8, 9), known=True):
    """Builds a SYNTHETIC record of a model probed with its own and other kernels."""
    cells = [Cell(approximation="exact", parameters={}, **ends(30.0, 30.0, 30.0, 30.0))]
    for r in sizes:
        for at, name in enumerate((OBLIVIOUS, AWARE, "sliding_window")):
            value = 30.0 + (at + 1) / r
            cell = Cell(
                approximation=name,
                parameters={"r": r},
                **ends(value, 30.0, value - 0.1, value + 0.1) | ({} if known else UNKNOWN),
            )
            cells.append(cell)
    return Record(
        model="tiny",
        task="causal",
        kernel=kernels[0],
        metric="perplexity",
        unit="window",
        length=16,
        head_dim=8,
        cells=tuple(cells),
        text=TextRead(
            description="words", targets=64, units=4, available_units=8, tokens=128, share_read=0.5
        ),
        run_on=RUN_ON,
        architecture="TinyForCausalLM",
        attention=tuple(
            _probed_attention(kernel, kernel != kernels[0], layers, heads, sizes, known)
            for kernel in kernels
        ),
    )


def _probed_attention(kernel, post_hoc, layers, heads, sizes, known):
    places = [(None, None), *((layer, None) for layer in range(layers))]
    places += [(layer, head) for layer in range(layers) for head in range(heads)]
    errors, needed = [], []
    for level, method in enumerate((AWARE, OBLIVIOUS), start=1):
        for place, (layer, head) in enumerate(places):
            at = {"layer": layer, "head": head, "method": method}
            for r in sizes:
                value = level * (1 + place / 10) / r
                low, high = (value / 2, value * 2) if known else (None, None)
                errors.append(ErrorAtSize(**at, r=r, error=value, low=low, high=high))
            for share, keys in ((0.01, 9), (0.05, 5), (0.1, 3)):
                count = keys + level + place % 2
                low, high = (count - 1, count + 1) if known else (None, None)
                needed.append(KeysNeeded(**at, share=share, keys=count, low=low, high=high))
    curves = {
        OBLIVIOUS: curve(range(1, 17), [[2.0 / r for r in range(1, 17)]] * layers),
        AWARE: curve(range(1, 10), [[1.0 / r for r in range(1, 10)]] * layers),
    }
    matching = [match(layer, r, 2 * r) for layer in (None, *range(layers)) for r in sizes[:-1]]
    measured = output_error(
        16, [1.0] * layers, curves, matching, rows=32 * heads * 3, units=3, heads=heads, head_dim=8,
        keys_needed=tuple(needed), errors=tuple(errors),
    )  # fmt: skip
    return attention(kernel, measured, post_hoc=post_hoc, skew=())


def rows(*charts):
    return [
        row for chart in charts for data in chart.to_dict()["datasets"].values() for row in data
    ]


def parts(spec):
    """Yields every nested mapping of a Vega-Lite specification."""
    if isinstance(spec, dict):
        yield spec
        spec = list(spec.values())
    if isinstance(spec, list):
        for item in spec:
            yield from parts(item)


SURVEY_TEXT = TextRead(description="synthetic", targets=50, units=40, recorded_units=8)


def survey_cell(approximation, parameters, budget, layer_error, value):
    return Cell(
        approximation=approximation,
        parameters=parameters,
        error=error(
            2 * layer_error, 1.5 * layer_error, 3 * layer_error, (layer_error, 3 * layer_error)
        ),
        budget=budget,
        cost=None if budget is None else budget * 1.02,
        **ends(value, 100.0, value * 0.98, value * 1.02),
    )


def survey_record(task="causal", **more):
    cells = [survey_cell("exact", {}, None, 0.0, 100.0)]
    for budget in (16, 64):
        cells += [
            survey_cell("optimal_v_oblivious", {"r": budget}, budget, 0.2, 110.0),
            survey_cell(
                "optimal_v_aware", {"r": budget}, budget, 0.02 if budget < 64 else 0.0, 101.0
            ),
            survey_cell("strided", {"stride": budget // 2}, budget, 0.1, 105.0),
            survey_cell("sliding_window", {"r": budget}, budget, 0.3, 120.0),
            survey_cell("sampled_keys", {"r": budget, "seed": 0}, budget, 0.05, 104.0),
            *(
                survey_cell("random_keys", {"r": budget, "seed": s}, budget, 0.4, 130.0 + s)
                for s in (0, 2)
            ),
        ]
    weights = ((1.0, 0.0), (0.5, -0.25))
    panels = (
        Panel(approximation="exact", parameters={}, cost=None, weights=weights),
        Panel(approximation="nystrom", parameters={}, cost=2.5, weights=weights),
    )
    picture = Picture(tokens=("def", "f"), panels=panels)
    measured = {"text": SURVEY_TEXT, "unit": "window", "picture": picture}
    return record(f"{task}_elu", task, "elu", 256, cells, **measured | more)


def survey_results(task="causal", **more):
    return Results.of([survey_record(task, **more)])


def cache_cell(method, observed, level, rows=8, pool=""):
    """Builds the cell of one cache method on two texts; with a pool one head keeps most keys."""
    error = Estimate(value=level, low=level / 2, high=level * 2)
    return CacheCell(
        cache=method, keep=0.25, kl=(level, level), observed=observed, rows=rows, r=8, pool=pool,
        error=error, by_layer=(level,), errors=(level, level), keys=((3.0, 13.0),) if pool else (),
    )  # fmt: skip


def cache_record():
    """Builds a record of three cache methods, two of which observe queries, and an oracle."""
    cells = (
        CacheCell(cache=FULL, keep=1.0, kl=(1e-12, 1e-12)),
        cache_cell("recent", "nothing", 0.4, 0), cache_cell("snapkv", "last", 0.2),
        cache_cell("value_aware", "last", 0.1), cache_cell("leave_one_out", "causal", 0.15),
        cache_cell("value_aware", "hindsight", 0.05), cache_cell("value_aware", "repeat", 0.08),
        cache_cell("value_aware", "repeat", 0.04, pool="model"),
    )  # fmt: skip
    return CacheRecord(
        model="tiny", task="text", text="", description="words", prefix=32, length=48, cells=cells,
        run_on=RUN_ON,
    )  # fmt: skip
