"""What each method really attends to, drawn on a short piece of real text."""

import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement import record as records
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import number
from value_aware_study.report.labels import method_label, model_label
from value_aware_study.report.look import Panel

__all__ = ["exhibit"]

CELL = 17
SEEN = 0.005
"""Of its query's largest weight: a smaller one is not drawn."""
ABOVE, BELOW = "var(--blue)", "var(--vermillion)"
READ = (
    "Rows are queries, columns keys, from the text's first token on; the stronger the colour, the "
    "larger the weight, relative to the largest of its row; vermillion: negative. First layer, "
    "first head, attention restricted to the tokens shown; less than half a percent is not drawn. "
    "Each method has the setting that costs nearest to the budget; its cost, in brackets, is in "
    "keys a query."
)


def exhibit(measured: Sequence[records.Record]) -> Exhibit | None:
    """Exact attention beside a method that the reader picks, for each model with a picture."""
    found = {model_label(one): one.picture for one in measured if one.picture}
    drawn = {model: picture for model, picture in found.items() if len(picture.panels) > 1}
    if not drawn:
        return None
    data = pd.DataFrame([row for model, picture in drawn.items() for row in _rows(model, picture)])
    display = data.assign(
        cost=[number(cost) for cost in data["cost"]],
        **{"keys with a weight": [number(keys) for keys in data["keys with a weight"]]},
    )
    return Exhibit(
        "patterns",
        "What each method attends to",
        "The weights of every method on the same words, beside exact attention's.",
        [READ],
        [
            panel
            for place, (model, picture) in enumerate(drawn.items())
            for panel in _panels(model, picture, f"pick{place}")
        ],
        Table(data, display),
        choices=list(drawn),
    )


def _rows(model: str, picture: records.Picture) -> list[dict[str, Any]]:
    """What a model's panels show, a row each."""
    return [
        {"model": model, "method": method_label(panel.approximation)}
        | {"cost": panel.cost}
        | {"keys with a weight": fmean(sum(map(bool, row)) for row in panel.weights)}
        for panel in picture.panels
    ]


def _drawable(token: str) -> str:
    """Replaces control characters, which SVG, an XML format, cannot hold."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in token
    )


def _panels(model: str, picture: records.Picture, param: str) -> list[Panel]:
    """Exact attention, and the other methods behind a list to pick one from, by `param`."""
    tokens = [_drawable(token) for token in picture.tokens]
    exact, *others = picture.panels
    frame = pd.DataFrame([cell for panel in others for cell in _cells(panel)])
    names = list(dict.fromkeys(frame["method"]))
    pick = alt.binding_select(options=names, name="method ")
    picked = alt.selection_point(name=param, fields=["method"], bind=pick, value=names[0])
    title = json.dumps(f"{model}: ")
    left = _heat_map(pd.DataFrame(_cells(exact)), tokens)
    right = _heat_map(frame, tokens).add_params(picked).transform_filter(picked)
    return [
        left.properties(title=f"{model}: exact attention"),
        right.properties(title=alt.Title(alt.ExprRef(f"{title} + {param}_method"))),
    ]


def _heat_map(frame: pd.DataFrame, tokens: Sequence[str]) -> alt.Chart:
    positions, words = list(range(len(tokens))), json.dumps(tokens)
    axis = alt.Axis(labelExpr=f"{words}[datum.value]", labelOverlap=False, ticks=False)
    strength = alt.Scale(domain=[0, 1], range=[0.08, 1], clamp=True)
    return (
        alt.Chart(frame, width="container", height=CELL * len(tokens))
        .transform_calculate(**{"from": f"{words}[datum.query]", "to": f"{words}[datum.key]"})
        .transform_calculate(size="abs(datum.weight)")
        .transform_joinaggregate(largest="max(size)", groupby=["method", "query"])
        .transform_calculate(strength="datum.size / datum.largest")
        .mark_rect()
        .encode(
            x=alt.X("key:O", title=None, scale=alt.Scale(domain=positions), axis=axis),
            y=alt.Y("query:O", title=None, scale=alt.Scale(domain=positions), axis=axis),
            color=alt.condition("datum.weight < 0", alt.value(BELOW), alt.value(ABOVE)),
            opacity=alt.Opacity("strength:Q", scale=strength, legend=None),
            tooltip=["method:N", "from:N", "to:N", "weight:Q"],
        )
    )


def _cells(panel: records.Panel) -> list[dict[str, Any]]:
    """One row a pair that is drawn, with its weight."""
    cost = "" if panel.cost is None else f" ({panel.cost:.3g})"
    name = method_label(panel.approximation) + cost
    return [
        {"method": name, "query": query, "key": key, "weight": float(f"{weight:.3g}")}
        for query, row in enumerate(panel.weights)
        for key, weight in enumerate(row)
        if abs(weight) > SEEN * max(map(abs, row))
    ]
