"""Output error in a model's own queries, keys and values against the number of keys kept."""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import ErrorAtSize, OutputError
from value_aware_study.report import captions
from value_aware_study.report.curves import count_axis, curves, figure, powers, upright
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import DASH
from value_aware_study.report.labels import series_label
from value_aware_study.report.look import SHOWN, Mark, Panel, direction
from value_aware_study.report.marks import method_marks
from value_aware_study.report.measurements import (
    FLOOR,
    NONE,
    OPTIMAL,
    Measured,
    error_rows,
)
from value_aware_study.report.oracles import MARKS, full_name

__all__ = ["exhibit"]

NORMS = {f"norm_weighted_keys_{norm}": norm for norm in (2, 1)}
BOUND = "maurey_bound"
BOUND_LABEL = "sampled from α, expected"
BASELINES = (
    f"{captions.BASELINES} Sampled from α: the expected error of the mean of r values drawn from "
    "α, Var/r (Maurey), which the optimum is never above."
)


def exhibit(
    measured: Sequence[Measured], name: str, setting: str, begins: str = "", column: str = "kernel"
) -> Exhibit | None:
    """A panel for each of these, models or kernels (`column`), all layers pooled and each apart.

    `begins` is what the title begins with. None where nothing was measured.
    """
    if not measured:
        return None
    rows = [{column: one.label} | row for one in measured for row in _rows(one)]
    data = pd.DataFrame(rows)
    several = any(len(one.output_error.methods) > len(OPTIMAL) for one in measured)
    return Exhibit(
        name,
        f"{begins}Output error against the keys kept",
        "How far the output of r keys is from exact attention's; thin lines are single layers.",
        [
            f"{captions.OUTPUT_ERROR} Errors under {FLOOR:g}, zero included, are drawn there.",
            f"{captions.OPTIMAL} {captions.BEST_FOUND}",
            *([BASELINES] if several else []),
            setting,
        ],
        [_panel(one) for one in measured],
        Table(data, _text(data, column)),
        choices=[one.label for one in measured],
    )


def _label(method: str) -> str:
    if method in NORMS:
        return series_label({"approximation": "norm_weighted_keys", "norm": NORMS[method]})
    return BOUND_LABEL if method == BOUND else full_name(method)


def _shown(
    output_error: OutputError, method: str, layer: int | None, known: Container[int]
) -> list[dict[str, Any]]:
    """The curve at powers of two, at its last size, and where its interval is known."""
    rows = error_rows(output_error, method, layer)
    last = rows[-1]["r"]
    return [row for row in rows if (r := row["r"]).bit_count() == 1 or r == last or r in known]


def _rows(measured: Measured) -> Iterator[dict[str, Any]]:
    """One row a point: every method pooled, and each layer of the oracles."""
    errors = measured.output_error
    ends: dict[Any, dict[int, ErrorAtSize]] = defaultdict(dict)
    for at in errors.errors:
        if at.head is None:
            ends[at.method, at.layer][at.r] = at
    for method in errors.methods:
        for layer in (None, *(range(errors.layers) if method in OPTIMAL else ())):
            of_curve = ends[method, layer]
            for row in _shown(errors, method, layer, of_curve):
                known = of_curve.get(row["r"])
                yield {
                    "method": method,
                    "layer": "all" if layer is None else str(layer),
                    "low": known and known.low,
                    "high": known and known.high,
                    **row,
                }


def _panel(measured: Measured) -> Panel:
    frame = pd.DataFrame(_rows(measured)).rename(columns={"error": "value", "r": "count"})
    frame = frame.assign(series=frame["method"].map(_label))
    frame[["value", "low", "high"]] = frame[["value", "low", "high"]].astype(float).clip(FLOOR)
    pooled, single = frame[frame["layer"] == "all"], frame[frame["layer"] != "all"]
    x = count_axis("keys kept for each query, r", [1, measured.output_error.keys])
    title = direction("relative squared output error", "lower")
    y = powers(alt.Y, "value", title, [FLOOR, float(frame["value"].max())])
    thin = alt.Chart(single[["count", "series", "value", "layer"]]).mark_line(strokeWidth=0.8)
    thin = thin.encode(
        x=x,
        y=y,
        detail="layer:N",
        color="series:N",
        opacity=alt.when(SHOWN).then(alt.value(0.4)).otherwise(alt.value(0.05)),
    )
    keys, head = measured.output_error.keys, measured.output_error.head_dim + 1
    marked = upright(head, f"d + 1 = {head}") if head <= keys else []
    lines = curves(pooled, _marks(pooled), x, y)
    return figure([*marked, thin, *lines], measured.label)


def _marks(pooled: pd.DataFrame) -> dict[str, Mark]:
    others = method_marks(pooled.assign(approximation=""))
    others |= {BOUND_LABEL: Mark.of("grey", "stroke")}
    names = [*MARKS, *(name for name in others if name not in MARKS)]
    return {name: MARKS.get(name) or Mark(*others[name]) for name in names}


def _text(data: pd.DataFrame, column: str) -> pd.DataFrame:
    ends = zip(data["low"], data["high"], strict=True)
    return pd.DataFrame(
        {
            column: data[column],
            "method": data["method"].map(_label),
            "layer": data["layer"],
            "r, keys": [f"{r:,}" for r in data["r"]],
            "error": [NONE if pd.isna(error) else f"{error:.3g}" for error in data["error"]],
            "95% interval": [DASH if pd.isna(a) else f"{a:.3g} to {b:.3g}" for a, b in ends],
        }
    )
