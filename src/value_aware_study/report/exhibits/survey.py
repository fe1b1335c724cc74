"""All methods of the survey at equal budgets: distance to the optimum, patterns, training."""

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.records.estimate import (
    DASH,
    interval,
    number,
    short,
    signed,
    with_interval,
)
from value_aware_attention.records.record import AWARE, Panel, Picture, Record
from value_aware_study.report import captions, charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import FLOOR, OUTPUT_ERRORS, Results, Row

LIMIT = "OVA, best found"
BUDGETS = (
    "Every method has the parameter that brings its multiply-adds a query closest to the budget; "
    "a method without such a setting, or that cannot run under this model's kernel or causal "
    "mask, is left out there. The search of the oracles, chosen by weight (OVO) and chosen for the "
    "output (OVA), which look at the exact weights, is not counted. "
    f"{captions.DRAWS} One seed a layer."
)
ROW_HEIGHT = 21
VALUE_COLUMNS = ("value", "low", "high")
CHANGES = ("change", "change_low", "change_high")

MIXING = {
    "fourier_mixing": "Fourier mixing (FNet)",
    "linear_mixing": "linear mixing",
    "random_mixing": "random mixing",
}


def distance(results: Results) -> Exhibit | None:
    """Shows output error and its cost, two panels per model; None if no model met a budget."""
    if (frame := budget_settings(results)).empty:
        return None
    drawn = [record for record in results.records if record.model in set(frame["model"])]
    of_model = {
        words.model_label(record): (frame[frame["model"] == record.model], record)
        for record in drawn
    }
    return Exhibit(
        "distance",
        "Distance to the optimum at equal budgets",
        "How far each method's output is from exact attention's, and what that costs the model.",
        [
            "Dots are the budgets in keys a query, bars 95% intervals. Shaded: closer than the "
            f"best choice of as many keys that was found. Errors under {FLOOR:g}, zero included, "
            "are drawn there. A number before ▸ is a cost too large for the axis; several are in "
            "the order of the budgets.",
            f"{BUDGETS} {captions.BEST_FOUND}",
            captions.OUTPUT_ERROR,
            captions.INTERVAL,
        ],
        [panel for rows, record in of_model.values() for panel in _panels(rows, record)],
        _table(frame, drawn),
        choices=list(of_model),
        listed="Equal budgets",
    )


def budget_settings(results: Results) -> pd.DataFrame:
    """Averages seeds by model, method and budget, with `cost`, `budget` and `change`.

    `change` is the end metric's difference from exact attention (nats per token, points of error).
    """
    frame, changes = results.nats, results.changes[["value", "low", "high"]]
    frame = frame.reindex(columns=[*dict.fromkeys([*frame.columns, "budget", "cost"])])
    frame[list(CHANGES)] = changes
    return frame[frame["cost"].notna()]


def _panels(frame: pd.DataFrame, record: Record) -> list[look.Panel]:
    """Draws the output error, and the cost, with the same rows: the closest method first."""
    named = frame.assign(
        name=frame["series"].where(frame["approximation"] != AWARE, LIMIT),
        series=[f"{budget:g} keys" for budget in frame["budget"]],
    ).sort_values("budget")
    means = named.groupby("name")["relative_output_error"].mean().sort_values()
    order = sorted(means.index, key=lambda name: (name != LIMIT, means[name]))
    marks = look.ramp(named["series"].unique())
    return [panel(named, marks, order, record) for panel in (_error_panel, _cost_panel)]


def _error_panel(
    named: pd.DataFrame, marks: Mapping[str, look.Mark], order: Sequence[str], record: Record
) -> look.Panel:
    """Draws the output error on a logarithmic axis; errors below OVA's are shaded."""
    drawn = _as_values(named, OUTPUT_ERRORS)
    drawn["said"] = words.sentences(drawn, "{name}, {series}, output error")
    drawn[list(VALUE_COLUMNS)] = drawn[list(VALUE_COLUMNS)].clip(lower=FLOOR)
    x = alt.X(
        "value:Q",
        title=charts.ERROR_AXIS,
        scale=alt.Scale(type="log", domainMin=FLOOR, nice=False),
        axis=alt.Axis(
            labelExpr=charts.POWER, tickCount=6, labelOverlap="parity", labelSeparation=8
        ),
    )
    shade = alt.Chart(drawn[drawn["name"] == LIMIT][["name", "series", "value"]]).mark_rect()
    shade = shade.encode(
        x=x,
        x2=alt.value(0),
        color=charts.colour(marks),
        opacity=alt.when(charts.SERIES_SHOWN).then(alt.value(0.14)).otherwise(alt.value(0)),
    )
    return charts.toggled(
        [
            shade,
            *charts.dots(drawn, marks, x, order=order),
        ],
        ROW_HEIGHT,
        f"{words.model_label(record)}: output error",
    )


