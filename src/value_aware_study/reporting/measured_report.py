"""Figures and table of what was measured on recorded attention calls, with their captions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from value_aware_study.reporting import captions
from value_aware_study.reporting.figure import Figure
from value_aware_study.reporting.measurements import (
    AWARE,
    Measured,
    OutputError,
    Rows,
    error_rows,
    keys_needed,
    sizes_to_compare,
    with_output_error,
)
from value_aware_study.reporting.output_error_figures import (
    FLOOR,
    keys_needed_figure,
    output_error_figure,
)
from value_aware_study.reporting.skewness_figure import gap_findings, skewness_figure
from value_aware_study.reporting.table import Table, interval, setting_value, whole

SMALLEST = setting_value(FLOOR)

CONSERVATIVE = "As OVA's error is an upper bound on the optimal one, the counts are conservative."


def _queries(measured: Iterable[Measured]) -> str:
    """What they were measured on: "causal, elu: 256 queries of 8 windows in each of 4 layers"."""
    groups: dict[str, list[str]] = {}
    for item, errors in with_output_error(list(measured)):
        layers = len(errors["squared_norm"])
        units = captions.plural(errors["units"], item.unit)
        queries = f"{errors['rows']:,} queries of {units} in each of {layers} layers"
        on = f"{queries}, {errors['keys']:,} keys"
        of = f"{on}, heads of {errors['head_dim']} dimensions, OVA's search: {errors['search']}"
        groups.setdefault(of, []).append(item.label)
    sentences = [f"{'; '.join(labels)}: {of}." for of, labels in groups.items()]
    return " ".join(sentences) or "No output error was measured."


def _output_error_caption(measured: Sequence[Measured]) -> str:
    return (
        f"{captions.OUTPUT_ERROR} Here without intervals, on the exact model's own queries, keys "
        "and values. Thick: all layers pooled; thin: OVO and OVA in each layer. "
        f"{captions.OPTIMAL} {captions.BEST_FOUND} {captions.BASELINES} Dashed: the expected error "
        "of the mean of r values drawn from α, Var/r (Maurey), which the optimum is never above. "
        f"Errors under {SMALLEST}, zero included, are drawn at {SMALLEST}. {_queries(measured)}"
    )


def _needed_caption(measured: Sequence[Measured]) -> str:
    return (
        f"{captions.MATCH} Bars: that interval. Dashed: as many keys. {captions.BEST_FOUND} "
        f"{CONSERVATIVE} {_queries(measured)}"
    )


def _skewness_caption(measured: Sequence[Measured]) -> str:
    rows = sorted({gap["rows"] for item in measured if (gap := item.skewness_gap)})
    on = f"{' or '.join(f'{count:,}' for count in rows) or 'No'} queries a layer."
    return (
        "Section 3 argues that the flatter the attention weights, the more the values decide which "
        "keys matter: for a polynomial kernel of degree 0 all weights are equal, and with the "
        "degree they become skewed. One point is one layer: its own kernel, and polynomials put in "
        "its place on the same queries, keys and values (post hoc; a line joins the degrees of a "
        "layer). Effective keys: exp of the weights' entropy, as a share of all keys (a causal "
        f"query sees fewer). Errors under {SMALLEST} count as {SMALLEST}. {captions.BEST_FOUND} "
        f"{gap_findings(measured)} {on}"
    )


def measured_figures(
    measured: Sequence[Measured], names: Mapping[str, tuple[str, str]], setting: str
) -> list[Figure]:
    """Output error, keys needed and skewness against the gap.

    `names` gives each figure's file name and what its title begins with; `setting` ends captions.
    """
    drawn = (
        (
            "output_error",
            "Output error against the keys kept",
            _output_error_caption(measured),
            output_error_figure(measured),
        ),
        (
            "keys_needed",
            "How many keys chosen by weight match r value-aware keys",
            _needed_caption(measured),
            keys_needed_figure(measured),
        ),
        (
            "skewness_gap",
            "Skewness of the attention and what choosing by the output gains",
            _skewness_caption(measured),
            skewness_figure(measured),
        ),
    )
    return [
        Figure(names[name][0], names[name][1] + title, f"{caption} {setting}", chart)
        for name, title, caption, chart in drawn
    ]


_COUNTS = ("low", "high", "median", "lower_quartile", "upper_quartile")


def _needed_rows(item: Measured, errors: OutputError) -> Rows:
    """One row for every size pooled, then for every size in each layer."""
    rows = []
    for layer in (None, *range(len(errors["squared_norm"]))):
        aware = {row["r"]: row["error"] for row in error_rows(errors, AWARE, layer)}
        for r in sizes_to_compare(errors):
            if (found := keys_needed(errors, r, layer)) is None:
                continue
            row: dict[str, Any] = {"model": item.label, "layer": "all" if layer is None else layer}
            row |= {"r": r, "keys_needed": found["keys"], "keys": errors["keys"]}
            row |= {"share": found["keys"] / errors["keys"], "value_aware_error": aware[r]}
            rows.append(row | {name: found[name] for name in _COUNTS})
    return rows


def _needed_text(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "r, value-aware keys": str(row["r"]),
        "keys by weight": whole(row["keys_needed"]),
        "95% interval": interval(row["low"], row["high"], 0),
        "share of all keys": f"{100 * row['share']:.0f}% of {row['keys']:,}",
        "median query": whole(row["median"]),
        "quartiles": interval(row["lower_quartile"], row["upper_quartile"], 0),
    }


def keys_needed_table(measured: Sequence[Measured], setting: str) -> Table:
    """Keys chosen by weight that match r value-aware keys; the CSV has every layer."""
    items = with_output_error(measured)
    rows = [row for item, errors in items for row in _needed_rows(item, errors)]
    columns = ("model", "layer", "r", "keys_needed", *_COUNTS, "keys", "share", "value_aware_error")
    data = pd.DataFrame(rows, columns=list(columns))
    data = data.astype(dict.fromkeys(("keys_needed", *_COUNTS), "Int64"))
    display = pd.DataFrame([_needed_text(row) for row in rows if row["layer"] == "all"])
    caption = (
        f"{captions.MATCH} {captions.MATCH_OF_QUERIES} The CSV has each layer. "
        f"{captions.BEST_FOUND} {CONSERVATIVE} {_queries(measured)} {setting}"
    )
    title = "Keys chosen by attention weight that match r value-aware keys"
    return Table("keys_needed", title, caption, data, display)
