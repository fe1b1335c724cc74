"""Skewness of the attention weights against what choosing keys by the output gains (section 3)."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import pandas as pd

from value_aware_attention.measurement.record import GapCell
from value_aware_study.report.measurements import FLOOR, Measured

# The size at which the two errors are compared, as the records name it.
SIZE = "4"
OWN = "own kernel"


def _ratio(cell: GapCell) -> float:
    return max(cell.oblivious[SIZE], FLOOR) / max(cell.aware[SIZE], FLOOR)


def _cells(measured: Iterable[Measured]) -> list[tuple[Measured, GapCell]]:
    return [
        (item, cell)
        for item in measured
        if (gap := item.attention.skewness_gap)
        for cell in gap.cells
    ]


def gap_rows(measured: Iterable[Measured]) -> pd.DataFrame:
    """One row a layer and kernel: effective keys as percent of all keys, and OVO over OVA error."""
    rows = [
        {"model": item.label, "layer": cell.layer, "degree": cell.degree, "own": cell.own}
        | {"series": OWN if cell.own else f"degree {cell.degree}"}
        | {"share": 100 * cell.effective_keys / item.output_error.keys, "gap": _ratio(cell)}
        | {"same": cell.same_first_key}
        for item, cell in _cells(measured)
        if SIZE in cell.oblivious
    ]
    columns = ["model", "layer", "degree", "own", "series", "share", "gap", "same"]
    return pd.DataFrame(rows, columns=columns)


def _correlation(frame: pd.DataFrame) -> str:
    """Spearman's rank correlation of the two axes, as text."""
    if len(frame) < 3:
        return "not computed"
    return f"{frame['share'].rank().corr(frame['gap'].rank()):+.2f}".replace("-", "−")


def _uniform_shares(measured: Iterable[Measured]) -> str:
    cells = [cell for _, cell in _cells(measured)]
    to_mean = [cell.closest_to_mean_key for cell in cells if cell.closest_to_mean_key is not None]
    norms = [cell.smallest_norm_key for cell in cells if cell.smallest_norm_key is not None]
    if not to_mean or not norms:
        return ""
    nearest, smallest = fmean(to_mean), fmean(norms)
    return (
        f" At degree 0 the value-aware key is the value closest to the mean of the values for "
        f"{100 * nearest:.0f}% of the queries, and the shortest value, as for orthogonal values, "
        f"for {100 * smallest:.0f}%."
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
        + _uniform_shares(measured)
    )