def _cost_panel(
    named: pd.DataFrame, marks: Mapping[str, look.Mark], order: Sequence[str], record: Record
) -> look.Panel:
    """Draws the change of the end metric; a cost beyond the axis is a number."""
    drawn = _as_values(named, CHANGES)
    unit, cost = (
        (" nats", "nats a token more than exact")
        if record.task == "causal"
        else (" points", "points of error more than exact")
    )
    drawn["said"] = words.sentences(drawn, "{name}, {series}", unit, "+")
    edge = 6.0 * max(drawn["value"].quantile(0.75), 0.0)  # the end of the axis
    beyond = drawn["value"] > (edge or math.inf)
    inside = drawn[~beyond]
    last = float(inside[["value", "high"]].max().max())
    ends = [min(float(drawn[["value", "low"]].min().min()), 0.0), last]
    title, scale = charts.direction(cost, "lower"), alt.Scale(domain=ends, nice=False)
    x = alt.X("value:Q", title=title, scale=scale)
    names = (
        drawn[beyond]
        .groupby("name")["value"]
        .agg(lambda costs: f"{', '.join(map(signed, costs))} ▸")
        .reset_index(name="text")
    )
    numbers = alt.Chart(names.assign(end=last)).mark_text(align="right")
    numbers = numbers.encode(
        x=alt.X("end:Q", scale=scale, title=title), y=alt.Y("name:N", sort=order), text="text:N"
    )
    return charts.toggled(
        [*charts.reference(0.0, "exact"), *charts.dots(inside, marks, x, order=order), numbers],
        ROW_HEIGHT,
        f"{words.model_label(record)}: cost",
    )


def _as_values(named: pd.DataFrame, fields: Sequence[str]) -> pd.DataFrame:
    """Returns one quantity with the ends of its interval, under the column names of `dots`."""
    return (
        named[["name", "series", *fields]]
        .rename(columns=dict(zip(fields, VALUE_COLUMNS, strict=True)))
        .astype({"value": float})
    )


def _error(row: Row | pd.Series) -> str:
    value, low, high = (row[name] for name in OUTPUT_ERRORS)
    return with_interval(value, low, high, 2, short)


def _table(frame: pd.DataFrame, records: Sequence[Record]) -> Table:
    """Tabulates every method at every budget: cost, output error, and end metric."""
    labels = {record.model: words.model_label(record) for record in records}
    places = {model: place for place, model in enumerate(labels)}
    columns = [
        *("model", "approximation", "series", "budget", "cost", *OUTPUT_ERRORS),
        *("value", "low", "high", *CHANGES, "seeds", "seeds_low", "seeds_high"),
    ]
    order = frame.assign(place=frame["model"].map(places))
    order = order.sort_values(["place", "budget", "relative_output_error"], kind="stable")
    data = order[columns].reset_index(drop=True)
    return Table(
        data,
        [
            {
                "model": labels[row["model"]],
                "budget, keys": number(row["budget"], 0),
                "method": row["series"],
                "cost, keys": number(row["cost"]),
                "output error": _error(row),
                "loss or error": number(row["value"], 2),
                "interval": interval(row["low"], row["high"], 2),
                "range over seeds": interval(row["seeds_low"], row["seeds_high"], 2)
                if row["seeds"] > 1
                else DASH,
            }
            for row in data.to_dict("records")
        ],
    )


def patterns(measured: Sequence[Record]) -> Exhibit | None:
    """Shows exact attention next to a method that the reader picks, model by model."""
    drawn = {
        words.model_label(record): picture
        for record in measured
        if (picture := record.picture) and len(picture.panels) > 1
    }
    if not drawn:
        return None
    data = pd.DataFrame(
        {"model": model, "method": words.method_label(panel.approximation)}
        | {"cost": panel.cost}
        | {"keys with a weight": fmean(sum(map(bool, row)) for row in panel.weights)}
        for model, picture in drawn.items()
        for panel in picture.panels
    )
    return Exhibit(
        "patterns",
        "What each method attends to",
        "The weights of every method on the same words, beside exact attention's; in brackets its "
        "cost in keys a query.",
        [
            "Rows are queries, columns keys, from the text's first token on; the stronger the "
            "colour, the larger the weight, relative to the largest of its row; vermillion: "
            "negative. First layer, first head, attention restricted to the tokens shown; less "
            "than half a percent is not drawn. Each method has the setting that costs nearest to "
            "the budget; its cost, in brackets, is in keys a query."
        ],
        [
            panel
            for place, (model, picture) in enumerate(drawn.items())
            for panel in _pattern_panels(model, picture, f"pick{place}")
        ],
        Table(
            data,
            data.assign(
                cost=[number(cost) for cost in data["cost"]],
                **{"keys with a weight": [number(keys) for keys in data["keys with a weight"]]},
            ),
        ),
        choices=list(drawn),
        listed="Attention patterns",
    )


