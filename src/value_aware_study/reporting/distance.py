"""How far every method is from the value-aware optimum, at equal budgets."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.cards import cards
from value_aware_study.reporting import captions, style
from value_aware_study.reporting.figures import METRIC_TITLES
from value_aware_study.reporting.labels import model_label
from value_aware_study.reporting.measurements import AWARE, OBLIVIOUS
from value_aware_study.reporting.output_error_figures import FLOOR, error_axis
from value_aware_study.reporting.results import OUTPUT_ERRORS, Results
from value_aware_study.reporting.table import DASH, Figure, Table, interval, number, times

__all__ = ["distance_figures", "distance_table", "findings"]

BUDGET_TITLE = "multiply-adds a query, in keys attended to (log scale)"
WIDTH, HEIGHT = 380, 330
BUDGETS = (
    "Every method has the parameter that brings its multiply-adds a query closest to the budget; "
    "a method without such a setting, or that cannot run under this model's kernel or causal "
    "mask, is left out there. The search of the oracles (OVO, OVA), which look at "
    f"the exact weights, is not counted. {captions.DRAWS} One seed a layer."
)
SEEDS = ("seeds_low", "seeds_high")


def budget_settings(results: Results) -> pd.DataFrame:
    """One row a model, method and budget, seeds averaged: `cost`, `budget`, loss or error."""
    frame = results.nats
    frame = frame.reindex(columns=[*dict.fromkeys([*frame.columns, "budget", "cost"])])
    return frame[frame["cost"].notna()]


def distance_figures(results: Results) -> list[Figure]:
    """One figure a model: output error and end metric against the budget, with their intervals."""
    frame = budget_settings(results)
    by_model = {record.model: frame[frame["model"] == record.model] for record in results.records}
    return [
        Figure(
            f"distance_{record.model}",
            f"Distance to the optimum: {model_label(record)}",
            f"{BUDGETS} {captions.BEST_FOUND} {captions.OUTPUT_ERROR} "
            f"{captions.recorded_on([record])} The end metric: {captions.INTERVAL} "
            f"{findings(by_model[record.model])} {captions.ours([record])}",
            _chart(by_model[record.model], record),
        )
        for record in results.records
    ]


def _chart(frame: pd.DataFrame, record: Record) -> style.Chart:
    if frame.empty:
        return style.empty("No method was evaluated.")
    y = style.value_axis(METRIC_TITLES[record.task], [*frame["low"], *frame["high"]])
    exact = record.cells[0].value
    exact = math.log(exact) if record.task == "causal" else exact
    cost = frame["cost"].astype(float)
    line = style.dashed_line(exact, "exact attention", float(cost.min()), y)
    metric = _panel(frame, ("value", "low", "high"), y.of, "(b) end metric")
    errors = frame.assign(**{name: frame[name].clip(lower=FLOOR) for name in OUTPUT_ERRORS})
    error = _panel(errors, OUTPUT_ERRORS, error_axis, "(a) output error")
    return alt.hconcat(error, alt.layer(*line, metric))


def _panel(
    frame: pd.DataFrame, fields: Sequence[str], y: Callable[[str], alt.Y], title: str
) -> style.Panel:
    """A value with the ends of its interval against the cost; no bar where they are not known."""
    value, low, high = fields
    encodings = style.series("series", style.method_marks(frame), columns=4)
    x = style.count_axis("cost", BUDGET_TITLE, frame["cost"].astype(float).tolist())
    plain = frame[["series", "cost", *fields]].astype({"cost": float})
    base = alt.Chart(plain, width=WIDTH, height=HEIGHT, title=title)
    bars = base.transform_filter(f"isValid(datum.{low})").mark_rule(strokeWidth=1.2, opacity=0.6)
    bars = bars.encode(x=x, y=y(low), y2=f"{high}:Q", color=encodings["color"])
    base = base.encode(x=x, y=y(value), **encodings)
    lines = base.mark_line(strokeWidth=1.6).encode(shape=alt.Undefined)
    return alt.layer(bars, lines, base.mark_point(filled=True, size=60))


def findings(frame: pd.DataFrame) -> str:
    """What the figure of a model shows, in sentences made from its numbers."""
    sentences = []
    oracles = [name for name, card in cards().items() if card.oracle]
    for budget, group in frame.groupby("budget"):
        errors = group.set_index("approximation")["relative_output_error"]
        practical = group[~group["approximation"].isin(oracles)]
        ranked = practical.sort_values("relative_output_error", kind="stable")
        if ranked.empty or not {OBLIVIOUS, AWARE} <= set(errors.index):
            continue
        best = ranked.iloc[0]
        measured = _with_ends(*(best[name] for name in OUTPUT_ERRORS))
        compared = f"{measured}, {_over(best, errors, AWARE)} OVA's"
        sentences.append(
            f"At {int(budget)} keys the closest practical method is {best['series']}: output error "
            f"{compared} ({errors[AWARE]:.2g}) and {_over(best, errors, OBLIVIOUS)} OVO's "
            f"({errors[OBLIVIOUS]:.2g})."
        )
    return " ".join(sentences)


def _over(row: pd.Series, errors: pd.Series, other: str) -> str:
    if errors[other] < FLOOR:
        return "far above"
    return f"{times(row['relative_output_error'] / errors[other])}"


def distance_table(results: Results) -> Table:
    """Every method at every budget: cost, output error, end metric and its interval."""
    frame, records = budget_settings(results), results.records
    labels = {record.model: model_label(record) for record in records}
    columns = ["model", "approximation", "series", "budget", "cost", *OUTPUT_ERRORS]
    data = frame[[*columns, "value", "low", "high", "seeds", *SEEDS]].reset_index(drop=True)
    shown = [
        _row(labels[model], row)
        for (model, _), group in data.groupby(["model", "budget"], sort=False)
        for row in group.sort_values("relative_output_error", kind="stable").to_dict("records")
    ]
    caption = (
        f"{BUDGETS} {captions.OUTPUT_ERROR} {captions.recorded_on(records)} Loss in nats "
        "a token (causal) or masked tokens predicted wrongly in percent. "
        f"{captions.BEST_FOUND} {captions.INTERVAL} {captions.settings_of(records)}"
    )
    return Table("distance", "Every method at equal budgets", caption, data, pd.DataFrame(shown))


def _row(model: str, row: Mapping[str, Any]) -> dict[str, str]:
    several = row["seeds"] > 1
    return {
        "model": model,
        "budget, keys": number(row["budget"], 0),
        "method": row["series"],
        "cost, keys": number(row["cost"]),
        "output error": _with_ends(*(row[name] for name in OUTPUT_ERRORS)),
        "loss or error": number(row["value"], 2),
        "interval": interval(row["low"], row["high"], 2),
        "range over seeds": interval(row["seeds_low"], row["seeds_high"], 2) if several else DASH,
    }


def _with_ends(value: Any, low: Any, high: Any) -> str:
    """ "0.33 (0.3 to 0.37)"; the value alone where its interval is not known."""
    ends = "" if pd.isna(low) else f" ({_short(low)} to {_short(high)})"
    return f"{_short(value)}{ends}"


def _short(value: Any) -> str:
    return DASH if pd.isna(value) else f"{value:.2g}"
