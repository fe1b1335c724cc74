"""What choosing keys for the output gains in the end: the end metric against r."""

import altair as alt
import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.curves import (
    PLAIN,
    QUIET,
    Look,
    change_axis,
    count_axis,
    curves,
    extent,
    figure,
    level,
    upright,
)
from value_aware_study.report.exhibit import Exhibit
from value_aware_study.report.exhibits import figure_1, figure_2
from value_aware_study.report.exhibits.figure_4 import AROUND
from value_aware_study.report.labels import method_label
from value_aware_study.report.look import Panel
from value_aware_study.report.marks import method_marks
from value_aware_study.report.measurements import OPTIMAL
from value_aware_study.report.results import KERNELS, Results

__all__ = ["BASELINES", "exhibit"]

BASELINES = (
    *("oblivious_keys_optimal_weights", "value_aware_keys_attention_weights"),
    *("norm_weighted_keys", "leave_one_out_keys", "sampled_keys"),
)


def exhibit(results: Results) -> Exhibit | None:
    """Two panels a model, of the optimal methods and of the others; None where none has a curve."""
    models = _models(results)
    if not models:
        return None
    ours, theirs = pd.concat(models.values()), _published(models)
    notes = [
        f"{captions.OPTIMAL} {captions.BEST_FOUND} Grey: from the best to the worst of the others, "
        "which the second panel has one by one.",
        f"{captions.BASELINES} Sampled from α: r draws with replacement, mean of the seeds.",
        "Differences from exact attention, ours from ours and the paper's (Tables 1 and 2, hollow, "
        "r = 1 and 65) from the paper's; the axis is even near zero and logarithmic beyond.",
        f"{captions.INTERVAL} {captions.NOT_JOINED}",
    ]
    return Exhibit(
        "figure_5",
        "Figure 5. What choosing for the output gains in the end",
        "What r keys add to the loss of exact attention, by weight (OVO) or for the output (OVA)."
        f"{captions.seeds(results, ' (pale bars)')}",
        notes,
        [
            panel
            for name, frame in models.items()
            for panel in _panels(frame, theirs[theirs["name"] == name], name)
        ],
        figure_1.numbers(ours, theirs),
        choices=list(models),
    )


def _models(results: Results) -> dict[str, pd.DataFrame]:
    """By label: settings of the causal models and of the long masked one, where they have an r."""
    frame = results.changes
    frame = frame[frame["approximation"].isin([*OPTIMAL, *BASELINES]) & frame["r"].notna()]
    firsts = [record for kernel in KERNELS if (record := results.of_kernel(kernel))]
    names = results.names()
    of_model = {
        names[one.model]: frame[frame["model"] == one.model]
        for one in [*firsts, *results.models("masked_long")]
    }
    return {
        name: rows.assign(name=name, count=rows["r"].astype(float))
        for name, rows in of_model.items()
        if len(rows)
    }


def _published(models: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The paper's values of the optimal methods, of the models that are here."""
    masked = figure_1.published().assign(task="masked", kernel="exponential")
    both = pd.concat([masked, figure_2.published().assign(task="causal")])
    both = both[both["approximation"].isin(OPTIMAL)]
    both = both.assign(series=both["approximation"].map(method_label), count=both["r"])
    return pd.concat(
        both[
            (both["task"] == frame["task"].iloc[0]) & (both["kernel"] == frame["kernel"].iloc[0])
        ].assign(name=name, model=name)
        for name, frame in models.items()
    )


def _panels(frame: pd.DataFrame, theirs: pd.DataFrame, name: str) -> list[Panel]:
    """The optimal choices before a band of the others, and the others one by one."""
    optimal = frame["approximation"].isin(OPTIMAL)
    others = frame[~optimal]
    panels = [_panel(frame[optimal], theirs, PLAIN, others)]
    if len(others):
        panels.append(_panel(others, theirs.head(0), QUIET, others.head(0)))
    titles = ("optimal choices", "other choices")
    return [
        panel.properties(title=f"{name}: {of}") for panel, of in zip(panels, titles, strict=False)
    ]


def _panel(rows: pd.DataFrame, theirs: pd.DataFrame, look: Look, others: pd.DataFrame) -> Panel:
    task, keys = rows["task"].iloc[0], int(rows["head_dim"].iloc[0]) + 1
    title = figure_2.NATS if task == "causal" else figure_1.POINTS
    x = count_axis(figure_1.KEYS, rows["count"].tolist())
    y = change_axis(title, extent(rows, theirs, others[["value"]]), AROUND[task])
    marked = upright(keys, f"d + 1 = {keys}") if rows["count"].max() >= keys else []
    lines = curves(rows, method_marks(rows), x, y, look, theirs)
    return figure([*_band(others, x, y), *level(0.0), *marked, *lines])


def _band(others: pd.DataFrame, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """From the best to the worst of the other methods."""
    ends = others.groupby("count")["value"].agg(low="min", high="max").reset_index()
    low = y.copy()
    low.shorthand = "low:Q"
    area = alt.Chart(ends).mark_area(color="var(--grey)", opacity=0.25)
    return [area.encode(x=x, y=low, y2="high:Q")] if len(ends) else []
