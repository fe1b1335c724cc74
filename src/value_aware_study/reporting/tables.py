"""Tables 1 and 2 beside the paper's, the skewness of the attention, and the whole grid."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from value_aware_study.reporting import captions
from value_aware_study.reporting.labels import KERNEL_LABELS, setting_label
from value_aware_study.reporting.published import (
    SHORT_EXACT,
    TABLE_1,
    TABLE_2,
    TABLE_2_COLUMNS,
)
from value_aware_study.reporting.results import KERNELS, Results
from value_aware_study.reporting.table import (
    DASH,
    Table,
    interval,
    number,
    ratio,
    signed,
    times,
    whole,
)

_TABLE_1_MEASURES = (
    *("value", "low", "high", "difference", "difference_low", "difference_high"),
    *("seeds", "seeds_low", "seeds_high", "count"),
)


Row = dict[str, Any]


def _table_1_row(
    label: str, paper: float | None, ours: Mapping[str, Any], approximation: str = ""
) -> Row:
    """`approximation` is "exact" where the row's own interval would be that of exact attention."""
    row = {"method": label, "approximation": approximation, "paper": paper}
    return row | {name: ours.get(name) for name in _TABLE_1_MEASURES}


RANDOM = ("lsh", "orf")
"""Of which all our settings are shown, and two digits of the paper's numbers"""
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
RATIOS = {"value": "ratio", "low": "ratio_low", "high": "ratio_high"}
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


def _without_attention(results: Results) -> list[Row]:
    """Rows of Table 1: the short model on the same text, itself alone, and count models."""
    short, long = _baselines(results, "masked_short"), _baselines(results, "masked_long")
    on_long = short.get("longer_text", {})
    alone = results.find("masked_long", "sliding_window", r=1)
    return [
        _table_1_row("short model, exact, same text", None, on_long, "exact"),
        _table_1_row(ALONE, None, alone, "sliding_window"),
        *(_table_1_row(label, None, long.get(name, {})) for name, label in COUNTS_TABLE_1.items()),
    ]


def _baselines(results: Results, *models: str) -> dict[str, Mapping[str, Any]]:
    """What else scores on a model's targets, by name."""
    return {name: vars(one) for m in results.models(*models) for name, one in m.baselines.items()}


def _approximate_rows(results: Results) -> list[Row]:
    """The paper's cells in the paper's order, then our other LSH and ORF cells."""
    rows = []
    for cell in TABLE_1:
        ours = results.find("masked_long", cell.approximation, **cell.parameters)
        label = setting_label({"approximation": cell.approximation, **cell.parameters})
        rows.append(_table_1_row(label, cell.error, ours, cell.approximation))
    shown, frame = {row["method"] for row in rows}, results.settings
    long = frame[(frame["model"] == "masked_long") & frame["approximation"].isin(RANDOM)]
    for ours in long.sort_values(["approximation", "rounds", "r", "features"]).to_dict("records"):
        if (label := setting_label(ours)) not in shown:
            rows.append(_table_1_row(label, None, ours, ours["approximation"]))
    return rows


def _error_text(row: Mapping[str, Any]) -> dict[str, str]:
    approximate = row["approximation"] != "exact"
    pair = (row["low"], row["high"]) if approximate else (None, None)
    low, high = (row["difference_low"], row["difference_high"]) if approximate else (None, None)
    several = row["seeds"] is not None and row["seeds"] > 1
    seeds = f"{interval(row['seeds_low'], row['seeds_high'])} ({row['seeds']})"
    return {
        "method": row["method"],
        "paper, error %": number(row["paper"], 2 if row["approximation"] in RANDOM else 1),
        "ours, error %": number(row["value"]),
        "95% interval": interval(*pair),
        "change from exact, points": signed(row["difference"]) if approximate else DASH,
        "95% interval of the change": interval(low, high, text=signed),
        "range over seeds (number)": seeds if several else DASH,
        "masked tokens": whole(row["count"]),
    }


def table_1(results: Results) -> Table:
    """Masked-LM error of the long model under each approximation (Table 1 of the paper)."""
    rows = _approximate_rows(results)
    short = results.find("masked_short", "exact")
    rows.append(_table_1_row("short model, exact", SHORT_EXACT, short, "exact"))
    rows += _without_attention(results)
    caption = " ".join(
        [
            "OVO: optimal value-oblivious with r keys a query; OVA: optimal value-aware; in LSH a",
            "query sees r keys in each hash round. The paper's model is RoBERTa-4096, and",
            "RoBERTa-512 in the row of the short model; its ORF is ours as written in A.1.",
            captions.keys(results.models("masked_long"), 4096),
            "LSH with as many keys as the sequence sees all of them.",
            BESIDE_TABLE_1,
            captions.NOT_THE_SAME_EXPERIMENT,
            captions.INTERVAL,
            captions.SEEDS,
            captions.ours(results.models("masked_long", "masked_short")),
        ]
    )
    display = pd.DataFrame([_error_text(row) for row in rows])
    title = "Table 1. Masked-LM error under approximate attention"
    data = pd.DataFrame(rows).drop(columns="approximation")
    return Table("table_1", title, caption, data, display)


