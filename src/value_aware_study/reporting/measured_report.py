"""Figures and table of what was measured on recorded attention calls, with their captions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from value_aware_study.reporting import captions
from value_aware_study.reporting.measurements import AWARE, Measured, Rows, error_rows
from value_aware_study.reporting.output_error_figures import (
    FLOOR,
    intervals,
    matching_keys_figure,
    output_error_figure,
)
from value_aware_study.reporting.skewness_figure import gap_findings, skewness_figure
from value_aware_study.reporting.table import Figure, Table, interval, setting_value, whole

SMALLEST = setting_value(FLOOR)

BASELINES = (
    f"{captions.BASELINES} Dashed: the expected error of the mean of r values drawn from α, Var/r "
    "(Maurey), which the optimum is never above. "
)
CONSERVATIVE = "As OVA's error is an upper bound on the optimal one, the counts are conservative."


def _queries(measured: Iterable[Measured]) -> str:
    """What they were measured on: "causal, elu: 256 queries of 8 windows in each of 4 layers"."""
    groups: dict[str, list[str]] = {}
    for item in measured:
        errors = item.output_error
        units = captions.plural(errors.units, errors.unit)
        queries = f"{errors.rows:,} queries of {units} in each of {errors.layers} layers"
        on = f"{queries}, {errors.keys:,} keys"
        of = f"{on}, heads of {errors.head_dim} dimensions, OVA's search: {errors.search}"
        groups.setdefault(of, []).append(item.label)
    sentences = [f"{'; '.join(labels)}: {of}." for of, labels in groups.items()]
    return " ".join(sentences) or "No output error was measured."


def _output_error_caption(measured: Sequence[Measured]) -> str:
    known = any(intervals(item.output_error) for item in measured)
    others = BASELINES if any("maurey_bound" in m.output_error.methods for m in measured) else ""
    return (
        f"{captions.OUTPUT_ERROR} Here {'as bars' if known else 'without intervals'}, on the exact "
        "model's own queries, keys and values. Thick: all layers pooled; thin: OVO and OVA in each "
        f"layer. {captions.OPTIMAL} {captions.BEST_FOUND} {others}Errors under {SMALLEST}, zero "
        f"included, are drawn at {SMALLEST}. {_queries(measured)}"
    )


def _matching_caption(measured: Sequence[Measured]) -> str:
    return (
        f"{captions.MATCH} Bars: that interval. Dashed: as many keys. {captions.BEST_FOUND} "
        f"{CONSERVATIVE} {_queries(measured)}"
    )


def _skewness_caption(measured: Sequence[Measured]) -> str:
    rows = sorted({gap.rows for item in measured if (gap := item.attention.skewness_gap)})
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
    """Output error, matching keys and skewness against the gap: those that `names` has.

    `names` gives each figure's file name and what its title begins with; `setting` ends captions.
    """
    drawn = {
        "output_error": (
            "Output error against the keys kept",
            _output_error_caption,
            output_error_figure,
        ),
        "matching_keys": (
            "How many keys chosen by weight match r value-aware keys",
            _matching_caption,
            matching_keys_figure,
        ),
        "skewness_gap": (
            "Skewness of the attention and what choosing by the output gains",
            _skewness_caption,
            skewness_figure,
        ),
    }
    return [
        Figure(file, begins + title, f"{caption(measured)} {setting}", draw(measured))
        for name, (file, begins) in names.items()
        for title, caption, draw in [drawn[name]]
    ]


_COUNTS = ("low", "high", "median", "lower_quartile", "upper_quartile")


def _matching_rows(item: Measured) -> Rows:
    """One row for every size pooled, then for every size in each layer."""
    errors, rows = item.output_error, []
    for match in errors.matching_keys:
        error = {row["r"]: row["error"] for row in error_rows(errors, AWARE, match.layer)}
        row: dict[str, Any] = {
            "model": item.label,
            "layer": "all" if match.layer is None else match.layer,
        }
        row |= {"r": match.r, "keys_needed": match.keys, "keys": errors.keys}
        row |= {"share": match.keys / errors.keys, "value_aware_error": error[match.r]}
        rows.append(row | {name: getattr(match, name) for name in _COUNTS})
    return rows


def _matching_text(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "r, value-aware keys": str(row["r"]),
        "keys by weight": whole(row["keys_needed"]),
        "95% interval": interval(row["low"], row["high"], 0),
        "share of all keys": f"{100 * row['share']:.0f}% of {row['keys']:,}",
        "median query": whole(row["median"]),
        "quartiles": interval(row["lower_quartile"], row["upper_quartile"], 0),
    }


def matching_table(name: str, measured: Sequence[Measured], setting: str) -> Table:
    """Keys chosen by weight that match r value-aware keys; the CSV has every layer."""
    rows = [row for item in measured for row in _matching_rows(item)]
    columns = ("model", "layer", "r", "keys_needed", *_COUNTS, "keys", "share", "value_aware_error")
    data = pd.DataFrame(rows, columns=list(columns))
    data = data.astype(dict.fromkeys(("keys_needed", *_COUNTS), "Int64"))
    display = pd.DataFrame([_matching_text(row) for row in rows if row["layer"] == "all"])
    caption = (
        f"{captions.MATCH} {captions.MATCH_OF_QUERIES} The CSV has each layer. "
        f"{captions.BEST_FOUND} {CONSERVATIVE} {_queries(measured)} {setting}"
    )
    title = "Keys chosen by attention weight that match r value-aware keys"
    return Table(name, title, caption, data, display)
