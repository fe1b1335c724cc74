"""Figures of the end metric: the paper's, then every setting against r and the output error."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt
import pandas as pd

from value_aware_attention.records.estimate import interval, number, short, signed, whole
from value_aware_study.report import captions, charts, look, published
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits import pretrained
from value_aware_study.report.exhibits.tables import (
    CAUSAL_LENGTH,
    MASKED_LENGTH,
    model_trainings,
)
from value_aware_study.report.frame import KERNEL_NAMES, OPTIMAL_METHODS, Results, averaged
from value_aware_study.report.words import (
    KERNEL_LABELS,
    full_name,
    intervals,
    method_label,
    of_trainings,
    plain_text,
    range_over,
    sentences,
    series_label,
    setting_label,
    times,
)

CHANGED = {
    "r": ("r, keys per query (log scale)", "r = {r:,.0f}"),
    "features": ("random features (log scale)", "{features:,.0f} features"),
    "share": ("keys, % of the length (log scale)", "{share:.2g}% of the keys"),
}
"""Columns on the x axis of changes, with the axis' title and the words of a sentence"""
SMALLEST_ERROR = 1e-3
"""Least output error in Figure 4; a setting below it counts as exact"""
EXPLAINING = {
    "relative_output_error": "output error", "cosine": "cosine", "relative_length": "length"
}  # fmt: skip
"""Columns of a cell's attention outputs that explain its loss, with their titles"""
REST = "other methods"


def loss_axis(task: str, values: Iterable[Any]) -> alt.Y:
    """Builds the axis of changes from exact attention's loss, linear to 0.1 nats or 1 point."""
    title, around = (
        (charts.direction("nats per token above exact", "lower"), 0.1)
        if task == "causal"
        else (charts.direction("points of error above exact", "lower"), 1.0)
    )
    return charts.change_axis(title, values, around)


def loss_panel(
    ours: pd.DataFrame,
    theirs: pd.DataFrame,
    of: str = "r",
    title: str = "",
    marks: Mapping[str, look.Mark] | None = None,
) -> look.Panel:
    """Draws changes from exact attention against keys, features or the share of keys (`of`).

    The paper's marks are hollow.
    """
    (label, at), task, keys = CHANGED[of], ours["task"].iloc[0], int(ours["head_dim"].iloc[0]) + 1
    frames = {"": ours.dropna(subset=of), "paper, ": theirs.dropna(subset=of)}
    unit = " nats" if task == "causal" else " points"
    drawn, hollow = (
        frame.assign(
            count=frame[of].astype(float),
            said=sentences(frame, f"{whose}{{series}}, {at}", unit, "+"),
        )
        for whose, frame in frames.items()
    )
    counts = [*drawn["count"], *hollow["count"]]
    x = (
        charts.powers(alt.X, "count", label, counts)
        if of == "share"
        else charts.count_axis(label, counts)
    )
    y = loss_axis(task, charts.extent(drawn, hollow))
    marks = marks or look.method_marks(pd.concat([drawn, hollow]))
    return charts.figure(
        [
            *charts.level(0.0),
            *(charts.upright(keys) if of == "r" and max(counts) >= keys else []),
            *charts.curves(drawn, marks, x, y, hollow),
        ],
        title,
    )


def change_table(ours: pd.DataFrame, theirs: pd.DataFrame) -> Table:
    """Tabulates everything drawn, ours first; the paper's values have no interval."""
    whose, single = (
        ours["scale"].eq("").map({True: "pretrained", False: "ours"}),
        of_trainings(ours),
    )
    numbers = ["r", "share", "features", "value", "low", "high", *single]
    data = pd.concat(
        [
            frame.reindex(columns=["model", "series", *numbers])
            .astype(dict.fromkeys(numbers, float))
            .assign(whose=name)
            for name, frame in ((whose, ours), ("paper", theirs))
        ],
        ignore_index=True,
    )
    ranges = [interval(*range_over(row), 2, signed) for row in data.to_dict("records")]
    of_seeds = {"range over trainings": ranges} if single else {}
    return Table(
        data,
        {
            "whose": data["whose"],
            "model": data["model"].fillna("").map(plain_text),
            "method": data["series"].fillna(""),
            "r or features": [whole(n) for n in data["r"].fillna(data["features"])],
            "keys, % of the length": [number(share) for share in data["share"]],
            "change from exact": [signed(value, 2) for value in data["value"]],
            "95% interval": intervals(data, 2, signed),
            **of_seeds,
        },
    )


