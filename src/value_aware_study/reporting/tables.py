"""Tables 1 and 2 beside the paper's, the skewness of the attention, and the whole grid."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from value_aware_study.reporting import captions, other_run
from value_aware_study.reporting.published import (
    SHORT_EXACT,
    TABLE_1,
    TABLE_2,
    TABLE_2_COLUMNS,
)
from value_aware_study.reporting.records import (
    KERNEL_LABELS,
    KERNELS,
    Record,
    causal_model,
    cells,
    find,
    in_order,
    model_named,
    setting_label,
    settings,
)
from value_aware_study.reporting.table import (
    DASH,
    Table,
    interval,
    number,
    ratio,
    signed,
    signed_interval,
    times,
    whole,
)

_TABLE_1_MEASURES = (
    *("value", "low", "high", "difference", "difference_low", "difference_high"),
    *("seeds", "seeds_low", "seeds_high", "count"),
)


def _table_1_row(label: str, paper: float | None, ours: Mapping[str, Any] | None) -> dict[str, Any]:
    row = {"method": label, "paper": paper} | dict.fromkeys(_TABLE_1_MEASURES)
    return row if ours is None else row | {name: ours[name] for name in _TABLE_1_MEASURES}


ALONE = "itself alone (window 1)"
BOTH_NEIGHBOURS = "both neighbours, counts"
COUNTS_TABLE_1 = {
    "unigram": "most frequent token",
    "left_neighbour": "left neighbour, counts",
    "both_neighbours": BOTH_NEIGHBOURS,
}
COUNTS_TABLE_2 = {
    "unigram": "unigram",
    "bigram": "bigram",
    "bigram_tokens_read": "bigram, tokens read",
}
BESIDE_TABLE_1 = (
    f"The last rows need no attention: {ALONE} lets each token see nothing else, and counts of all "
    "training tokens choose the most frequent token, the likeliest after the left neighbour, or "
    "that between both neighbours: the one seen there most often, else by p(w | left) p(right | w) "
    "of a Kneser-Ney bigram. Counts do not look at the token itself, which masking leaves as it is "
    "one time in ten."
)
BESIDE_TABLE_2 = (
    f"The last columns need no attention: {ALONE} lets each token see nothing else; unigram and "
    "interpolated Kneser-Ney bigram (Ney, Essen and Kneser, 1994) are counts of all training "
    "tokens, or of those that the model read."
)


def _without_attention(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows of Table 1: the short model on the same text, itself alone, and count models."""
    short, long = (model_named(records, f"masked_{name}") for name in ("short", "long"))
    empty = dict.fromkeys(_TABLE_1_MEASURES)
    on_long = (short or {}).get("longer_text")
    counts = (long or {}).get("count_models", {})
    alone = find(settings(records), "masked_long", "sliding_window", {"r": 1})
    return [
        _table_1_row("short model, exact, same text", None, on_long and empty | on_long),
        _table_1_row(ALONE, None, alone),
        *(
            _table_1_row(label, None, empty | counts.get(name, {}))
            for name, label in COUNTS_TABLE_1.items()
        ),
    ]


