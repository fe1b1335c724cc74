"""Loss of keys chosen by weight against r up to all keys, for each kernel: Figure 2."""

import math

import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.curves import change_axis, count_axis, curves, extent, figure, level
from value_aware_study.report.exhibit import Exhibit
from value_aware_study.report.exhibits.figure_1 import KEYS, numbers
from value_aware_study.report.labels import KERNEL_LABELS
from value_aware_study.report.look import direction
from value_aware_study.report.marks import KERNEL_MARKS
from value_aware_study.report.published import TABLE_2, TABLE_2_COLUMNS
from value_aware_study.report.results import KERNELS, Results

__all__ = ["NATS", "exhibit", "published"]

NATS = direction("nats per token above exact", "lower")


def exhibit(results: Results) -> Exhibit | None:
    """The change of each kernel's loss, and the paper's; None where none was evaluated."""
    frame = results.changes
    ours = frame[(frame["task"] == "causal") & frame["kernel"].isin(KERNELS)]
    ours = ours[ours["approximation"] == "optimal_v_oblivious"]
    if ours.empty:
        return None
    ours = ours.assign(series=ours["kernel_label"], count=ours["r"].astype(float))
    ours = ours.drop_duplicates(["series", "count"])
    theirs = published("optimal_v_oblivious")
    theirs = theirs.assign(series=theirs["kernel"].map(KERNEL_LABELS), count=theirs["r"])
    y = change_axis(NATS, extent(ours, theirs), 0.1)
    x = count_axis(KEYS, ours["count"].tolist())
    layers = [*level(0.0), *curves(ours, KERNEL_MARKS, x, y, published=theirs)]
    notes = [
        "Top r keys by attention weight, up to all keys. Differences of the loss from exact "
        "attention, ours from ours and the paper's (Table 2, hollow) from the paper's; the axis is "
        "even up to 0.1 nats and logarithmic beyond. The paper's order of loss is polynomial, elu, "
        "exponential; whether ours is the same is among the claims.",
        captions.INTERVAL,
        *captions.not_evaluated(results, [f"causal_{kernel}" for kernel in KERNELS]),
    ]
    return Exhibit(
        "figure_2",
        "Figure 2. Loss of keys chosen by weight, for each kernel",
        "What the r largest weights add to each model's loss; hollow: the paper."
        f"{captions.seeds(results, ' (pale bars)')}",
        notes,
        [figure(layers)],
        numbers(ours, theirs),
    )


def published(approximation: str | None = None) -> pd.DataFrame:
    """Table 2 as changes from the paper's exact loss, in nats, of one method or of all."""
    rows = [
        {"kernel": kernel, "approximation": name, "r": float(r)}
        | {"value": math.log(perplexity / row[0])}
        for kernel, row in TABLE_2.items()
        for (_, name, r), perplexity in zip(TABLE_2_COLUMNS, row, strict=True)
        if r is not None and approximation in (None, name)
    ]
    return pd.DataFrame(rows)