def figure_1(results: Results) -> Exhibit | None:
    """Shows every setting with its interval, and the paper's; None if none was evaluated."""
    frame = results.changes[results.changes["model"] == "masked_long"]
    methods = ["optimal_v_oblivious", "optimal_v_aware", "sliding_window", "lsh", "orf"]
    ours, theirs = frame[frame["approximation"].isin(methods)], published_errors()
    if ours.empty:
        return None
    others = results.changes[results.changes["scale"] == ""]
    decoder = others[(others["length"] == CAUSAL_LENGTH) & others["approximation"].isin(methods)]
    beside = published_losses()[lambda frame: frame["kernel"] == "exponential"]
    panels = [
        loss_panel(of_ours, of_theirs, of, title)
        for of_ours, of_theirs, of, title in (
            (ours, theirs, "r", "sparse methods"),
            (ours, theirs, "features", "ORF"),
            (ours, theirs, "share", "sparse methods, by share of keys"),
            (decoder, beside, "share", " ".join(decoder["model"].unique())),
        )
        if of_ours[of].notna().any()
    ]
    return Exhibit(
        "figure_1",
        "Figure 1. Masked-LM error of the long model under approximate attention",
        "What each method adds to exact attention's error, by keys, features, or keys as a share "
        "of the length; hollow: the paper."
        f"{captions.seeds(results, captions.PALE, ['masked'])}",
        [
            "Differences are from our exact attention for ours, from the paper's for the paper's "
            "(Table 1, hollow). The axis is linear up to one point, logarithmic beyond. LSH of "
            "more than one round sees more keys than r.",
            "OVO: chosen by weight; OVA: chosen for the output; ORF as written in the paper's A.1 "
            f"and with Performer's scaling. {captions.BEST_FOUND}",
            *(
                [f"{pretrained.TEXT_NOTE} Its loss is in nats; hollow: Table 2."]
                if len(decoder)
                else []
            ),
            f"{captions.INTERVAL} {captions.SEEDS} {captions.NOT_JOINED}",
        ],
        panels,
        change_table(pd.concat([ours, decoder]), theirs),
        choices=["keys and features", "keys as a share of the length"] if len(panels) == 4 else (),
    )


def published_errors() -> pd.DataFrame:
    """Computes Table 1's changes from the paper's exact error, in points."""
    rows = [
        {"approximation": cell.approximation, **cell.parameters}
        | {"value": cell.error - published.TABLE_1[0].error}
        for cell in published.TABLE_1[1:]
    ]
    return (
        pd.DataFrame(rows)
        .assign(series=[series_label(row) for row in rows])
        .astype({"r": float, "features": float})
        .eval(f"share = 100 * r / {MASKED_LENGTH}")
    )


def figure_2(results: Results) -> Exhibit | None:
    """Shows the change of each kernel's loss, and the paper's; None if none was evaluated."""
    ours = results.changes
    causal = (ours["task"] == "causal") & ours["kernel"].isin(KERNEL_NAMES)
    if (ours := ours[causal & (ours["approximation"] == "optimal_v_oblivious")]).empty:
        return None
    ours = ours.assign(
        series=ours["kernel_label"].where(ours["scale"] != "", ours["model"])
    ).drop_duplicates(["series", "r"])
    theirs = published_losses("optimal_v_oblivious").assign(
        series=lambda losses: losses["kernel"].map(KERNEL_LABELS)
    )
    marks = look.KERNEL_MARKS | look.ramp(ours[ours["scale"] == ""]["model"].unique())
    return Exhibit(
        "figure_2",
        "Figure 2. Loss of keys chosen by weight, for each kernel",
        "What the r largest weights add to the loss of each kernel's model, by keys and by their "
        "share of the length; hollow: the paper."
        f"{captions.seeds(results, captions.PALE, ['causal'])}",
        [
            "Top r keys by attention weight, up to all keys. Differences are from our exact "
            "attention's loss for ours, from the paper's for the paper's (Table 2, hollow). The "
            "axis is linear up to 0.1 nats, logarithmic beyond. The paper's order of loss is "
            "polynomial, elu, exponential; a claim compares it with ours.",
            *([pretrained.TEXT_NOTE] if "" in set(ours["scale"]) else []),
            captions.INTERVAL,
            *captions.not_evaluated(results, [f"causal_{kernel}" for kernel in KERNEL_NAMES]),
        ],
        [loss_panel(ours, theirs, of, marks=marks) for of in ("r", "share")],
        change_table(ours, theirs),
    )


