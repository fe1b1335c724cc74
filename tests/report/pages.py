"""Builds a small page with every part that an exhibit can have, and with hostile text."""

import altair as alt
import pandas as pd

from value_aware_study.evaluation.exploration import Exploration, Head, Kept, Model, Query
from value_aware_study.report.charts import bars, direction, dots, reference, toggled
from value_aware_study.report.exhibit import Exhibit, Page, Section, Table
from value_aware_study.report.look import Mark

SLY = "<script>alert(1)</script>"
MARKS = {"by output": Mark.of("blue"), "by weight": Mark.of("vermillion", "square")}


def numbers() -> pd.DataFrame:
    """Returns two series with intervals; a sixth digit shows whether a number was rounded."""
    return pd.DataFrame(
        {
            "name": ["var(--x)", "var(--x)", "LSH", "LSH"],
            "series": ["by output", "by weight"] * 2,
            "value": [1.25, 20.5, 3.75, 100.1264],
            "low": [1.0, 19.0, 3.5, 99.0],
            "high": [1.5, 22.0, 4.0, 101.25],
        }
    )


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.map(lambda cell: cell if isinstance(cell, str) else f"{cell:,.2f}")


def exploration() -> Exploration:
    """Explores two models, the second with the first two methods alone, as older records have."""

    def query(place: int, error: float, methods: int) -> Query:
        mean = 0.34 if place else 0.0
        single = (
            *(Kept((0,), (100,), error), Kept((place,), (100,), None)),
            Kept((), (), place / 200, 1.0),
        )
        two = (
            *(Kept((0, 1), (60, 40), error), Kept((0, 2), (100, 0), place / 100)),
            Kept((2,), (round(100 - 100 * mean),), place / 200, mean),
        )
        return Query((50, 30, 20), (single[:methods], two[:methods], two[:methods]))

    def heads(layers: tuple[int, ...], methods: int) -> tuple[Head, ...]:
        errors = ((layer, 0.25 + layer / 2) for layer in layers)
        return tuple(
            Head(layer, 0, tuple(query(place, error, methods) for place in range(3)))
            for layer, error in errors
        )

    models = (
        Model("tiny", (" the", f" {SLY}", "bank"), heads((0, 3), 3)),
        Model(SLY, (" a", " b", " c"), heads((0,), 2), "second"),
    )
    return Exploration(
        (1, 2, 4), ("chosen by weight", "chosen for the output", "beside the mean"), models
    )


def small_page() -> Page:
    """Builds the page anew, so that two calls show whether it depends on the data alone."""
    frame = numbers()
    x = alt.X("value:Q", title=direction("keys", "lower"))
    figure = (
        toggled([*dots(frame, MARKS, x, frame.head(2)), *reference(5.0, "exact")]),
        toggled(bars(frame, MARKS, x)),
    )
    table = pd.DataFrame({"model": [SLY, "a_b & 5%"], "error": [1031.125, 2.5]})
    few = Exhibit(
        "hero", "4 keys do as well as 75", "One line.", ("A note.",), figure,
        Table(frame, as_text(frame)),
    )  # fmt: skip
    models = Exhibit("models", f"Models {SLY}", SLY, table=Table(table, as_text(table)))
    picked = Exhibit(
        "picked", "One of two", "", charts=figure, table=Table(table, as_text(table)),
        choices=[SLY, "the other"],
    )  # fmt: skip
    explorer = Exhibit("explorer", "A text", "Pick a token.", exploration=exploration())
    return Page(
        "How much is lost?", f"A lead {SLY}.",
        [
            Section("claims", "The claims", "", [few, picked]),
            Section("model", "Your model", "What it does.", [models, explorer]),
        ],
    )  # fmt: skip
