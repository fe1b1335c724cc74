"""Skewness of the attention weights against what choosing keys by the output gains (section 3)."""

from collections.abc import Iterable, Mapping, Sequence

import altair as alt
import pandas as pd

from value_aware_attention.measurement.record import GapCell
from value_aware_study.reporting import style
from value_aware_study.reporting.measurements import Measured
from value_aware_study.reporting.output_error_figures import COLUMNS, FLOOR, HEIGHT, WIDTH

# The size at which the two errors are compared, as the records name it.
SIZE = "4"
NOT_MEASURED = "Skewness and the gap between the approximations were not measured."
OWN = "own kernel"
SHARE_TITLE = "effective keys, % of all keys (log scale)"
GAP_TITLE = f"OVO error / OVA error, r = {SIZE} (log scale)"
# From the flattest polynomial to the most skewed one; the model's own kernel stands out.
DEGREE_MARKS = {
    "degree 0": style.Mark("#F2C14E", "circle"),
    "degree 2": style.Mark("#E08B3E", "square"),
    "degree 4": style.Mark("#B44A4A", "triangle-up"),
    "degree 6": style.Mark("#6B2454", "diamond"),
    OWN: style.Mark("#1B1B1B", "cross"),
}
SHARE_TICKS = [step * 10.0**power for power in range(-2, 3) for step in (1, 2, 5)]
GAP_TICKS = [step * 10.0**power for power in range(-1, 7) for step in (1, 2, 5)]

Axes = tuple[alt.X, alt.Y]


def _ratio(cell: GapCell) -> float:
    return max(cell.oblivious[SIZE], FLOOR) / max(cell.aware[SIZE], FLOOR)


def gap_rows(measured: Iterable[Measured]) -> pd.DataFrame:
    """One row a layer and kernel: effective keys as percent of all keys, and OVO over OVA error."""
    rows = [
        {"model": item.label, "layer": cell.layer, "degree": cell.degree, "own": cell.own}
        | {"series": OWN if cell.own else f"degree {cell.degree}"}
        | {"share": 100 * cell.effective_keys / item.output_error.keys, "gap": _ratio(cell)}
        | {"same": cell.same_first_key, "nearest": cell.closest_to_mean_key}
        | {"smallest": cell.smallest_norm_key}
        for item in measured
        if (gap := item.attention.skewness_gap)
        for cell in gap.cells
        if SIZE in cell.oblivious
    ]
    columns = ["model", "layer", "degree", "own", "series", "share", "gap", "same"]
    return pd.DataFrame(rows, columns=[*columns, "nearest", "smallest"])


def _axes(frame: pd.DataFrame, place: int) -> Axes:
    """The axes all panels share; the first of a row names the vertical one."""
    share, gap = (
        {"domain": [frame[field].min() / 1.3, frame[field].max() * 1.3]}
        for field in ("share", "gap")
    )
    title = None if place % COLUMNS else GAP_TITLE
    look = {"format": "~g", "labelOverlap": "greedy"}
    return (
        style.log_axis(alt.X, "share", SHARE_TITLE, share, values=SHARE_TICKS, grid=False, **look),
        style.log_axis(alt.Y, "gap", title, gap, values=GAP_TICKS, grid=True, **look),
    )


def _own_panel(frame: pd.DataFrame, axes: Axes, marks: Mapping[str, style.Mark]) -> style.Panel:
    x, y = axes
    own = alt.Chart(frame[frame["own"]], width=WIDTH, height=HEIGHT)
    points = own.mark_point(filled=True, size=60, opacity=0.9)
    encodings = style.series("model", marks)
    return alt.layer(points.encode(x=x, y=y, **encodings), title="every model, own kernel")


def _degrees_panel(
    frame: pd.DataFrame, name: str, axes: Axes, marks: Mapping[str, style.Mark]
) -> style.Panel:
    of_model = frame[frame["model"] == name]
    own = of_model["own"].astype(bool)
    encodings = style.series("series", marks)

    def points(rows: pd.DataFrame) -> alt.Chart:
        base = alt.Chart(rows).mark_point(filled=True, size=46, opacity=1)
        return base.encode(x=axes[0], y=axes[1], **encodings)

    lines = alt.Chart(of_model[~own], width=WIDTH, height=HEIGHT).mark_line(
        color="#BBBBBB", strokeWidth=1
    )
    joined = lines.encode(x=axes[0], y=axes[1], detail="layer:N", order="degree:Q")
    return alt.layer(joined, points(of_model[~own]), points(of_model[own]), title=name)


def skewness_figure(measured: Sequence[Measured]) -> style.Chart:
    """The gain of OVA over OVO against effective keys, one point a layer and kernel."""
    frame = gap_rows(measured)
    if frame.empty:
        return style.empty(NOT_MEASURED)
    names = list(dict.fromkeys(frame["model"]))
    several = len(names) > 1
    marks = {item.label: item.mark for item in measured if several and item.label in names}
    marks |= DEGREE_MARKS
    panels = [_own_panel(frame, _axes(frame, 0), marks)] if several else []
    for place, name in enumerate(names, start=len(panels)):
        panels.append(_degrees_panel(frame, name, _axes(frame, place), marks))
    return alt.concat(*panels, columns=COLUMNS)


def _correlation(frame: pd.DataFrame) -> str:
    """Spearman's rank correlation of the two axes, as text."""
    if len(frame) < 3:
        return "not computed"
    return f"{frame['share'].rank().corr(frame['gap'].rank()):+.2f}".replace("-", "−")


def _uniform_shares(frame: pd.DataFrame) -> str:
    uniform = frame.dropna(subset=["nearest", "smallest"])
    if uniform.empty:
        return ""
    return (
        f" At degree 0 the value-aware key is the value closest to the mean of the values for "
        f"{100 * uniform['nearest'].mean():.0f}% of the queries, and the shortest value, as for "
        f"orthogonal values, for {100 * uniform['smallest'].mean():.0f}%."
    )


def gap_findings(measured: Sequence[Measured]) -> str:
    """What the points show, computed from them."""
    frame = gap_rows(measured)
    if frame.empty:
        return ""
    post_hoc = frame[~frame["own"].astype(bool)]
    gaps = post_hoc.pivot_table(index=["model", "layer"], columns="degree", values="gap")
    first, last = gaps.columns.min(), gaps.columns.max()
    wider = int((gaps[first] > gaps[last]).sum())
    same = post_hoc.groupby("degree")["same"].mean()
    shares = ", ".join(f"{100 * share:.0f}% at {int(degree)}" for degree, share in same.items())
    return (
        f"Rank correlation of the two axes: {_correlation(frame[frame['own']])} over the own "
        f"kernels, {_correlation(post_hoc)} over the polynomials. The gap is wider at degree "
        f"{first:.0f} than at degree {last:.0f} in {wider} of {len(gaps)} layers. OVA-1 and OVO-1 "
        f"keep the same key for a mean share of queries, by degree: {shares}."
        + _uniform_shares(frame)
    )