def published_losses(approximation: str | None = None) -> pd.DataFrame:
    """Computes Table 2's changes from the paper's exact loss, in nats, of one or all methods."""
    return pd.DataFrame(
        [
            {
                "kernel": kernel,
                "approximation": name,
                "series": series_label({"approximation": name}),
            }
            | {
                "r": float(r),
                "share": 100 * r / CAUSAL_LENGTH,
                "value": math.log(perplexity / row[0]),
            }
            for kernel, row in published.TABLE_2.items()
            for (_, name, r), perplexity in zip(published.TABLE_2_COLUMNS, row, strict=True)
            if r is not None and approximation in (None, name)
        ]
    )


def figure_3(results: Results) -> Exhibit | None:
    """Shows learning curves, masked and causal models apart; None if there are none."""
    lengths = {record.model: f", {record.length} tokens" for record in results.records}
    drawn = [
        *(
            (f"masked_{name}", "error", f"{name}{lengths.get(f'masked_{name}', '')}", mark)
            for name, mark in (("short", look.SHORT_MARK), ("long", look.LONG_MARK))
        ),
        *((f"causal_{k}", "loss", KERNEL_LABELS[k], look.kernel_mark(k)) for k in KERNEL_NAMES),
    ]
    rows = [
        {"series": name, "metric": metric, "count": point["step"], "value": value}
        | {"training": training, "units": 1, "low": math.nan, "high": math.nan}
        for model, metric, name, _ in drawn
        for training, metrics in model_trainings(results.training, model).items()
        for point in metrics.get("curve", [])
        if (value := point.get("error_percent" if metric == "error" else metric)) is not None
    ]
    if not rows:
        return None
    data = averaged(pd.DataFrame(rows), ["series", "count"], "value").dropna(axis=1, how="all")
    marks = {name: mark for _, _, name, mark in drawn}
    return Exhibit(
        "figure_3",
        "Figure 3. Learning curves with exact attention",
        "The metric of every model while it was trained"
        f"{f', mean of its trainings{captions.PALE}' if of_trainings(data) else ''}.",
        [
            "The long masked model starts from the trained short one, with new positions; a step "
            "of one model need not see as many tokens as a step of another."
        ],
        [_figure_3_panel(rows, str(metric), marks) for metric, rows in data.groupby("metric")],
        Table(
            data.rename(columns={"count": "step"}),
            {
                "model": data["series"],
                "metric": data["metric"],
                "optimizer step": [whole(step) for step in data["count"]],
                "value": [number(value, 2) for value in data["value"]],
            },
        ),
    )


def _figure_3_panel(frame: pd.DataFrame, metric: str, marks: Mapping[str, look.Mark]) -> look.Panel:
    unit, title = (
        ("% wrong", "masked tokens predicted wrongly, %")
        if metric == "error"
        else (" nats per token", "evaluation loss, nats per token")
    )
    frame = frame.assign(said=sentences(frame, "{series}, step {count:,.0f}", unit))
    x = alt.X(
        "count:Q",
        title="optimizer steps",
        axis=alt.Axis(
            grid=False, tickCount=5, format=",d", labelOverlap="greedy", labelSeparation=8
        ),
        scale=alt.Scale(domainMin=0),
    )
    y = alt.Y("value:Q", title=charts.direction(title, "lower"), scale=alt.Scale(zero=False))
    return charts.figure(charts.curves(frame, marks, x, y))


