"""Masked-LM error of the long model against r (sparse methods) and features (ORF): Figure 1."""

import altair as alt
import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.curves import (
    change_axis,
    count_axis,
    curves,
    extent,
    figure,
    level,
    upright,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import interval, number, signed
from value_aware_study.report.labels import series_label
from value_aware_study.report.look import Panel, direction
from value_aware_study.report.marks import method_marks
from value_aware_study.report.published import TABLE_1
from value_aware_study.report.replicates import ranged
from value_aware_study.report.results import Results

__all__ = ["KEYS", "POINTS", "exhibit", "numbers", "published"]

METHODS = ("optimal_v_oblivious", "optimal_v_aware", "sliding_window", "lsh", "orf")
"""The curves of the paper's Figure 1."""
KEYS = "r, keys per query (log scale)"
FEATURES = "random features (log scale)"
POINTS = direction("points of error above exact", "lower")
SCALE = (
    "Differences from exact attention, ours from ours and the paper's (Table 1, hollow) from the "
    "paper's; the axis is even up to one point and logarithmic beyond. LSH of more than one round "
    "sees more keys than r."
)


def exhibit(results: Results) -> Exhibit | None:
    """Every setting with its interval, and the paper's; None where none was evaluated."""
    frame = results.changes[results.changes["model"] == "masked_long"]
    ours = frame[frame["approximation"].isin(METHODS)]
    if ours.empty:
        return None
    theirs = published()
    both = pd.concat([ours, theirs])
    panels = [
        _panel(ours[ours[of].notna()], theirs[theirs[of].notna()], both, of, axis, title)
        for of, axis, title in (("r", KEYS, "sparse methods"), ("features", FEATURES, "ORF"))
        if ours[of].notna().any()
    ]
    notes = [
        SCALE,
        "OVO: chosen by weight; OVA: chosen for the output; ORF as written in the paper's A.1 and "
        f"with Performer's scaling. {captions.BEST_FOUND}",
        f"{captions.INTERVAL} {captions.SEEDS} {captions.NOT_JOINED}",
    ]
    return Exhibit(
        "figure_1",
        "Figure 1. Masked-LM error of the long model under approximate attention",
        "What each method adds to exact attention's error, by keys or features; hollow: the paper.",
        notes,
        panels,
        numbers(ours, theirs),
    )


def published() -> pd.DataFrame:
    """Table 1 as changes from the paper's exact error, in points."""
    exact = TABLE_1[0].error
    rows = [
        {"approximation": cell.approximation, **cell.parameters, "value": cell.error - exact}
        for cell in TABLE_1[1:]
    ]
    named = [row | {"series": series_label(row)} for row in rows]
    return pd.DataFrame(named).astype({"r": float, "features": float})


def _panel(
    ours: pd.DataFrame, theirs: pd.DataFrame, both: pd.DataFrame, of: str, title: str, name: str
) -> Panel:
    counts = [*ours[of].astype(float), *theirs[of]]
    every = method_marks(both)
    present = {*ours["series"], *theirs["series"]}
    marks = {series: mark for series, mark in every.items() if series in present}
    y = change_axis(POINTS, extent(ours, theirs), 1.0)
    x = count_axis(title, counts)
    drawn, hollow = (part.assign(count=part[of].astype(float)) for part in (ours, theirs))
    layers: list[alt.Chart] = level(0.0)
    if of == "r":
        keys = int(ours["head_dim"].iloc[0]) + 1
        layers += upright(keys, f"d + 1 = {keys}")
    return figure([*layers, *curves(drawn, marks, x, y, published=hollow)], name)


def numbers(ours: pd.DataFrame, theirs: pd.DataFrame) -> Table:
    """Everything drawn, ours first; the paper's values have no interval."""
    over_seeds = ranged(ours)
    numbers = ["r", "features", "value", "low", "high", *over_seeds]
    columns = ["model", "series", *numbers]
    parts = zip(("ours", "paper"), (ours, theirs), strict=True)
    data = pd.concat(
        [
            part.reindex(columns=columns).astype(dict.fromkeys(numbers, float)).assign(whose=whose)
            for whose, part in parts
        ],
        ignore_index=True,
    )
    display = data[["whose", "model", "series"]].fillna("").rename(columns={"series": "method"})
    display["r or features"] = [number(n, 0) for n in data["r"].fillna(data["features"])]
    display["change from exact"] = [signed(value, 2) for value in data["value"]]
    ends = zip(data["low"], data["high"], strict=True)
    display["95% interval"] = [interval(*pair, 2, signed) for pair in ends]
    if over_seeds:
        low, high = (data[name] for name in over_seeds)
        display["range over seeds"] = [
            interval(*pair, 2, signed) for pair in zip(low, high, strict=True)
        ]
    return Table(data, display)
