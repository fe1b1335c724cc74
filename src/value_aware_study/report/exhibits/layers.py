"""Exhibits of the attention layers: keys that match, the output error for every r, and skewness."""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from value_aware_attention.measurement.headline import (
    NAMES,
    matches,
    matches_at_random,
    shown_size,
    with_keys,
)
from value_aware_attention.measurement.headline import (
    match as match_of,
)
from value_aware_attention.measurement.record import ErrorAtSize, OutputError, Record
from value_aware_study.report import captions
from value_aware_study.report.charts import (
    ENDS,
    LEGEND,
    OPACITY,
    OUTPUT_ERROR,
    SHOWN,
    bars,
    colour,
    count_axis,
    curves,
    direction,
    figure,
    nearest,
    powers,
    powers_of_two,
    shape,
    toggled,
    upright,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.model import METRICS
from value_aware_study.report.look import Mark, Panel
from value_aware_study.report.measured import (
    AWARE,
    FLOOR,
    OBLIVIOUS,
    OPTIMAL,
    ORACLE_MARKS,
    ORACLES,
    SIZE,
    Measured,
    Rows,
    error_rows,
    full_name,
    gap_findings,
    gap_rows,
    measured_on,
    of_kernels,
    oracle_marks,
    own,
)
from value_aware_study.report.results import RANGE, Results, known, with_range
from value_aware_study.report.words import (
    NONE,
    counted,
    interval,
    intervals,
    method_label,
    missing,
    model_label,
    number,
    sentences,
    series_label,
    short,
    times,
    whole,
    with_interval,
)

LARGEST = 16
"""Most value-aware keys that bars are drawn for; the table has all."""
TRAINED, RANDOM = "trained", "random weights"
BAR_MARKS = ORACLE_MARKS | {TRAINED: Mark.of("teal"), RANDOM: Mark.of("grey")}
COUNTS = ("low", "high", "median", "lower_quartile", "upper_quartile")
COLUMNS = ("model", "layer", "r", "keys_needed", *COUNTS, "keys", "share", "value_aware_error")
BESIDE = ("random_keys", "random_low", "random_high")
NORMS = {f"norm_weighted_keys_{norm}": norm for norm in (2, 1)}
SCORES = (*NORMS, "leave_one_out_keys")
"""Scores of single keys by weight and value"""
ALIKE = 0.1
BOUND = "maurey_bound"
BOUND_LABEL, BOUND_MARK = "sampled from α, expected", Mark.of("grey", "stroke")
OTHERS = (
    f"{captions.BASELINES} Sampled from α: the expected error of the mean of r values drawn from "
    "α, Var/r (Maurey), which the optimum is never above."
)
TICKS = [step * 10.0**power for power in range(-1, 7) for step in (1, 2, 5)]
SHORT = "replace(replace(datum.label, 'degree ', ''), ' kernel', '')"
EXPLAINED = (
    "Section 3 argues that the flatter the attention weights, the more the values decide which "
    "keys matter: for a polynomial kernel of degree 0 all weights are equal, and with the degree "
    "they become skewed. A small point is one layer, with polynomials put in its kernel's place "
    "on the same queries, keys and values (post hoc) and with its own kernel; a large one, joined "
    "by a line, is the geometric mean of a model's layers. Effective keys, in the table: exp of "
    "the weights' entropy, as a share of all keys (a causal query sees fewer)."
)


def hero(results: Results) -> Exhibit | None:
    """Shows the answer as bars: keys by weight that match a few keys chosen for the output.

    The model is the first with counts among the probed, the causal and the other ones; with the
    range over its trainings, where it was trained again. None where no model has counts.
    """
    for record in [*results.probed, *results.causal, *results.records]:
        for measured in of_kernels(record)[:1]:
            if measured.output_error.matching_keys:
                again = own(results.replicates_of(record))
                name = model_label(record) if record.scale else record.model  # ours, else probed
                seeds = captions.seeds(results) if again else ""
                measured = replace(measured, label=name, replicates=again)
                return _answer(record, measured, "hero", seeds)
    return None


def control(record: Record, name: str, setting: str) -> Exhibit | None:
    """Shows a probed model beside random weights; None where these were not measured."""
    measured = replace(of_kernels(record)[0], label=record.model)
    if not (measured.control and measured.output_error.matching_keys):
        return None
    return _answer(record, measured, name, notes=[setting])


def _answer(
    record: Record, measured: Measured, name: str, seeds: str = "", notes: Sequence[str] = ()
) -> Exhibit:
    r, (metric, _, digits) = shown_size(record), METRICS[record.metric]
    found = [one for one in measured.output_error.matching_keys if one.layer is None]
    titled = next((one for one in found if one.r == r), found[-1])
    ends, panels = with_keys(record, r), _losses(record)
    said = f"{titled.r} keys chosen for the output do as well as {whole(titled.keys)} by weight"
    if panels:
        aware, oblivious = (number(ends[one].value, min(digits, 3)) for one in (AWARE, OBLIVIOUS))
        said = f"{metric} {aware} with {r} keys chosen for the output, {oblivious} by weight"
    first = "The end metric with few keys in every layer, and the keys" if panels else "Keys"
    return Exhibit(
        name,
        f"{measured.label} at {record.length:,} tokens: {said}",
        f"{first} chosen by weight that have the output error of r chosen for the output, all "
        f"layers pooled. Of single queries, {titled.r} match {titled.median:,} in the median "
        f"({titled.lower_quartile:,} to {titled.upper_quartile:,} in the quartiles)."
        f"{seeds} {matches_at_random(record)}".rstrip(),
        [
            f"{captions.MATCH} {captions.MATCH_OF_QUERIES}",
            f"{captions.OPTIMAL} {captions.BEST_FOUND} {captions.CONSERVATIVE}",
            *notes,
        ],
        [*panels, _bars(measured, "keys by weight that match r" if panels else "")],
        _counted(record, measured),
        shared=name == "hero",
    )


def _counted(record: Record, measured: Measured) -> Table:
    """Tabulates the counts pooled over layers; the data also has the end metric with r keys."""
    every = counts([measured])
    found = every[(every["layer"] == "all") & (every["r"] <= LARGEST)].reset_index(drop=True)
    ends = [
        {
            f"{net}{record.metric}_{method}{end and '_'}{end}": getattr(cell, end or "value")
            for net, of in (("", record), ("random_", record.control))
            for method, cell in with_keys(of, r).items()
            for end in ("", *ENDS)
        }
        for r in found["r"]
    ]
    return Table(found.join(pd.DataFrame(ends, found.index)), counts_table(found).display)


def _losses(record: Record) -> list[Panel]:
    """Draws the end metric with few keys, trained and with random weights; [] without these."""
    r, (metric, better, digits) = shown_size(record), METRICS[record.metric]
    nets = ((TRAINED, record), (RANDOM, record.control or record))
    if not with_keys(record.control, r) or not all(of.cells[0].value for _, of in nets):
        return []
    what = metric if record.metric == "cosine" else f"{metric.removesuffix(', %')}, exact = 1"
    rows: Rows = []
    for net, of in nets:
        for method, cell in sorted(with_keys(of, r).items(), key=lambda one: one[0] != AWARE):
            ends = {end: getattr(cell, end) for end in ("value", *ENDS)}
            shares = {end: one and round(one / of.cells[0].value, 3) for end, one in ends.items()}
            loss = with_interval(**ends, digits=digits)
            said = f"{net}, {r} keys {method_label(method)}: {metric} {loss}"
            name = NAMES.get(method, method_label(method))
            rows.append({"name": name, "series": net, "said": said} | shares)
    return [_paired(rows, direction(what, better), f"{r} keys in every layer")]


def matching_bars(measured: Sequence[Measured], name: str, setting: str) -> Exhibit | None:
    """Shows bars for every kernel of a probed model; None where nothing was counted."""
    kernels = [one for one in measured if one.output_error.matching_keys]
    if not kernels:
        return None
    return Exhibit(
        name,
        "The same output error with fewer keys",
        "Keys chosen by weight that come as close to the exact output as r chosen for it.",
        [
            f"{captions.MATCH} {captions.MATCH_OF_QUERIES}",
            f"{captions.BEST_FOUND} {captions.CONSERVATIVE}",
            *(f"{o.label}: {said}." for o in kernels if (said := matches(o.output_error))),
            setting,
        ],
        [
            _bars(replace(one, control=None), one.label if len(kernels) > 1 else "")
            for one in kernels
        ],
        counts_table(counts(kernels), "kernel"),
    )


def _bars(measured: Measured, title: str = "") -> Panel:
    """Draws the keys by weight that match r, trained and with random weights, or else beside r."""
    errors = measured.output_error
    nets = {ORACLES[OBLIVIOUS]: errors}
    if measured.control:
        nets = {TRAINED: errors, RANDOM: measured.control.output_error}
    rows: Rows = [
        {"name": f"r = {one.r}", "series": net, "value": one.keys, "low": one.low}
        | {"high": one.high, "said": f"{net}, {counted(one.keys, one.low, one.high)} keys"}
        for net, of in nets.items()
        for one in of.matching_keys
        if one.layer is None and one.r <= LARGEST
    ]
    if not measured.control:
        aware = {"series": ORACLES[AWARE], "low": None, "high": None}
        sizes = [int(row["name"].removeprefix("r = ")) for row in rows]
        said = f"{ORACLES[AWARE]}, {{}} keys".format
        rows = [
            *({"name": f"r = {r}", "value": r, "said": said(r)} | aware for r in sizes),
            *rows,
        ]
    return _paired(
        rows, f"keys by weight (of {errors.keys:,}) with the error of r value-aware", title
    )


def _paired(rows: Rows, what: str, title: str) -> Panel:
    """Draws a bar with its interval for each series of each row."""
    frame = pd.DataFrame(rows).astype(dict.fromkeys(("value", *ENDS), float))
    domain = [min(0.0, frame["value"].min()), 1.19 * frame[["value", *ENDS]].max().max()]
    axis = alt.Axis(grid=False, tickCount=5, format=",~r")
    x = alt.X("value:Q", title=what, scale=alt.Scale(domain=domain, nice=False), axis=axis)
    marks = {name: mark for name, mark in BAR_MARKS.items() if name in set(frame["series"])}
    return toggled(bars(frame, marks, x, None), 46, title)


def figure_7(measured: Sequence[Measured]) -> Exhibit | None:
    """Shows the counts pooled over layers, drawn and listed; None where none was made."""
    data = counts(measured)
    pooled = data[data["layer"] == "all"].reset_index(drop=True)
    if pooled.empty:
        return None
    return Exhibit(
        "figure_7",
        "Figure 7. How many keys chosen by weight match r value-aware keys",
        "Keys by weight (OVO) with at most the output error of r keys chosen for the output (OVA).",
        [
            f"{captions.MATCH} Bars: that interval. {captions.MATCH_OF_QUERIES}",
            f"{captions.BEST_FOUND} {captions.CONSERVATIVE} {measured_on(measured)}",
        ],
        [_counts_panel(pooled, {item.label: item.mark for item in measured})],
        counts_table(pooled),
    )


def keys_needed(measured: Sequence[Measured]) -> Exhibit | None:
    """Shows the counts pooled and in each layer; None where none was made."""
    data = counts(measured)
    if data.empty:
        return None
    return Exhibit(
        "keys_needed",
        "Matching keys in every layer",
        "Keys by weight (OVO) that match r keys chosen for the output (OVA), layer by layer.",
        [captions.MATCH, captions.MATCH_OF_QUERIES],
        table=counts_table(data),
        folded=True,
    )


def counts(measured: Sequence[Measured]) -> pd.DataFrame:
    """Tabulates counts by size, pooled and in each layer, with the range over trainings."""
    rows = [
        row
        for item in measured
        for one in (item.attention, *item.replicates)
        for row in _count_rows(item, one.output_error)
    ]
    data = pd.DataFrame(rows, columns=[*COLUMNS, *BESIDE])
    data = data.astype(dict.fromkeys(("keys_needed", *COUNTS, *BESIDE), "Int64"))
    if not known(data, BESIDE):
        data = data.drop(columns=[*BESIDE])
    return with_range(data, ["model", "layer", "r"], "keys_needed")


def counts_table(data: pd.DataFrame, named: str = "model") -> Table:
    """Builds the counts and their text; `named` heads the text's column of models or kernels."""
    display = pd.DataFrame([_count_text(row) for row in data.to_dict("records")])
    display = display.rename(columns={"model": named})
    if data["layer"].nunique() > 1:
        display.insert(1, "layer", data["layer"].astype(str))
    return Table(data, display)


def _count_rows(measured: Measured, errors: OutputError) -> Iterator[dict[str, Any]]:
    for match in errors.matching_keys:
        error = {row["r"]: row["error"] for row in error_rows(errors, AWARE, match.layer)}
        random = measured.control and match_of(measured.control.output_error, match.r, match.layer)
        yield {
            "model": measured.label,
            "layer": "all" if match.layer is None else match.layer,
            "r": match.r,
            "keys_needed": match.keys,
            "keys": errors.keys,
            "share": None if match.keys is None else match.keys / errors.keys,
            "value_aware_error": error[match.r],
            **{name: getattr(random, name.removeprefix("random_"), None) for name in BESIDE},
            **{name: getattr(match, name) for name in COUNTS},
        }


def _count_text(row: Mapping[str, Any]) -> dict[str, str]:
    lowest, highest = (row.get(name) for name in RANGE)
    over_seeds = {"range over seeds": interval(lowest, highest, 0)} if RANGE[0] in row else {}
    none = missing(row["keys_needed"])
    share = NONE if none else f"{100 * row['share']:.0f}% of {row['keys']:,}"
    return {
        "model": row["model"],
        "r, value-aware keys": str(row["r"]),
        "keys by weight": NONE if none else whole(row["keys_needed"]),
        "95% interval": interval(row["low"], row["high"], 0),
        **over_seeds,
        **(
            {RANDOM: with_interval(row["random_keys"], row["random_low"], row["random_high"], 0)}
            if BESIDE[0] in row
            else {}
        ),
        "share of all keys": share,
        "median query": whole(row["median"]),
        "quartiles": interval(row["lower_quartile"], row["upper_quartile"], 0),
    }


def _counts_panel(pooled: pd.DataFrame, marks: Mapping[str, Any]) -> Panel:
    names = {"model": "series", "r": "count", "keys_needed": "value"}
    frame = pooled.rename(columns=names)
    drawn = ["value", "low", "high", *known(frame, RANGE)]
    frame = frame.astype(dict.fromkeys(drawn, float))
    highest = float(frame[drawn].max().max())
    x = count_axis("r, keys chosen for the output (log scale)", frame["count"].tolist())
    scale = alt.Scale(type="log", base=2, domain=[0.8, highest * 1.4], nice=False)
    axis = alt.Axis(values=powers_of_two([1, highest]), format="d", labelOverlap="parity")
    y = alt.Y("value:Q", title="keys chosen by weight", scale=scale, axis=axis)
    where = "{series}, r = {count:,.0f}"
    said = sentences(frame, where, " keys by weight match", digits=0, text=number)
    frame = frame.assign(said=said)
    last = int(frame["count"].max())
    return figure([*_equal(last), *curves(frame, marks, x, y)], height=380)


def _equal(last: int) -> list[alt.Chart]:
    """Draws a dashed line of as many keys by weight as value-aware ones, with its name under it."""
    ends, middle = {"count": [1, last], "value": [1, last]}, [2 ** (last.bit_length() // 2)]
    line, place = (
        alt.Chart(pd.DataFrame(data)).encode(x="count:Q", y="value:Q")
        for data in (ends, {"count": middle, "value": middle, "name": ["equal number"]})
    )
    return [
        line.mark_line(strokeDash=[6, 4], strokeWidth=1.2, color="var(--muted)"),
        place.mark_text(align="left", baseline="top", dx=8, dy=6).encode(text="name:N"),
    ]


def output_error(
    measured: Sequence[Measured], name: str, setting: str, begins: str = "", column: str = "kernel"
) -> Exhibit | None:
    """Shows a panel for each model or kernel (`column`), with all layers pooled and each by itself.

    `begins` are the title's first words. None where nothing was measured.
    """
    if not measured:
        return None
    data = pd.DataFrame([{column: one.label} | row for one in measured for row in _error_rows(one)])
    several = any(len(one.output_error.methods) > len(OPTIMAL) for one in measured)
    return Exhibit(
        name,
        f"{begins}Output error against the keys kept",
        "How far the output of r keys is from exact attention's; thin lines are single layers."
        f"{_coinciding(measured)}",
        [
            f"{captions.OUTPUT_ERROR} Errors under {FLOOR:g}, zero included, are drawn there.",
            f"{captions.OPTIMAL} {captions.BEST_FOUND}",
            *([OTHERS] if several else []),
            setting,
        ],
        [_error_panel(one) for one in measured],
        Table(data, _error_text(data, column)),
        choices=[one.label for one in measured],
    )


def _coinciding(measured: Sequence[Measured]) -> str:
    """Names the models in which scores of weight and value leave the error of the weights alone."""
    names = []
    for one in measured:
        errors = one.output_error
        by_weight = {row["r"]: row["error"] or 0.0 for row in error_rows(errors, OBLIVIOUS)}
        ratios = [
            row["error"] / by_weight[row["r"]]
            for method in SCORES
            if method in errors.methods
            for row in error_rows(errors, method)
            if by_weight.get(row["r"], 0.0) > FLOOR
        ]
        if ratios and max(abs(ratio - 1) for ratio in ratios) < ALIKE:
            names.append(one.label)
    said = (
        f" The scores α|v| and CAOTE leave the error of the weights alone (OVO) within {ALIKE:.0%}"
    )
    return f"{said}, so that their curves lie on one another: {'; '.join(names)}." if names else ""


def _label(method: str) -> str:
    if method in NORMS:
        return series_label({"approximation": "norm_weighted_keys", "norm": NORMS[method]})
    return BOUND_LABEL if method == BOUND else full_name(method)


def _shown(
    output_error: OutputError, method: str, layer: int | None, measured: Container[int]
) -> list[dict[str, Any]]:
    """Selects points of the curve: powers of two, the last, and sizes with an interval."""
    rows = error_rows(output_error, method, layer)
    last = rows[-1]["r"]
    return [row for row in rows if (r := row["r"]).bit_count() == 1 or r == last or r in measured]


def _error_rows(measured: Measured) -> Iterator[dict[str, Any]]:
    """Yields one row a point: every method pooled, and each layer of the oracles."""
    errors = measured.output_error
    ends: dict[Any, dict[int, ErrorAtSize]] = defaultdict(dict)
    for one in errors.errors:
        if one.head is None:
            ends[one.method, one.layer][one.r] = one
    for method in errors.methods:
        for layer in (None, *(range(errors.layers) if method in OPTIMAL else ())):
            of_curve = ends[method, layer]
            for row in _shown(errors, method, layer, of_curve):
                at = of_curve.get(row["r"])
                place = {"method": method, "layer": "all" if layer is None else str(layer)}
                yield place | {"low": at and at.low, "high": at and at.high} | row


def _error_panel(measured: Measured) -> Panel:
    frame = pd.DataFrame(_error_rows(measured)).rename(columns={"error": "value", "r": "count"})
    frame = frame.assign(series=frame["method"].map(_label))
    frame["said"] = sentences(frame, "{series}, r = {count:,.0f}, output error")
    frame[["value", "low", "high"]] = frame[["value", "low", "high"]].astype(float).clip(FLOOR)
    pooled, single = frame[frame["layer"] == "all"], frame[frame["layer"] != "all"]
    x = count_axis("keys kept for each query, r", [1, measured.output_error.keys])
    y = powers(alt.Y, "value", OUTPUT_ERROR, [FLOOR, float(frame["value"].max())])
    thin = alt.Chart(single[["count", "series", "value", "layer"]]).mark_line(strokeWidth=0.8)
    thin = thin.encode(
        x=x,
        y=y,
        detail="layer:N",
        color="series:N",
        opacity=alt.when(SHOWN).then(alt.value(0.4)).otherwise(alt.value(0.05)),
    )
    keys, head = measured.output_error.keys, measured.output_error.head_dim + 1
    marked = upright(head) if head <= keys else []
    marks = oracle_marks(pooled.assign(approximation="")) | {BOUND_LABEL: BOUND_MARK}
    return figure([*marked, thin, *curves(pooled, marks, x, y)], measured.label)


def _error_text(data: pd.DataFrame, column: str) -> pd.DataFrame:
    return pd.DataFrame(
        {
            column: data[column],
            "method": data["method"].map(_label),
            "layer": data["layer"],
            "r, keys": [f"{r:,}" for r in data["r"]],
            "error": [NONE if missing(error) else short(error) for error in data["error"]],
            "95% interval": intervals(data, 3, short),
        }
    )


def skewness_gap(
    measured: Sequence[Measured], name: str, setting: str = "", begins: str = ""
) -> Exhibit | None:
    """Shows one panel over the degree, every model a series; None if nothing was measured."""
    frame = gap_rows(measured)
    if frame.empty:
        return None
    rows = sorted({gap.rows for item in measured if (gap := item.attention.skewness_gap)})
    on = f"{' or '.join(f'{count:,}' for count in rows)} queries a layer."
    shown = {
        "effective keys, % of all": [number(share, 2) for share in frame["share"]],
        f"OVO error / OVA error, r = {SIZE}": [times(gap) for gap in frame["gap"]],
    }
    display = frame[["model", "layer", "series"]].astype(str).assign(**shown)
    return Exhibit(
        name,
        f"{begins}Skewness of the attention and what choosing for the output gains",
        f"The error of {SIZE} keys chosen by weight over that of {SIZE} chosen for the output, by "
        "the degree of the kernel. Large marks are models, small ones their single layers.",
        [
            EXPLAINED,
            f"Errors under {FLOOR:g} count as {FLOOR:g}. {captions.BEST_FOUND} "
            f"{gap_findings(measured)} {on}",
            *([setting] if setting else []),
        ],
        [_gap_panel(frame, {item.label: item.mark for item in measured})],
        Table(frame, display),
        folded=bool(begins),
    )


def _gap_panel(frame: pd.DataFrame, marks: Mapping[str, Mark]) -> Panel:
    marks = {name: mark for name, mark in marks.items() if name in set(frame["model"])}
    frame = frame.rename(columns={"model": "series", "series": "kernel"})
    logs = frame.assign(log=np.log(frame["gap"])).groupby(["series", "kernel"], sort=False)
    mean = np.exp(logs["log"].mean()).rename("gap").reset_index()
    means, one = mean.rename(columns={"gap": "value"}), frame.rename(columns={"gap": "value"})
    gap = f", OVO's error over OVA's with {SIZE} keys"
    said = [
        *sentences(one, f"{{series}}, layer {{layer}}, {{kernel}}{gap}"),
        *sentences(means, f"{{series}}, mean of the layers, {{kernel}}{gap}"),
    ]
    told = pd.concat([one, means])[["kernel", "value"]].assign(said=said)
    named = alt.Axis(labelAngle=0, labelExpr=SHORT)
    order = sorted(frame["kernel"].unique())
    x = alt.X("kernel:N", title="degree, or the model's own kernel", sort=order, axis=named)
    title = f"OVO error / OVA error, r = {SIZE}"
    ends = [frame["gap"].min() / 1.2, frame["gap"].max() * 1.2]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(values=TICKS, format="~r")
    y = alt.Y("gap:Q", title=title, scale=scale, axis=axis)
    shown: dict[str, Any] = {"color": colour(marks, **LEGEND), "opacity": OPACITY}
    of_layers, line, of_models = (
        alt.Chart(rows[["series", "kernel", "gap"]]).encode(x=x, y=y, **shown)
        for rows in (frame, mean[mean["kernel"].str.startswith("degree")], mean)
    )
    layers = [
        of_layers.mark_point(filled=True, size=18, fillOpacity=0.5).encode(shape=shape(marks)),
        line.mark_line(strokeWidth=1.6),
        of_models.mark_point(filled=True, size=90).encode(shape=shape(marks)),
        nearest(told.rename(columns={"value": "gap"}), x, y),
    ]
    return figure(layers)