def figure_4(results: Results) -> Exhibit | None:
    """Shows a panel per model, with the rank correlation; None if no output error was recorded."""
    frame, names = results.changes, results.names()
    frame = frame[frame["relative_output_error"] >= SMALLEST_ERROR]
    if (frame := frame[frame["approximation"] != "exact"]).empty:
        return None
    frame = frame.assign(
        name=frame["model"].map(names),
        setting=[setting_label(row) for row in frame.to_dict("records")],
        series=[
            method_label(name) if name in (*OPTIMAL_METHODS, "sliding_window") else REST
            for name in frame["approximation"]
        ],
    )
    drawn = [name for name in names.values() if name in set(frame["name"])]
    data = (
        frame[["model", "setting", *EXPLAINING, "value", "low", "high", *of_trainings(frame)]]
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
            f"{captions.DIRECTION} Settings with an error "
            f"under {SMALLEST_ERROR:g} count as exact and are left out. Not in the paper.",
        ],
        [_figure_4_panel(frame[frame["name"] == name], name) for name in drawn],
        Table(
            data,
            {
                "model": frame["name"].tolist(),
                "setting": data["setting"],
                **{title: [number(x, 4) for x in data[name]] for name, title in EXPLAINING.items()},
                "change from exact": [signed(value, 3) for value in data["change"]],
                "95% interval": intervals(data, 3, signed),
            },
        ),
        choices=drawn,
    )


def _figure_4_panel(frame: pd.DataFrame, name: str) -> look.Panel:
    task, named = frame["task"].iloc[0], frame[frame["series"] != REST]
    marks = look.method_marks(named) | ({REST: look.OTHER} if len(named) < len(frame) else {})
    told = sentences(
        frame,
        "{setting}, output error {relative_output_error:.3g}, cosine {cosine:.3g}",
        " nats" if task == "causal" else " points",
        "+",
    )
    drawn = frame[["series", "relative_output_error", "value"]].assign(said=told)
    drawn = drawn.sort_values("series", key=lambda series: series != REST)
    x = charts.powers(
        alt.X, "relative_output_error", charts.ERROR_AXIS, frame["relative_output_error"].tolist()
    )
    y = loss_axis(task, frame["value"])
    error, cosine, _, _ = (
        signed(rank, 2) for rank in frame[[*EXPLAINING, "value"]].rank().corr()["value"]
    )
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
    """Shows perplexity over exact attention's, a panel a causal model; None if there is none."""
    frame, names = results.changes, results.names()
    firsts = [record for kernel in KERNEL_NAMES if (record := results.of_kernel(kernel))]
    frame = frame[
        frame["approximation"].isin([*OPTIMAL_METHODS, "sliding_window"]) & frame["r"].notna()
    ]
    frame = frame[frame["model"].isin([record.model for record in firsts])]
    if frame.empty:
        return None
    numbers = ["value", "low", "high", *of_trainings(frame)]
    data = frame[["model", "approximation", "series", "r"]].assign(
        name=frame["model"].map(names),
        series=frame["approximation"].map(full_name),
        **{name: frame[name].astype(float).map(math.exp, na_action="ignore") for name in numbers},
    )
    data = data.sort_values("model", key=lambda of: of.map([*names].index), kind="stable")
    ranges = [interval(*range_over(row), 3, short) for row in data.to_dict("records")]
    drawn = data.rename(columns={"r": "count"}).astype({"count": float})
    drawn["said"] = sentences(drawn, "{series}, r = {count:,.0f}, perplexity over exact")
    return Exhibit(
        "figure_5",
        "Figure 5. What choosing for the output gains in the end",
        "Perplexity over exact attention's, with r keys chosen by weight (OVO), for the output "
        f"(OVA), or the last r.{captions.seeds(results, captions.PALE, ['causal'])}",
        [f"{captions.BEST_FOUND} {captions.NOT_JOINED}"],
        charts.against_keys(drawn, "perplexity"),
        Table(
            data,
            {
                "model": data["name"],
                "keys": data["series"],
                "r": data["r"].astype(str),
                "over exact": data["value"].map(times),
                "95% interval": intervals(data, 3, short),
                **({"range over trainings": ranges} if of_trainings(data) else {}),
            },
            grouped=True,
        ),
    )


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
                "model": data["model"].map(plain_text),
                "setting": [setting_label(row) for row in data.to_dict("records")],
                "seed": [number(seed, 0) for seed in data["seed"]],
                "metric": data["metric"],
                "value": [number(value, 2) for value in data["value"]],
                "difference": [signed(value, 2) for value in data["difference"]],
                "95% interval of the difference": intervals(
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
