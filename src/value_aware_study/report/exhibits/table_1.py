"""Masked-LM error of the long model under each approximation (Table 1 of the paper)."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import (
    DASH,
    interval,
    missing,
    number,
    ratio,
    signed,
    times,
    whole,
)
from value_aware_study.report.labels import setting_label
from value_aware_study.report.published import SHORT_EXACT, TABLE_1
from value_aware_study.report.results import Results

__all__ = ["ALONE", "BOTH_NEIGHBOURS", "baselines", "beside_exact", "exhibit"]

MEASURES = (
    *("value", "low", "high", "difference", "difference_low", "difference_high"),
    *("seeds", "seeds_low", "seeds_high", "count"),
)
MODELS = ("masked_long", "masked_short")
RANDOM = ("lsh", "orf")
"""Of which all our settings are shown, and two digits of the paper's numbers"""
ALONE = "itself alone (window 1)"
BOTH_NEIGHBOURS = "both neighbours, counts"
COUNTS = {
    "unigram": "most frequent token",
    "left_neighbour": "left neighbour, counts",
    "both_neighbours": BOTH_NEIGHBOURS,
}
BESIDE = (
    f"The last rows need no attention: {ALONE} lets each token see nothing else, and counts of all "
    "training tokens choose the most frequent token, the likeliest after the left neighbour, or "
    "that between both neighbours: the one seen there most often, else by p(w | left) p(right | w) "
    "of a Kneser-Ney bigram. Counts do not look at the token itself, which masking leaves as it is "
    "one time in ten."
)

Row = dict[str, Any]


def exhibit(results: Results) -> Exhibit | None:
    """The paper's rows, our other LSH and ORF, and what needs no attention; None without models."""
    models = results.models(*MODELS)
    if not models:
        return None
    short = results.find("masked_short", "exact")
    rows = [
        *_approximate_rows(results),
        _row("short model, exact", SHORT_EXACT, short, "exact"),
        *_without_attention(results),
    ]
    exact = results.find("masked_long", "exact").get("value")
    for row in rows:
        row["ratio"] = ratio(row["value"], exact)
        row["paper_ratio"] = ratio(row["paper"], TABLE_1[0].error)
    notes = [
        "OVO: optimal value-oblivious with r keys a query; OVA: optimal value-aware; in LSH a "
        "query sees r keys in each hash round. The paper's model is RoBERTa-4096, and RoBERTa-512 "
        "in the row of the short model; its ORF is ours as written in A.1. "
        f"{captions.keys(results.models('masked_long'), 4096)} LSH with as many keys as the "
        "sequence sees all of them.",
        BESIDE,
        f"{captions.NOT_THE_SAME_EXPERIMENT} {captions.INTERVAL} {captions.SEEDS}",
        *captions.not_evaluated(results, MODELS),
    ]
    return Exhibit(
        "table_1",
        "Table 1. Masked-LM error under approximate attention",
        "Masked tokens predicted wrongly, %, and in brackets the ratio to exact attention's.",
        notes,
        table=Table(
            pd.DataFrame(rows).drop(columns="approximation"), pd.DataFrame(list(map(_text, rows)))
        ),
    )


def baselines(results: Results, *models: str) -> dict[str, Mapping[str, Any]]:
    """What else scores on a model's targets, by name."""
    return {name: vars(one) for m in results.models(*models) for name, one in m.baselines.items()}


def beside_exact(value: Any, share: Any, digits: int = 1) -> str:
    """ "1,031.1 (× 33.8)": a value, and its ratio to exact attention's; a dash for none."""
    return DASH if missing(value) else f"{number(value, digits)} ({times(share)})"


def _row(label: str, paper: float | None, ours: Mapping[str, Any], approximation: str = "") -> Row:
    """`approximation` is "exact" where the row's own interval would be that of exact attention."""
    row = {"method": label, "approximation": approximation, "paper": paper}
    return row | {name: ours.get(name) for name in MEASURES}


def _without_attention(results: Results) -> list[Row]:
    """The short model on the same text, itself alone, and count models."""
    short, long = baselines(results, "masked_short"), baselines(results, "masked_long")
    on_long = short.get("longer_text", {})
    alone = results.find("masked_long", "sliding_window", r=1)
    return [
        _row("short model, exact, same text", None, on_long, "exact"),
        _row(ALONE, None, alone, "sliding_window"),
        *(_row(label, None, long.get(name, {})) for name, label in COUNTS.items()),
    ]


def _approximate_rows(results: Results) -> list[Row]:
    """The paper's cells in the paper's order, then our other LSH and ORF cells."""
    rows = []
    for cell in TABLE_1:
        ours = results.find("masked_long", cell.approximation, **cell.parameters)
        label = setting_label({"approximation": cell.approximation, **cell.parameters})
        rows.append(_row(label, cell.error, ours, cell.approximation))
    shown, frame = {row["method"] for row in rows}, results.settings
    long = frame[(frame["model"] == "masked_long") & frame["approximation"].isin(RANDOM)]
    for ours in long.sort_values(["approximation", "rounds", "r", "features"]).to_dict("records"):
        if (label := setting_label(ours)) not in shown:
            rows.append(_row(label, None, ours, ours["approximation"]))
    return rows


def _text(row: Mapping[str, Any]) -> dict[str, str]:
    approximate = row["approximation"] != "exact"
    pair = (row["low"], row["high"]) if approximate else (None, None)
    low, high = (row["difference_low"], row["difference_high"]) if approximate else (None, None)
    several = row["seeds"] is not None and row["seeds"] > 1
    seeds = f"{interval(row['seeds_low'], row['seeds_high'])} ({row['seeds']})"
    digits = 2 if row["approximation"] in RANDOM else 1
    return {
        "method": row["method"],
        "ours (× exact)": beside_exact(row["value"], row["ratio"]),
        "paper (× exact)": beside_exact(row["paper"], row["paper_ratio"], digits),
        "95% interval of ours": interval(*pair),
        "change from exact, points": signed(row["difference"]) if approximate else DASH,
        "95% interval of the change": interval(low, high, text=signed),
        "range over seeds (number)": seeds if several else DASH,
        "masked tokens": whole(row["count"]),
    }