def _approximate_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The paper's cells in the paper's order, then our other LSH and ORF cells."""
    frame = settings(records)
    rows, shown = [], set()
    for cell in TABLE_1:
        ours = find(frame, "masked_long", cell.approximation, cell.parameters)
        label = setting_label({"approximation": cell.approximation, **cell.parameters})
        rows.append(_table_1_row(label, cell.error, ours))
        shown.add(label)
    long = frame[(frame["model"] == "masked_long") & frame["approximation"].isin(["orf", "lsh"])]
    for ours in long.sort_values(["approximation", "rounds", "r", "features"]).to_dict("records"):
        label = setting_label(ours)
        if label not in shown:
            rows.append(_table_1_row(label, None, ours))
    return rows


def _beside(rows: list[dict[str, Any]], other: Sequence[Record]) -> list[dict[str, Any]]:
    """The rows of Table 1 with what another run measured: `other_value`, `other_low`, ..."""
    frame = settings(other)
    long = frame[frame["model"] == "masked_long"].to_dict("records")
    theirs = {setting_label(row): row for row in long}
    theirs |= {row["method"]: row for row in _without_attention(other)}
    theirs["short model, exact"] = find(frame, "masked_short", "exact", {}) or {}
    names = ("value", "low", "high", "count")
    return [
        row | {f"other_{name}": theirs.get(row["method"], {}).get(name) for name in names}
        for row in rows
    ]


def _other_text(row: Mapping[str, Any], label: str) -> dict[str, str]:
    approximate = not row["method"].startswith(("exact", "short"))
    pair = (row["other_low"], row["other_high"]) if approximate else (None, None)
    return {f"{label}, error %": number(row["other_value"]), f"{label}, 95%": interval(*pair)}


def _error_text(row: Mapping[str, Any], other: Sequence[Record]) -> dict[str, str]:
    approximate = not row["method"].startswith(("exact", "short"))
    pair = (row["low"], row["high"]) if approximate else (None, None)
    change = (row["difference_low"], row["difference_high"]) if approximate else (None, None)
    several = row["seeds"] is not None and row["seeds"] > 1
    seeds = f"{interval(row['seeds_low'], row['seeds_high'])} ({row['seeds']})"
    return {
        "method": row["method"],
        "paper, error %": number(row["paper"], 2 if row["method"][:3] in ("ORF", "LSH") else 1),
        "ours, error %": number(row["value"]),
        "95% interval": interval(*pair),
        **(_other_text(row, other_run.label(other)) if other else {}),
        "change from exact, points": signed(row["difference"]) if approximate else DASH,
        "95% interval of the change": signed_interval(*change),
        "range over seeds (number)": seeds if several else DASH,
        "masked tokens": whole(row["count"]),
    }


def table_1(records: Sequence[Record], other: Sequence[Record] = ()) -> Table:
    """Masked-LM error of the long model under each approximation (Table 1 of the paper).

    `other` are the records of another run; where there are any, its error has columns too.
    """
    rows = _approximate_rows(records)
    short = find(settings(records), "masked_short", "exact", {})
    rows.append(_table_1_row("short model, exact", SHORT_EXACT, short))
    rows += _without_attention(records)
    theirs = [record for record in other if record["task"] == "masked"]
    rows = _beside(rows, theirs) if theirs else rows
    models = [model_named(records, name) for name in ("masked_long", "masked_short")]
    caption = " ".join(
        [
            "OVO: optimal value-oblivious with r keys a query; OVA: optimal value-aware; in LSH a",
            "query sees r keys in each hash round. The paper's model is RoBERTa-4096, and",
            "RoBERTa-512 in the row of the short model; its ORF is ours as written in A.1.",
            captions.keys((model for model in models[:1] if model), 4096),
            "LSH with as many keys as the sequence sees all of them.",
            BESIDE_TABLE_1,
            captions.NOT_THE_SAME_EXPERIMENT,
            captions.INTERVAL,
            captions.SEEDS,
            captions.ours(model for model in models if model),
            *filter(None, [other_run.described(theirs)]),
        ]
    )
    display = pd.DataFrame([_error_text(row, theirs) for row in rows])
    title = "Table 1. Masked-LM error under approximate attention"
    return Table("table_1", title, caption, pd.DataFrame(rows), display)


def _table_2_columns(
    records: Sequence[Record], kernel: str
) -> list[tuple[str, float | None, Mapping[str, Any]]]:
    """Name, the paper's perplexity and ours of every column for a kernel: {} where we have none."""
    model, frame = causal_model(records, kernel), settings(records)
    columns = []
    settings_of = [*TABLE_2_COLUMNS, (ALONE, "sliding_window", 1)]
    for (name, approximation, r), paper in zip(settings_of, [*TABLE_2[kernel], None], strict=True):
        parameters = {} if r is None else {"r": r}
        ours = find(frame, model["model"], approximation, parameters) if model else None
        columns.append((name, paper, ours or {}))
    counts = (model or {}).get("count_models", {})
    return columns + [(label, None, counts.get(name, {})) for name, label in COUNTS_TABLE_2.items()]


def _table_2_rows(records: Sequence[Record], kernel: str) -> list[dict[str, Any]]:
    columns = _table_2_columns(records, kernel)
    exact, rows = columns[0][2].get("value"), []
    for column, paper, ours in columns:
        value, low, high = (ours.get(name) for name in ("value", "low", "high"))
        row = {"kernel": kernel, "column": column, "paper": paper, "value": value}
        row |= {"low": low, "high": high, "ratio": ratio(value, exact)}
        row |= {"ratio_low": ratio(low, exact), "ratio_high": ratio(high, exact)}
        row |= {"paper_ratio": ratio(paper, TABLE_2[kernel][0]), "count": ours.get("count")}
        rows.append(row)
    return rows