def _pattern_panels(model: str, picture: Picture, param: str) -> list[look.Panel]:
    """Draws exact attention, and the other methods in a list for the reader, bound to `param`."""
    tokens = [  # SVG, an XML format, allows no control characters
        "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in token)
        for token in picture.tokens
    ]
    exact, *others = picture.panels
    frame = pd.DataFrame([cell for panel in others for cell in _cells(panel)])
    names = list(dict.fromkeys(frame["method"]))
    picked = alt.selection_point(
        name=param,
        fields=["method"],
        bind=alt.binding_select(options=names, name="method "),
        value=names[0],
    )
    title = alt.ExprRef(f"{json.dumps(f'{model}: ')} + {param}_method")
    left = _heat_map(pd.DataFrame(_cells(exact)), tokens)
    right = _heat_map(frame, tokens).add_params(picked).transform_filter(picked)
    return [
        left.properties(title=f"{model}: exact attention"),
        right.properties(title=alt.Title(title)),
    ]


def _heat_map(frame: pd.DataFrame, tokens: Sequence[str]) -> alt.Chart:
    positions, texts = list(range(len(tokens))), json.dumps(tokens)
    axis = alt.Axis(labelExpr=f"{texts}[datum.value]", labelOverlap=False, ticks=False)
    return (
        alt.Chart(frame, width="container", height=17 * len(tokens))
        .transform_calculate(**{"from": f"{texts}[datum.query]", "to": f"{texts}[datum.key]"})
        .transform_calculate(size="abs(datum.weight)")
        .transform_joinaggregate(largest="max(size)", groupby=["method", "query"])
        .transform_calculate(
            strength="datum.size / datum.largest",
            said="datum.from + ' attends to ' + datum.to + ' with weight ' + datum.weight",
        )
        .mark_rect()
        .encode(
            x=alt.X("key:O", title=None, scale=alt.Scale(domain=positions), axis=axis),
            y=alt.Y("query:O", title=None, scale=alt.Scale(domain=positions), axis=axis),
            color=alt.condition(
                "datum.weight < 0", alt.value("var(--vermillion)"), alt.value("var(--blue)")
            ),
            opacity=alt.Opacity(
                "strength:Q",
                scale=alt.Scale(domain=[0, 1], range=[0.08, 1], clamp=True),
                legend=None,
            ),
            tooltip="said:N",
        )
    )


def _cells(panel: Panel) -> list[Row]:
    """Lists the drawn pairs with their weights."""
    name = words.method_label(panel.approximation) + (
        "" if panel.cost is None else f" ({panel.cost:.3g})"
    )
    return [
        {"method": name, "query": query, "key": key, "weight": float(f"{weight:.3g}")}
        for query, row in enumerate(panel.weights)
        for key, weight in enumerate(row)
        if abs(weight) > 0.005 * max(map(abs, row))
    ]


def trained(trained: Sequence[Record], records: Sequence[Record]) -> Exhibit | None:
    """Shows one row per trained variant; `records` are the survey's, of the exact models."""
    if not trained:
        return None
    data = pd.DataFrame([_trained_row(variant, records) for variant in trained])
    return Exhibit(
        "trained",
        "Trained with a method, and only swapped in",
        "Masked tokens predicted wrongly in percent, or perplexity; lower is better.",
        [
            "The same model, text and steps, trained with the method in every layer and evaluated "
            "with it; beside it the model trained with exact attention, with the same method only "
            "swapped in. One training run each: the intervals cover the choice of evaluation text "
            "only.",
            *dict.fromkeys(f"Ours: {r.scale} scale; data: {r.text.description}." for r in trained),
        ],
        table=Table(
            data,
            {
                "model": data["model"].map(words.plain_text),
                "attention": data["label"],
                "trained with it": [number(value, 2) for value in data["trained"]],
                "swapped in": [number(value, 2) for value in data["swapped"]],
                "change, 95%": words.intervals(data, 2, signed, ("swapped_low", "swapped_high")),
                "exact": [number(value, 2) for value in data["exact"]],
            },
        ),
        listed="Trained with a method",
    )


def _trained_row(variant: Record, records: Sequence[Record]) -> Row:
    """Describes a variant next to `exact`, its model with exact attention."""
    exact = next((r for r in records if variant.model.startswith(f"{r.model}_")), None)
    name = variant.model.removeprefix(f"{exact.model}_") if exact else variant.trained_with
    arguments = _compared(variant.arguments)
    label = MIXING.get(name) or words.method_label(name)
    if arguments:
        label += f" ({', '.join(f'{key} = {arguments[key]}' for key in sorted(arguments))})"
    alike = (cell for cell in exact.cells if cell.approximation == name) if exact else ()
    swapped = next((cell for cell in alike if _compared(cell.parameters) == arguments), None)
    return {
        "model": exact.model if exact else variant.model,
        "attention": name,
        "label": label,
        "arguments": json.dumps(variant.arguments, sort_keys=True),
        "trained": variant.cells[0].value,
        "exact": exact.cells[0].value if exact else None,
        "swapped": swapped.value if swapped else None,
        "swapped_low": swapped.difference_low if swapped else None,
        "swapped_high": swapped.difference_high if swapped else None,
    }


def _compared(arguments: Mapping[str, Any]) -> Row:
    """Returns the arguments that the trained method and the swapped-in method have in common."""
    return {
        key: value
        for key, value in arguments.items()
        if key not in ("seed", "length", "width", "engine")
    }
