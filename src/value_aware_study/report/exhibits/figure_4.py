"""End metric of every setting against its output error, sum ||o - o~||^2 / sum ||o||^2."""

import altair as alt
import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.curves import change_axis, figure, level, powers
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import number, signed
from value_aware_study.report.labels import method_label, setting_label
from value_aware_study.report.look import OPACITY, Mark, Panel, direction
from value_aware_study.report.marks import OTHER, method_marks
from value_aware_study.report.results import Results

__all__ = ["exhibit"]

# Settings with a smaller output error are exact for every purpose of the figure, and not drawn.
SMALLEST = 1e-3
NAMED = ("optimal_v_oblivious", "optimal_v_aware", "sliding_window")
REST = "other methods"
TITLES = {"causal": "nats per token above exact", "masked": "points of error above exact"}
AROUND = {"causal": 0.1, "masked": 1.0}
"""Up to where the axis of changes is even."""


def exhibit(results: Results) -> Exhibit | None:
    """A panel a model, with the rank correlation; None where no output error was recorded."""
    frame = results.changes
    frame = frame[frame["relative_output_error"] >= SMALLEST]
    frame = frame[frame["approximation"] != "exact"]
    if frame.empty:
        return None
    names = results.names()
    frame = frame.assign(
        name=frame["model"].map(names),
        setting=[setting_label(row) for row in frame.to_dict("records")],
        series=[method_label(n) if n in NAMED else REST for n in frame["approximation"]],
    )
    drawn = [name for name in names.values() if name in set(frame["name"])]
    notes = [
        "Each point is one setting: its relative output error, and the metric with that "
        f"approximation in every layer; hovering names it. {captions.OUTPUT_ERROR} "
        f"{captions.recorded_on(results.records)} Settings with an error under {SMALLEST:g} count "
        "as exact and are left out. Not in the paper.",
    ]
    return Exhibit(
        "figure_4",
        "Figure 4. Output error of the attention against the loss of the model",
        "The smaller the error of the attention's output, the smaller the model's loss.",
        notes,
        [_panel(frame[frame["name"] == name], name) for name in drawn],
        _table(frame),
        choices=drawn,
    )


def _panel(frame: pd.DataFrame, name: str) -> Panel:
    task = frame["task"].iloc[0]
    marks = _marks(frame)
    colours = alt.Scale(domain=list(marks), range=[mark.colour for mark in marks.values()])
    shapes = alt.Scale(domain=list(marks), range=[mark.shape for mark in marks.values()])
    title = direction("relative squared output error", "lower")
    values = frame["relative_output_error"].tolist()
    shown = frame[["series", "setting", "relative_output_error", "value"]]
    shown = shown.sort_values("series", key=lambda series: series != REST)
    points = alt.Chart(shown).mark_point(filled=True, size=62)
    points = points.encode(
        x=powers(alt.X, "relative_output_error", title, values),
        y=change_axis(direction(TITLES[task], "lower"), frame["value"], AROUND[task]),
        color=alt.Color("series:N", scale=colours, legend=alt.Legend(orient="bottom")),
        shape=alt.Shape("series:N", scale=shapes),
        opacity=OPACITY,
        tooltip=[
            "setting:N",
            alt.Tooltip("relative_output_error:Q", format=".5~g"),
            alt.Tooltip("value:Q", format=".5~g"),
        ],
    )
    layers = [*level(0.0), points]
    return figure(layers, f"{name}: rank correlation {_correlation(frame)}")


def _marks(frame: pd.DataFrame) -> dict[str, Mark]:
    named = frame[frame["series"] != REST]
    return method_marks(named) | ({REST: OTHER} if len(named) < len(frame) else {})


def _correlation(frame: pd.DataFrame) -> str:
    """Spearman's, over the settings."""
    ranks = frame["relative_output_error"].rank().corr(frame["value"].rank())
    return signed(ranks, 2)


def _table(frame: pd.DataFrame) -> Table:
    columns = ["model", "setting", "relative_output_error", "value", "low", "high"]
    data = frame[columns].rename(columns={"value": "change"}).reset_index(drop=True)
    display = pd.DataFrame({"model": frame["name"].tolist(), "setting": data["setting"]})
    display["output error"] = [number(value, 4) for value in data["relative_output_error"]]
    display["change from exact"] = [signed(value, 3) for value in data["change"]]
    return Table(data, display)