def _table_2_rows(results: Results, kernel: str) -> list[Row]:
    """The paper's perplexity and ours of every column for a kernel: None where there is none."""
    model = results.of_kernel(kernel)
    name = model.model if model else ""
    paper = dict(zip((column for column, _, _ in TABLE_2_COLUMNS), TABLE_2[kernel], strict=True))
    ours: dict[str, Mapping[str, Any]] = {
        column: results.find(name, approximation, **({} if r is None else {"r": r}))
        for column, approximation, r in [*TABLE_2_COLUMNS, (ALONE, "sliding_window", 1)]
    }
    counts = _baselines(results, name)
    ours |= {label: counts.get(count, {}) for count, label in COUNTS_TABLE_2.items()}
    exact = ours["exact"].get("value")
    return [
        {"kernel": kernel, "column": column, "paper": paper.get(column)}
        | {end: cell.get(end) for end in RATIOS}
        | {name: ratio(cell.get(end), exact) for end, name in RATIOS.items()}
        | {"paper_ratio": ratio(paper.get(column), paper["exact"]), "count": cell.get("count")}
        for column, cell in ours.items()
    ]


def _table_2_lines(kernel: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    lines = {
        "ours": [number(row["value"]) for row in rows],
        "95% interval": [DASH, *(interval(row["low"], row["high"]) for row in rows[1:])],
        "relative to exact": [times(row["ratio"]) for row in rows],
        "targets": [whole(row["count"]) for row in rows],
        "paper": [number(row["paper"]) for row in rows],
        "paper, relative to exact": [times(row["paper_ratio"]) for row in rows],
    }
    names = [str(row["column"]) for row in rows]
    head = {"kernel": KERNEL_LABELS[kernel]}
    return [
        head | {"perplexity": label} | dict(zip(names, line, strict=True))
        for label, line in lines.items()
    ]


def table_2(results: Results) -> Table:
    """Perplexity of one causal model a kernel under approximate attention (Table 2)."""
    by_kernel = {kernel: _table_2_rows(results, kernel) for kernel in KERNELS}
    models = [model for kernel in KERNELS if (model := results.of_kernel(kernel))]
    caption = " ".join(
        [
            "One model trained with each kernel, then evaluated with its attention replaced.",
            "The paper's models have 156M parameters and were trained on WikiText-103.",
            captions.keys(models, 512),
            BESIDE_TABLE_2,
            captions.NOT_THE_SAME_EXPERIMENT,
            captions.INTERVAL,
            captions.ours(models),
        ]
    )
    lines = [line for kernel, rows in by_kernel.items() for line in _table_2_lines(kernel, rows)]
    data = pd.DataFrame([row for rows in by_kernel.values() for row in rows])
    title = "Table 2. Perplexity under approximate attention, for each kernel"
    return Table("table_2", title, caption, data, pd.DataFrame(lines))


_SKEWNESS = {
    "largest_weight": ("mean largest weight", 3),
    "rows_over_half": ("queries with a weight over 1/2, %", 1),
    "effective_keys": ("effective keys", 1),
    "keys_for_90_percent": ("keys holding 90% of the weight", 1),
}


def skewness_table(results: Results) -> Table:
    """How concentrated the attention weights of each model and layer are (section 3)."""
    head = ["model", "kernel", "layer"]
    rows = [
        {"model": record.model, "kernel": record.kernel, **vars(layer)}
        for record in results.records
        for attention in record.attention[:1]
        for layer in attention.skewness
    ]
    data = pd.DataFrame(rows, columns=[*head, *_SKEWNESS])
    display = data[head].astype(str)
    for name, (label, digits) in _SKEWNESS.items():
        scale = 100 if name == "rows_over_half" else 1
        display[label] = [number(value * scale, digits) for value in data[name].astype(float)]
    caption = (
        "A flat row (small largest weight, many effective keys) is one where the values decide "
        "which keys matter (section 3). Means over the recorded queries of all heads; effective "
        f"keys: exp of the entropy; layers count from 0. {captions.recorded_on(results.records)} "
        f"{captions.settings_of(results.records)}"
    )
    title = "Skewness of the attention weights"
    return Table("skewness", title, caption, data, display)


def grid_csv(results: Results) -> str:
    """Every cell of every model, each seed on its own line, as CSV."""
    return results.cells.to_csv(index=False, lineterminator="\n", float_format="%.8g")
