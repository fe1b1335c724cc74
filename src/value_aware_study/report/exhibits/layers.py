"""Exhibits of the attention layers: keys that match, output errors for every r, and skewness."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import altair as alt
import pandas as pd

from value_aware_attention.records.estimate import (
    NO_COUNT,
    interval,
    number,
    short,
    whole,
    with_interval,
)
from value_aware_attention.records.headline import (
    METHOD_NAMES,
    count_text,
    match,
    matches,
    matches_at_random,
    shown_size,
    with_keys,
)
from value_aware_attention.records.matching import NOT_DETERMINED, SLOT
from value_aware_attention.records.record import AWARE, OBLIVIOUS, SLOTS, OutputError, Record
from value_aware_study.report import captions, charts, look, words
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.model import METRIC_TITLES
from value_aware_study.report.frame import (
    FLOOR,
    GAP_PLACE,
    OPTIMAL_METHODS,
    SIZE,
    Measured,
    Row,
    averaged,
    error_rows,
    filled,
    gap_rows,
    of_kernels,
)

MOST_BAR_KEYS = 16
"""Most value-aware keys with bars; the table has all"""
OF_TRAINING, AT_RANDOM = "trained", "random weights"
BAR_MARKS = look.ORACLE_MARKS | {
    OF_TRAINING: look.Mark("var(--ink)"),
    AT_RANDOM: look.Mark.of("grey"),
}
QUARTILES = ("low", "high", "median", "lower_quartile", "upper_quartile")
CONTROLS = ("random_keys", "random_low", "random_high")
NORM_OF_METHOD = {f"norm_weighted_keys_{norm}": norm for norm in (2, 1)}
BOUND_LABEL = "sampled from α, expected"
LABELS = {
    **{
        path: words.series_label({"approximation": SLOT, "mass": mass})
        for mass, path in SLOTS.items()
    },
    **{
        path: words.series_label({"approximation": "norm_weighted_keys", "norm": norm})
        for path, norm in NORM_OF_METHOD.items()
    },
    "maurey_bound": BOUND_LABEL,
}
"""Names of the curves of output errors that belong to no method"""
OTHERS = (
    f"{captions.BASELINES} Sampled from α: the expected error of the mean of r values drawn from "
    "α, Var/r (Maurey), which the optimum is never above."
)


def control(record: Record, name: str, setting: str) -> Exhibit | None:
    """Shows a probed model next to random weights; None if these were not measured."""
    measured = replace(of_kernels(record)[0], label=record.model)
    if not (measured.control and measured.output_error.matching_keys):
        return None
    r, (metric, _, digits) = shown_size(record), METRIC_TITLES[record.metric]
    pooled = {
        match.r: match for match in measured.output_error.matching_keys if match.layer is None
    }
    titled = pooled.get(r, [*pooled.values()][-1])
    panels = _losses(record)
    sentence = f"{titled.r} keys chosen for the output do as well as {whole(titled.keys)} by weight"
    if panels:
        cells = with_keys(record, r)
        aware, oblivious = (number(cells[m].value, min(digits, 3)) for m in (AWARE, OBLIVIOUS))
        sentence = f"{metric} {aware} with {r} keys chosen for the output, {oblivious} by weight"
    # the CSV also has the end metric with r keys
    data = counts([measured])
    data = data[(data["layer"] == "all") & (data["r"] <= MOST_BAR_KEYS)].reset_index(drop=True)
    metrics = [
        {
            f"{net}{record.metric}_{method}{end and '_'}{end}": getattr(cell, end or "value")
            for net, of in (("", record), ("random_", record.control))
            for method, cell in with_keys(of, r).items()
            for end in ("", *charts.END_COLUMNS)
        }
        for r in data["r"]
    ]
    first = "The end metric with few keys in every layer, and the keys" if panels else "Keys"
    return Exhibit(
        name,
        f"{measured.label} at {record.length:,} tokens: {sentence}",
        f"{first} chosen by weight that have the output error of r chosen for the output, all "
        f"layers pooled. Query by query, {titled.r} match {titled.median:,} in the median "
        f"(quartiles {titled.lower_quartile:,} to {titled.upper_quartile:,})."
        f" {matches_at_random(record)}".rstrip(),
        [
            f"{captions.MATCH} {captions.MATCH_OF_QUERIES}",
            f"{captions.OPTIMAL} {captions.BEST_FOUND} {captions.CONSERVATIVE}",
            setting,
        ],
        [*panels, _bars(measured, "keys by weight that match r" if panels else "")],
        Table(data.join(pd.DataFrame(metrics, data.index)), counts_table(data).display),
    )


def _losses(record: Record) -> list[look.Panel]:
    """Draws the end metric with few keys, trained and random; [] without random weights."""
    r, (metric, better, digits) = shown_size(record), METRIC_TITLES[record.metric]
    nets = ((OF_TRAINING, record), (AT_RANDOM, record.control or record))
    if not with_keys(record.control, r) or not all(of.cells[0].value for _, of in nets):
        return []
    what = metric if record.metric == "cosine" else f"{metric.removesuffix(', %')}, exact = 1"
    rows: list[Row] = []
    for net, of in nets:
        for method, cell in sorted(with_keys(of, r).items(), key=lambda item: item[0] != AWARE):
            ends = {end: getattr(cell, end) for end in ("value", *charts.END_COLUMNS)}
            rows.append(
                {"name": METHOD_NAMES.get(method, words.method_label(method)), "series": net}
                | {
                    "said": f"{net}, {r} keys {words.method_label(method)}: {metric} "
                    f"{with_interval(**ends, digits=digits)}"
                }
                | {end: x and round(x / of.cells[0].value, 3) for end, x in ends.items()}
            )
    return [_paired(rows, charts.direction(what, better), f"{r} keys in every layer")]


def matching_bars(measured: Sequence[Measured], name: str, setting: str) -> Exhibit | None:
    """Shows bars for every kernel of a probed model; None if nothing was counted."""
    if not (kernels := [kernel for kernel in measured if kernel.output_error.matching_keys]):
        return None
    findings = {kernel.label: matches(kernel.output_error) for kernel in kernels}
    return Exhibit(
        name,
        "The same output error with fewer keys",
        "Keys chosen by weight that come as close to the exact output as r chosen for it.",
        [
            f"{captions.MATCH} {captions.MATCH_OF_QUERIES}",
            f"{captions.BEST_FOUND} {captions.CONSERVATIVE}",
            *(f"{label}: {finding}." for label, finding in findings.items() if finding),
            setting,
        ],
        [
            _bars(replace(kernel, control=None), kernel.label if len(kernels) > 1 else "")
            for kernel in kernels
        ],
        counts_table(counts(kernels), "kernel"),
    )


def _bars(measured: Measured, title: str = "") -> look.Panel:
    """Draws the keys by weight that match r, next to those for random weights or to r itself."""
    errors = measured.output_error
    nets = (
        {OF_TRAINING: errors, AT_RANDOM: measured.control.output_error}
        if measured.control
        else {words.ORACLES[OBLIVIOUS]: errors}
    )
    sizes = [row.r for row in errors.matching_keys if row.layer is None and row.r <= MOST_BAR_KEYS]
    rows: list[Row] = [
        {"name": f"r = {r}", "series": net, "value": row.keys, "low": row.low, "high": row.high}
        | {"said": f"{net}, {count_text(row, of)} keys"}
        for net, of in nets.items()
        for r in sizes
        if (row := match(of, r))
    ]
    if not measured.control:
        aware = words.ORACLES[AWARE]
        rows = [
            *[{"name": f"r = {r}", "series": aware, "value": r, "said": aware} for r in sizes],
            *rows,
        ]
    seen = f"{(errors.keys + 1) // 2:,} seen on average" if errors.causal else f"{errors.keys:,}"
    return _paired(rows, f"keys by weight (of {seen}) with the error of r", title)


def _paired(rows: Sequence[Row], what: str, title: str) -> look.Panel:
    frame = pd.DataFrame(rows).astype(dict.fromkeys(("value", *charts.END_COLUMNS), float))
    x = alt.X(
        "value:Q",
        title=what,
        scale=alt.Scale(
            domain=[
                min(0.0, frame["value"].min()),
                1.19 * frame[["value", *charts.END_COLUMNS]].max().max(),
            ],
            nice=False,
        ),
        axis=alt.Axis(grid=False, tickCount=5, format=",~r"),
    )
    return charts.toggled(charts.bars(frame, BAR_MARKS, x), 46, title)


def figure_7(measured: Sequence[Measured]) -> Exhibit | None:
    """Draws the counts pooled over layers, and lists those of layers; None if there are none."""
    data = counts(measured)
    if (pooled := data[data["layer"] == "all"].reset_index(drop=True)).empty:
        return None
    return Exhibit(
        "figure_7",
        "Figure 7. How many keys chosen by weight match r value-aware keys",
        "Keys by weight (OVO) with at most the output error of r keys chosen for the output (OVA)."
        f"{captions.means((item.label for item in measured), captions.PALE)}",
        [
            f"{captions.MATCH} Bars: that interval. {captions.MATCH_OF_QUERIES}",
            f"{captions.BEST_FOUND} {captions.CONSERVATIVE} {captions.queries_of(measured)}",
        ],
        [_counts_panel(pooled, {item.label: item.mark for item in measured})],
        counts_table(data),
    )


def counts(measured: Sequence[Measured]) -> pd.DataFrame:
    """Tabulates counts by size, pooled and in each layer, as means over trainings."""
    rows = (
        row | {"training": item.training, "units": item.output_error.units}
        for item in measured
        for row in _count_rows(item)
    )
    columns = [
        *("model", "layer", "r", "keys_needed", *QUARTILES, "keys", "share", "value_aware_error"),
        *(*CONTROLS, "training", "units"),
    ]
    data = pd.DataFrame(rows, columns=columns)
    data = averaged(
        data,
        ["model", "layer", "r"],
        "keys_needed",
        (*QUARTILES[2:], "share", "value_aware_error", *CONTROLS),
    )
    data = data.astype(dict.fromkeys(("keys_needed", *QUARTILES, *CONTROLS), float))
    data["low"], data["high"] = data["low"].clip(data["r"]), data["high"].clip(None, data["keys"])
    return data if filled(data, CONTROLS) else data.drop(columns=[*CONTROLS])


def counts_table(data: pd.DataFrame, named: str = "model") -> Table:
    """Tabulates the counts and their text; `named` heads its column of models or kernels."""
    counted, single = data["keys_needed"].notna(), words.of_trainings(data)
    written = number if single else whole  # a mean of counts has a decimal
    share = (100 * data["share"].astype(float)).map("{:.0f}% of ".format)
    beyond = (data["high"] >= data["keys"]).fillna(False)  # an end at all keys is undetermined
    ends = zip(words.intervals(data, 0), data["low"], beyond, strict=True)
    ranges = [interval(*words.range_over(row), 0) for row in data.to_dict("records")]
    random = zip(*(data[name] for name in CONTROLS if name in data), strict=True)
    columns = {
        named: data["model"],
        **({"layer": data["layer"].astype(str)} if data["layer"].nunique() > 1 else {}),
        "r, value-aware keys": data["r"].astype(str),
        "keys by weight": data["keys_needed"].map(written).where(counted, NO_COUNT),
        "95% interval": [
            f"{whole(low)} to {NOT_DETERMINED}" if is_beyond else text
            for text, low, is_beyond in ends
        ],
        **({"range over trainings": ranges} if single else {}),
        **(
            {AT_RANDOM: [with_interval(keys, low, high, 0) for keys, low, high in random]}
            if CONTROLS[0] in data
            else {}
        ),
        "share of all keys": (share + data["keys"].map("{:,}".format)).where(counted, NO_COUNT),
        "median query": data["median"].map(whole),
        "quartiles": words.intervals(data, 0, ends=("lower_quartile", "upper_quartile")),
    }
    return Table(data, columns)


def _count_rows(measured: Measured) -> Iterator[Row]:
    """Yields the counts of one training of a model."""
    random, errors = measured.control and measured.control.output_error, measured.output_error
    for at in errors.matching_keys:
        error = {row["r"]: row["error"] for row in error_rows(errors, AWARE, at.layer)}
        beside = random and match(random, at.r, at.layer)
        yield {
            "model": measured.label,
            "layer": "all" if at.layer is None else at.layer,
            "r": at.r,
            "keys_needed": at.keys,
            "keys": errors.keys,
            "share": None if at.keys is None else at.keys / errors.keys,
            "value_aware_error": error[at.r],
            **{name: getattr(beside, name.removeprefix("random_"), None) for name in CONTROLS},
            **{name: getattr(at, name) for name in QUARTILES},
        }


def _counts_panel(pooled: pd.DataFrame, marks: Mapping[str, look.Mark]) -> look.Panel:
    names = {"model": "series", "r": "count", "keys_needed": "value"}
    numbers = ["value", "low", "high", *words.of_trainings(pooled)]
    frame = pooled.rename(columns=names).astype(dict.fromkeys(numbers, float))
    highest = float(frame[numbers].max().max())
    x = charts.count_axis("r, keys chosen for the output (log scale)", frame["count"].tolist())
    y = alt.Y(
        "value:Q",
        title="keys chosen by weight",
        scale=alt.Scale(type="log", base=2, domain=[0.8, highest * 1.4], nice=False),
        axis=alt.Axis(values=charts.powers_of_two([1, highest]), format="d", labelOverlap="parity"),
    )
    where, unit = "{series}, r = {count:,.0f}", " keys by weight match"
    frame = frame.assign(said=words.sentences(frame, where, unit, digits=0, text=number))
    last = int(frame["count"].max())
    ends, middle = {"count": [1, last], "value": [1, last]}, [2 ** (last.bit_length() // 2)]
    line, place = (
        alt.Chart(pd.DataFrame(data)).encode(x="count:Q", y="value:Q")
        for data in (ends, {"count": middle, "value": middle, "name": ["equal number"]})
    )
    equal = [
        line.mark_line(strokeDash=[6, 4], strokeWidth=1.2, color="var(--muted)"),
        place.mark_text(align="left", baseline="top", dx=8, dy=6).encode(text="name:N"),
    ]
    return charts.figure([*equal, *charts.curves(frame, marks, x, y)], height=380)


def output_error(
    measured: Sequence[Measured], name: str, setting: str, begins: str = "", column: str = "kernel"
) -> Exhibit | None:
    """Shows a panel per model or kernel (`column`), with all layers pooled and each separately.

    `begins` are the title's first words. None if nothing was measured.
    """
    if not measured:
        return None
    rows = (
        {column: item.label, "training": item.training, "units": item.output_error.units} | row
        for item in measured
        for row in _error_rows(item)
    )
    data = averaged(pd.DataFrame(rows), [column, "method", "layer", "r"], "error")
    models = {item.label: item.output_error for item in measured}
    trained = captions.means((item.label for item in measured), captions.PALE)
    panels = {"": data[data["method"].isin(OPTIMAL_METHODS)]}
    if set(data["method"]) > set(OPTIMAL_METHODS):
        panels[", every rule"] = data
    return Exhibit(
        name,
        f"{begins}Output error against the keys kept",
        "How far the output of r keys is from exact attention's; thin lines are single layers."
        f"{trained}",
        [
            f"{captions.OUTPUT_ERROR} Errors under {FLOOR:g}, zero included, are drawn there.",
            f"{captions.OPTIMAL} {captions.BEST_FOUND}",
            *([OTHERS] if set(data["method"]) > set(OPTIMAL_METHODS) else []),
            setting,
        ],
        [
            _error_panel(rows[rows[column] == label], label, of)
            for rows in panels.values()
            for label, of in models.items()
        ],
        _error_table(data, column),
        choices=[label + what for what in panels for label in models],
    )


def _error_table(data: pd.DataFrame, column: str) -> Table:
    """Tabulates errors of every method, layer and number of keys."""
    columns = {
        column: data[column],
        "method": [LABELS.get(method, words.full_name(method)) for method in data["method"]],
        "layer": data["layer"],
        "r, keys": [f"{r:,}" for r in data["r"]],
        "error": [NO_COUNT if words.missing(error) else short(error) for error in data["error"]],
        "95% interval": words.intervals(data, 3, short),
    }
    return Table(data, columns, grouped=True)


def _error_rows(measured: Measured) -> Iterator[Row]:
    """Yields one row per point: every method pooled, and each layer of the oracles.

    Points are powers of two, the last size, and sizes with an interval.
    """
    errors = measured.output_error
    ends = {(at.method, at.layer, at.r): at for at in errors.errors if at.head is None}
    for method in errors.methods:
        for layer in (None, *(range(errors.layers) if method in OPTIMAL_METHODS else ())):
            place = {"method": method, "layer": "all" if layer is None else str(layer)}
            rows = error_rows(errors, method, layer)
            for row in rows:
                at = ends.get((method, layer, row["r"]))
                if at or row is rows[-1] or row["r"].bit_count() == 1:
                    yield place | {"low": at and at.low, "high": at and at.high} | row


def _error_panel(frame: pd.DataFrame, label: str, errors: OutputError) -> look.Panel:
    frame = frame.rename(columns={"error": "value", "r": "count"}).assign(
        series=[LABELS.get(method, words.full_name(method)) for method in frame["method"]]
    )
    frame["said"] = words.sentences(frame, "{series}, r = {count:,.0f}, output error")
    numbers = ["value", "low", "high", *words.of_trainings(frame)]
    frame[numbers] = frame[numbers].astype(float).clip(FLOOR)
    pooled, single = frame[frame["layer"] == "all"], frame[frame["layer"] != "all"]
    keys, head = errors.keys, errors.head_dim + 1
    x = charts.count_axis("keys kept for each query, r", [1, keys])
    y = charts.powers(alt.Y, "value", charts.ERROR_AXIS, [FLOOR, float(frame["value"].max())])
    thin = alt.Chart(single[["count", "series", "value", "layer"]]).mark_line(strokeWidth=0.8)
    thin = thin.encode(
        x=x,
        y=y,
        detail="layer:N",
        color="series:N",
        opacity=alt.when(charts.SERIES_SHOWN).then(alt.value(0.4)).otherwise(alt.value(0.05)),
    )
    marks = look.oracle_marks(pooled.assign(approximation="")) | {
        BOUND_LABEL: look.Mark.of("grey", "stroke")
    }
    return charts.figure(
        [
            *(charts.upright(head) if head <= keys else []),
            thin,
            *charts.curves(pooled, marks, x, y),
        ],
        label,
    )


def skewness_gap(measured: Sequence[Measured], name: str, setting: str = "") -> Exhibit | None:
    """Tabulates the gap of OVO over OVA by layer and kernel; None if nothing was measured."""
    if (frame := gap_rows(measured)).empty:
        return None
    return Exhibit(
        name,
        "Skewness of the attention and what choosing for the output gains",
        f"The error of {SIZE} keys chosen by weight over that of {SIZE} chosen for the output. "
        "Polynomials replace a layer's kernel, on the same queries, keys and values: the higher "
        "the degree, the more skewed are the weights.",
        [setting] if setting else [],
        table=Table(
            frame,
            frame[[*GAP_PLACE, "series"]]
            .astype(str)
            .assign(
                **{
                    "effective keys, % of all": [number(share, 2) for share in frame["share"]],
                    f"OVO error / OVA error, r = {SIZE}": [
                        words.times(gap) for gap in frame["gap"]
                    ],
                }
            ),
            grouped=True,
        ),
        folded=True,
        listed="Skewness",
    )
