"""SYNTHETIC records of methods at equal budgets and of caches: invented, measured on nothing."""

from synthetic import RUN_ON, ends, error, record

from value_aware_attention.records.cache_record import FULL, CacheCell, CacheRecord, Estimate
from value_aware_attention.records.record import Cell, Panel, Picture, TextRead
from value_aware_study.report.frame import Results

TEXT = TextRead(description="synthetic", targets=50, units=40, recorded_units=8)


def cell(approximation, parameters, budget, layer_error, value):
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
    weights = ((1.0, 0.0), (0.5, -0.25))
    panels = (
        Panel(approximation="exact", parameters={}, cost=None, weights=weights),
        Panel(approximation="nystrom", parameters={}, cost=2.5, weights=weights),
    )
    picture = Picture(tokens=("def", "f"), panels=panels)
    measured = {"text": TEXT, "unit": "window", "picture": picture}
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
