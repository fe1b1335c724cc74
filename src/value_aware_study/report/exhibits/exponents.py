"""How cost grows with the length: exponents measured, counted and published."""

import altair as alt
import pandas as pd

from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import number
from value_aware_study.report.look import Mark, Panel, direction, dots, toggled
from value_aware_study.report.survey_records import FIT_FROM, QUICK, Measurements, listed

__all__ = ["exhibit"]

MARKS = {
    "time": Mark.of("green"),
    "memory": Mark.of("purple", "triangle-up"),
    "published": Mark.of("grey", "diamond"),
}
FITTED = {"time": "attention, time", "memory": "attention, memory"}
EXPLAINED = (
    "Time may grow faster than the counted multiply-adds, most of all for dense attention: "
    "fetching L² weights from memory is not counted. Random keys compute all pairs and hide the "
    "others where they keep a sixteenth or more of the keys, and gather them beyond, so that their "
    "exponents mix two ways."
)


def exhibit(measured: Measurements) -> Exhibit | None:
    """Exponents of the attention alone; None where no method was measured at two long lengths."""
    data = _data(measured)
    fitted = data[data["attention, time"].notna()]
    if fitted.empty:
        return None
    return Exhibit(
        "exponents",
        "How cost grows with the length",
        f"The exponent p of cost ~ L^p from {FIT_FROM:,} tokens on, beside the published one.",
        [fit_note(measured), EXPLAINED, measured.setting],
        [_panel(fitted)],
        _table(data),
    )


def fit_note(measured: Measurements) -> str:
    """What was fitted to what."""
    lengths = [n for n in measured.lengths("attention") if n >= FIT_FROM]
    return (
        "Least squares of log cost on log length over the measured lengths of at least "
        f"{FIT_FROM:,} tokens ({listed(lengths)} for the attention alone), one forward pass. The "
        "attention alone has no projections and no feed-forward layer, whose cost grows with L "
        "and hides the attention's. Counted: multiply-adds, fitted the same way."
    )


def _data(measured: Measurements) -> pd.DataFrame:
    lengths = measured.lengths("attention")
    rows = [
        {
            "method": about["label"],
            "published": about["order"],
            "exponent": about["exponent"],
            "counted": measured.counted_exponent(method, lengths),
            "attention, time": measured.exponent("attention", method, QUICK),
            "attention, memory": measured.exponent("attention", method, "peak_mib"),
            "layer, time": measured.exponent("forward", method, QUICK),
            "fitted on": listed(
                [n for n in measured.by_length("attention", method, QUICK) if n >= FIT_FROM]
            ),
        }
        for method, about in measured.record["methods"].items()
    ]
    columns = ["method", "published", "exponent", "counted", *FITTED.values()]
    frame = pd.DataFrame(rows, columns=[*columns, "layer, time", "fitted on"])
    return frame.sort_values("attention, time", kind="stable", ignore_index=True)


def _panel(fitted: pd.DataFrame) -> Panel:
    """Time and memory as marks, the published exponent as a hollow one."""
    columns = {"exponent": "published"} | {field: name for name, field in FITTED.items()}
    values = fitted[["method", *columns]].rename(columns={"method": "name"} | columns)
    long = values.melt("name", var_name="series").dropna().astype({"value": float})
    ours = long["series"] != "published"
    last = max(2, round(long["value"].max() + 0.5))
    scale = alt.Scale(domain=[min(0.0, float(long["value"].min())) - 0.1, last])
    axis = alt.Axis(values=list(range(last + 1)), format="d")
    title = direction("p of cost ~ L^p, attention alone", "lower")
    x = alt.X("value:Q", title=title, scale=scale, axis=axis)
    layers = dots(long[ours], MARKS, x, long[~ours], order=values["name"].tolist())
    return toggled(layers, 21)


def _table(data: pd.DataFrame) -> Table:
    display = data[["method", "published"]].copy()
    for column in ("counted", *FITTED.values(), "layer, time"):
        display[column] = [number(value, 2) for value in data[column]]
    display["fitted on"] = data["fitted on"]
    return Table(data, display)
