"""The end metric of every setting: against r, against the output error, and cell by cell."""

import altair as alt
import pandas as pd

from value_aware_attention.records.estimate import number, short, signed
from value_aware_study.cards import cards
from value_aware_study.report import captions, charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.figures import (
    change_table,
    loss_axis,
    loss_panel,
    published_errors,
    published_losses,
)
from value_aware_study.report.frame import KERNEL_NAMES, OPTIMAL_METHODS, Results

OTHER_ORACLES = [
    name for name, card in cards().items() if card.oracle and name not in OPTIMAL_METHODS
]
"""Methods in Figure 5 besides the two oracles"""
SMALLEST_ERROR = 1e-3
"""Least output error in Figure 4; a setting below it counts as exact"""
EXPLAINING = {
    "relative_output_error": "output error", "cosine": "cosine", "relative_length": "length"
}  # fmt: skip
"""Columns of a cell's attention outputs that explain its loss, with their titles"""
REST = "other methods"


def figure_4(results: Results) -> Exhibit | None:
    """Shows a panel per model, with the rank correlation; None if no output error was recorded."""
    frame, names = results.changes, results.names()
    frame = frame[frame["relative_output_error"] >= SMALLEST_ERROR]
    frame = frame[frame["approximation"] != "exact"]
    if frame.empty:
        return None
    frame = frame.assign(
        name=frame["model"].map(names),
        setting=[words.setting_label(row) for row in frame.to_dict("records")],
        series=[
            words.method_label(name) if name in (*OPTIMAL_METHODS, "sliding_window") else REST
            for name in frame["approximation"]
        ],
    )
    drawn = [name for name in names.values() if name in set(frame["name"])]
    data = (
        frame[["model", "setting", *EXPLAINING, "value", "low", "high", *words.of_trainings(frame)]]
        .rename(columns={"value": "change"})
        .reset_index(drop=True)
    )
    return Exhibit(
        "figure_4",
        "Figure 4. Output error of the attention against the loss of the model",
        "The smaller the error of the attention's output, the smaller the model's loss."
        f"{captions.seeds(results)}",
        [
            "Each point is one setting: its relative output error, and the metric with that "
            f"approximation in every layer; hovering names it. {captions.OUTPUT_ERROR} "
            f"{captions.DIRECTION} {captions.recorded_on(results.records)} Settings with an error "
            f"under {SMALLEST_ERROR:g} count as exact and are left out. Not in the paper.",
        ],
        [_scatter(frame[frame["name"] == name], name) for name in drawn],
        Table(
            data,
            {
                "model": frame["name"].tolist(),
                "setting": data["setting"],
                **{title: [number(x, 4) for x in data[name]] for name, title in EXPLAINING.items()},
                "change from exact": [signed(value, 3) for value in data["change"]],
                "95% interval": words.intervals(data, 3, signed),
            },
        ),
        choices=drawn,
    )


def _scatter(frame: pd.DataFrame, name: str) -> look.Panel:
    task, named = frame["task"].iloc[0], frame[frame["series"] != REST]
    marks = look.method_marks(named) | ({REST: look.OTHER} if len(named) < len(frame) else {})
    where = "{setting}, output error {relative_output_error:.3g}, cosine {cosine:.3g}"
    told = words.sentences(frame, where, " nats" if task == "causal" else " points", "+")
    drawn = frame[["series", "relative_output_error", "value"]].assign(said=told)
    drawn = drawn.sort_values("series", key=lambda series: series != REST)
    x = charts.powers(
        alt.X, "relative_output_error", charts.ERROR_AXIS, frame["relative_output_error"].tolist()
    )
    y = loss_axis(task, frame["value"])
    ranks = frame[[*EXPLAINING, "value"]].rank().corr()["value"]
    error, cosine, _, _ = (signed(rank, 2) for rank in ranks)
    return charts.figure(
        [
            *charts.level(0.0),
            alt.Chart(drawn)
            .mark_point(filled=True, size=62)
            .encode(
                x=x,
                y=y,
                color=charts.colour(marks, orient="bottom"),
                shape=charts.shape(marks),
                opacity=charts.OPACITY,
            ),
            charts.nearest(drawn, x, y),
        ],
        f"{name}: rank correlation {error}, of the cosine {cosine}",
    )


