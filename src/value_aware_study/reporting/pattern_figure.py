"""What each method really attends to, drawn on a short piece of real text."""

from collections.abc import Iterable, Sequence

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import Panel, Picture, Record
from value_aware_study.reporting import style
from value_aware_study.reporting.labels import method_label, model_label
from value_aware_study.reporting.table import Figure

__all__ = ["pattern_figures"]

CELL, COLUMNS = 9, 4


def pattern_figures(records: Iterable[Record]) -> list[Figure]:
    """One figure for each model whose record has a picture."""
    return [_figure(record, record.picture) for record in records if record.picture]


def _figure(record: Record, picture: Picture) -> Figure:
    caption = (
        "Rows are queries, columns keys, from the first token on; the darker, the larger the "
        "weight, relative to the largest of its row; red: negative. First layer, first head, "
        "attention restricted to the tokens shown. Each method has the setting that costs nearest "
        f"to the budget; its cost is in brackets, in keys a query. The text: "
        f"{' '.join(picture.tokens)!r}"
    )
    return Figure(
        f"patterns_{record.model}",
        f"What each method attends to: {model_label(record)}",
        caption,
        _chart(picture),
    )


def _chart(picture: Picture) -> style.Chart:
    panels = [_panel(panel) for panel in picture.panels]
    return alt.concat(*panels, columns=COLUMNS) if panels else style.empty("No method was drawn.")


def _panel(panel: Panel) -> alt.Chart:
    frame = pd.DataFrame(_cells(panel.weights))
    side = CELL * len(panel.weights)
    name = method_label(panel.approximation)
    cost = "" if panel.cost is None else f" ({panel.cost:.3g})"
    title = alt.Title(name + cost, fontWeight="normal", fontSize=13)
    scale = alt.Scale(scheme="redblue", domain=[-1, 1], domainMid=0, clamp=True)
    return (
        alt.Chart(frame, width=side, height=side, title=title)
        .mark_rect()
        .encode(
            x=alt.X("key:O", title=None, axis=None),
            y=alt.Y("query:O", title=None, axis=None),
            color=alt.Color("weight:Q", scale=scale, legend=None),
        )
    )


def _cells(weights: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """One row a pair, its weight relative to the largest of the query's."""
    return [
        {"query": i, "key": j, "weight": weight / (max(map(abs, row)) or 1.0)}
        for i, row in enumerate(weights)
        for j, weight in enumerate(row)
    ]
