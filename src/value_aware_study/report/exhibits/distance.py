"""How far every method is from the value-aware optimum, at equal budgets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Record
from value_aware_study.cards import cards
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import DASH, interval, number, signed, times
from value_aware_study.report.labels import model_label
from value_aware_study.report.look import (
    SHOWN,
    Mark,
    Panel,
    direction,
    dots,
    log_axis,
    ramp,
    reference,
    toggled,
)
from value_aware_study.report.measurements import AWARE, FLOOR, OBLIVIOUS
from value_aware_study.report.results import OUTPUT_ERRORS, Results

__all__ = ["budget_settings", "exhibit", "findings"]

LIMIT = "OVA, the limit"
BUDGETS = (
    "Every method has the parameter that brings its multiply-adds a query closest to the budget; "
    "a method without such a setting, or that cannot run under this model's kernel or causal "
    "mask, is left out there. The search of the oracles, chosen by weight (OVO) and chosen for the "
    "output (OVA), which look at the exact weights, is not counted. "
    f"{captions.DRAWS} One seed a layer."
)
READ = (
    "Dots are the budgets in keys a query, bars 95% intervals. Shaded: closer than the optimum, "
    f"out of reach of any choice of so many keys. Errors under {FLOOR:g}, zero included, are drawn "
    "there. A number before ▸ is a cost beyond the axis, at the budgets in their order."
)
BEYOND = 6.0
"""A cost this many times above the third quartile of all is beyond the axis."""
SEEDS = ("seeds_low", "seeds_high")
COST = {"causal": "nats a token more than exact", "masked": "points of error more than exact"}
ROW = 21
VALUES = ("value", "low", "high")
CHANGES = ("change", "change_low", "change_high")


def exhibit(results: Results) -> Exhibit:
    """Output error and what it costs the model, two panels for each model that met a budget."""
    frame = budget_settings(results)
    drawn = [record for record in results.records if record.model in set(frame["model"])]
    of_model = {record.model: frame[frame["model"] == record.model] for record in drawn}
    notes = [READ, f"{BUDGETS} {captions.BEST_FOUND}"]
    notes += [f"{captions.OUTPUT_ERROR} {captions.recorded_on(drawn)}"]
    notes += [f"{model_label(one)}: {findings(of_model[one.model])}" for one in drawn]
    notes += [f"{captions.INTERVAL} {captions.ours(drawn)}"]
    return Exhibit(
        "distance",
        "Distance to the optimum at equal budgets",
        "How far each method's output is from exact attention's, and what that costs the model.",
        notes,
        [panel for one in drawn for panel in _panels(of_model[one.model], one)],
        _table(frame, drawn),
        choices=[model_label(one) for one in drawn],
    )


def budget_settings(results: Results) -> pd.DataFrame:
    """One row a model, method and budget, seeds averaged, with `cost`, `budget` and `change`.

    `change` is that of the end metric (nats a token, points of error) from exact attention's.
    """
    frame = results.nats
    frame = frame.reindex(columns=[*dict.fromkeys([*frame.columns, "budget", "cost"])])
    exact = {record.model: _exact(record) for record in results.records}
    for name, value in zip(CHANGES, ("value", "low", "high"), strict=True):
        frame[name] = frame[value] - frame["model"].map(exact)
    return frame[frame["cost"].notna()]


def _exact(record: Record) -> float:
    value = record.cells[0].value
    return math.log(value) if record.metric == "perplexity" else value


def _panels(frame: pd.DataFrame, record: Record) -> list[Panel]:
    """The output error, and the cost, with the same rows: the closest method first."""
    aware = frame["approximation"] == AWARE
    named = frame.assign(
        name=frame["series"].where(~aware, LIMIT),
        series=[f"{budget:g} keys" for budget in frame["budget"]],
    ).sort_values("budget")
    means = named.groupby("name")["relative_output_error"].mean().sort_values()
    order = sorted(means.index, key=lambda name: (name != LIMIT, means[name]))
    marks = ramp(named["series"].unique())
    return [
        _error_panel(named, marks, order, model_label(record)),
        _cost_panel(named, marks, order, record),
    ]


def _error_panel(
    named: pd.DataFrame, marks: Mapping[str, Mark], order: Sequence[str], model: str
) -> Panel:
    """The output error on a logarithmic axis; what no choice of keys can reach is shaded."""
    drawn = _as_values(named, OUTPUT_ERRORS)
    drawn[list(VALUES)] = drawn[list(VALUES)].clip(lower=FLOOR)
    title = direction("relative squared output error", "lower")
    scale = alt.Scale(type="log", domainMin=FLOOR, nice=False)
    limit = drawn[drawn["name"] == LIMIT]
    colours = alt.Scale(domain=list(marks), range=[mark.colour for mark in marks.values()])
    shade = alt.Chart(limit[["name", "series", "value"]]).mark_rect()
    shade = shade.encode(
        x=alt.X("value:Q", scale=scale, title=title),
        x2=alt.value(0),
        color=alt.Color("series:N", scale=colours),
        opacity=alt.when(SHOWN).then(alt.value(0.14)).otherwise(alt.value(0)),
    )
    layers = [shade, *dots(drawn, marks, log_axis(title).scale(scale), order=order)]
    panel = toggled(layers, ROW)
    return panel.properties(title=f"{model}: output error")


def _cost_panel(
    named: pd.DataFrame, marks: Mapping[str, Mark], order: Sequence[str], record: Record
) -> Panel:
    """The change of the end metric from exact attention's; what is far beyond all is a number."""
    drawn = _as_values(named, CHANGES)
    edge = BEYOND * max(drawn["value"].quantile(0.75), 0.0)
    beyond = drawn["value"] > (edge or math.inf)
    inside = drawn[~beyond]
    last = float(inside[["value", "high"]].max().max())
    ends = [min(float(drawn[["value", "low"]].min().min()), 0.0), last]
    title, scale = direction(COST[record.task], "lower"), alt.Scale(domain=ends, nice=False)
    x = alt.X("value:Q", title=title, scale=scale)
    names = drawn[beyond].groupby("name")["value"].agg(_listed).reset_index(name="text")
    numbers = alt.Chart(names.assign(end=last)).mark_text(align="right")
    numbers = numbers.encode(
        x=alt.X("end:Q", scale=scale, title=title), y=alt.Y("name:N", sort=order), text="text:N"
    )
    layers = [*reference(0.0, "exact"), *dots(inside, marks, x, order=order), numbers]
    return toggled(layers, ROW).properties(title=f"{model_label(record)}: cost")


def _listed(values: pd.Series) -> str:
    return f"{', '.join(signed(value, 1) for value in values)} ▸"


def _as_values(named: pd.DataFrame, fields: Sequence[str]) -> pd.DataFrame:
    """One quantity of the frame with the ends of its interval, as `look.dots` names them."""
    columns = dict(zip(fields, VALUES, strict=True))
    return named[["name", "series", *fields]].rename(columns=columns).astype({"value": float})


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


def _table(frame: pd.DataFrame, records: Sequence[Record]) -> Table:
    """Every method at every budget: cost, output error, end metric and its interval."""
    labels = {record.model: model_label(record) for record in records}
    columns = ["model", "approximation", "series", "budget", "cost", *OUTPUT_ERRORS]
    columns += ["value", "low", "high", *CHANGES, "seeds", *SEEDS]
    order = frame["model"].map({model: place for place, model in enumerate(labels)})
    data = frame[columns].assign(order=order)
    data = data.sort_values(["order", "budget", "relative_output_error"], kind="stable")
    data = data.drop(columns="order").reset_index(drop=True)
    shown = [_row(labels[row["model"]], row) for row in data.to_dict("records")]
    return Table(data, pd.DataFrame(shown))


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