def figure_5(results: Results) -> Exhibit | None:
    """Shows two panels per model, optimal methods and others; None if there is no curve."""
    models = _models(results)
    if not models:
        return None
    ours, theirs = pd.concat(models.values()), _published(models)
    return Exhibit(
        "figure_5",
        "Figure 5. What choosing for the output gains in the end",
        "What r keys add to the loss of exact attention, by weight (OVO) or for the output (OVA)."
        f"{captions.seeds(results, captions.PALE)}",
        [
            f"{captions.OPTIMAL} {captions.BEST_FOUND} Grey: from the best to the worst of the "
            "others, which the second panel has one by one.",
            f"{captions.BASELINES} Sampled from α: r draws with replacement, mean of the seeds.",
            "Differences from exact attention, ours from ours and the paper's (Tables 1 and 2, "
            "hollow, r = 1 and 65) from the paper's; the axis is even near zero and logarithmic "
            "beyond.",
            f"{captions.INTERVAL} {captions.NOT_JOINED}",
        ],
        [
            panel
            for name, frame in models.items()
            for panel in _panels(frame, theirs[theirs["name"] == name], name)
        ],
        change_table(ours, theirs),
        choices=list(models),
    )


def _models(results: Results) -> dict[str, pd.DataFrame]:
    """Returns settings with an r, of the causal models and the long masked one, by label."""
    frame, names = results.changes, results.names()
    frame = frame[
        frame["approximation"].isin([*OPTIMAL_METHODS, *OTHER_ORACLES]) & frame["r"].notna()
    ]
    frame = frame.assign(name=frame["model"].map(names))
    firsts = [record for kernel in KERNEL_NAMES if (record := results.of_kernel(kernel))]
    drawn = [names[record.model] for record in (*firsts, *results.models("masked_long"))]
    of_model = {name: frame[frame["name"] == name] for name in drawn}
    return {name: rows for name, rows in of_model.items() if len(rows)}


def _published(models: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Returns the paper's values of the optimal methods, for the models that we have."""
    masked = published_errors().assign(task="masked", kernel="exponential")
    both = pd.concat([masked, published_losses().assign(task="causal")])
    both = both[both["approximation"].isin(OPTIMAL_METHODS)]
    same = ["task", "kernel"]
    return pd.concat(
        both[(both[same] == frame[same].iloc[0]).all(axis=1)].assign(name=name, model=name)
        for name, frame in models.items()
    )


def _panels(frame: pd.DataFrame, theirs: pd.DataFrame, name: str) -> list[look.Panel]:
    """Draws the optimal choices in front of a band of the others, and the others one by one."""
    optimal = frame["approximation"].isin(OPTIMAL_METHODS)
    others, none = frame[~optimal], theirs.head(0)
    panels = [loss_panel(frame[optimal], theirs, title=f"{name}: optimal choices", others=others)]
    if len(others):
        panels.append(loss_panel(others, none, title=f"{name}: other choices", thin=True))
    return panels


def grid_table(results: Results) -> Exhibit:
    """Shows every cell: all columns as CSV; the metric, its change and the output error as text."""
    data = results.cells
    return Exhibit(
        "grid",
        "Every cell",
        f"All {len(data):,} cells of the grid: model, approximation, parameters and seed.",
        [
            "The CSV has every column: parameters, intervals, output error by layer, and counts. "
            f"{captions.DIRECTION}"
        ],
        table=Table(
            data,
            {
                "model": data["model"].map(words.plain_text),
                "setting": [words.setting_label(row) for row in data.to_dict("records")],
                "seed": [number(seed, 0) for seed in data["seed"]],
                "metric": data["metric"],
                "value": [number(value, 2) for value in data["value"]],
                "difference": [signed(value, 2) for value in data["difference"]],
                "95% interval of the difference": words.intervals(
                    data, 2, signed, ("difference_low", "difference_high")
                ),
                **{
                    title: [short(value) for value in data[name]]
                    for name, title in EXPLAINING.items()
                },
            },
        ),
        folded=True,
    )