def _table_2_lines(
    kernel: str, rows: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], label: str
) -> list[dict[str, str]]:
    def line(label: str, cells_of_line: Sequence[str]) -> dict[str, str]:
        names = (str(row["column"]) for row in rows)
        head = {"kernel": KERNEL_LABELS[kernel], "perplexity": label}
        return head | dict(zip(names, cells_of_line, strict=True))

    def measured(label: str, prefix: str, rows: Sequence[Mapping[str, Any]]) -> list[dict]:
        intervals = [interval(row["low"], row["high"]) for row in rows[1:]]
        return [
            line(label, [number(row["value"]) for row in rows]),
            line(f"{prefix}95% interval", [DASH, *intervals]),
            line(f"{prefix}relative to exact", [times(row["ratio"]) for row in rows]),
            line(f"{prefix}targets", [whole(row["count"]) for row in rows]),
        ]

    return [
        *measured("ours", "", rows),
        *(measured(label, f"{label}, ", other) if other else []),
        line("paper", [number(row["paper"]) for row in rows]),
        line("paper, relative to exact", [times(row["paper_ratio"]) for row in rows]),
    ]


_OTHER = ("value", "low", "high", "ratio", "ratio_low", "ratio_high", "count")


def table_2(records: Sequence[Record], other: Sequence[Record] = ()) -> Table:
    """Perplexity of one causal model a kernel under approximate attention (Table 2).

    `other` are the records of another run; where there are any, its perplexities have lines too.
    """
    by_kernel = {kernel: _table_2_rows(records, kernel) for kernel in KERNELS}
    other = [record for record in other if record["task"] == "causal"]
    theirs = {kernel: _table_2_rows(other, kernel) if other else [] for kernel in KERNELS}
    models = [model for kernel in KERNELS if (model := causal_model(records, kernel))]
    caption = " ".join(
        [
            "One model trained with each kernel, then evaluated with its attention replaced.",
            "The paper's models have 156M parameters and were trained on WikiText-103.",
            captions.keys(models, 512),
            BESIDE_TABLE_2,
            captions.NOT_THE_SAME_EXPERIMENT,
            captions.INTERVAL,
            captions.ours(models),
            *filter(None, [other_run.described(other)]),
        ]
    )
    label = other_run.label(other)
    lines = [
        line
        for kernel in KERNELS
        for line in _table_2_lines(kernel, by_kernel[kernel], theirs[kernel], label)
    ]
    data = pd.DataFrame([row for rows in by_kernel.values() for row in rows])
    measured = pd.DataFrame([row for rows in theirs.values() for row in rows], columns=_OTHER)
    if other:
        data = data.join(measured.add_prefix("other_"))
    title = "Table 2. Perplexity under approximate attention, for each kernel"
    return Table("table_2", title, caption, data, pd.DataFrame(lines))


_SKEWNESS = {
    "largest_weight": ("mean largest weight", 3),
    "rows_over_half": ("queries with a weight over 1/2, %", 1),
    "effective_keys": ("effective keys", 1),
    "keys_for_90_percent": ("keys holding 90% of the weight", 1),
}


def skewness_table(records: Sequence[Record]) -> Table:
    """How concentrated the attention weights of each model and layer are (section 3)."""
    head = ["model", "kernel", "layer"]
    rows = [
        {"model": record["model"], "kernel": record["kernel"], **layer}
        for record in in_order(records)
        for layer in record.get("skewness", [])
    ]
    data = pd.DataFrame(rows, columns=[*head, *_SKEWNESS])
    display = data[head].astype(str)
    for name, (label, digits) in _SKEWNESS.items():
        scale = 100 if name == "rows_over_half" else 1
        display[label] = [number(value * scale, digits) for value in data[name].astype(float)]
    caption = (
        "A flat row (small largest weight, many effective keys) is one where the values decide "
        "which keys matter (section 3). Means over the recorded queries of all heads; effective "
        f"keys: exp of the entropy; layers count from 0. {captions.recorded_on(in_order(records))} "
        f"{captions.settings_of(in_order(records))}"
    )
    title = "Skewness of the attention weights"
    return Table("skewness", title, caption, data, display)


def grid_csv(records: Sequence[Record]) -> str:
    """Every cell of every model, each seed on its own line, as CSV."""
    return cells(records).to_csv(index=False, lineterminator="\n", float_format="%.8g")
