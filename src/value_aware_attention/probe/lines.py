"""What a probe found, in words and as lines of text: for a terminal, while it runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from value_aware_attention.probe.layer_errors import AWARE, OBLIVIOUS, SHARES

__all__ = [
    "HEADLINE_SIZES",
    "all_lines",
    "headline",
    "layer_lines",
    "match",
    "metric_header",
    "metric_line",
]

Record = Mapping[str, Any]
NAMES = {OBLIVIOUS: "by weight", AWARE: "value-aware"}
HEADLINE_SIZES = (4, 8, 16)
DIGITS = {"perplexity": 2, "error": 1, "cosine": 4}
UNITS = {"perplexity": "", "error": " %", "cosine": ""}
WIDTH = 26


def headline(record: Record) -> str:
    """ "On M, 4 value-aware keys match 70 (65 to 76) keys chosen by attention weight": pooled.

    In brackets the 95% interval over windows.
    """
    pairs = [(r, found) for r in HEADLINE_SIZES if (found := match(record, r)) is not None]
    keys = record["output_error"]["keys"]
    needed = {row["method"]: row["keys"] for row in _pooled(record) if row["share"] == 0.05}
    share = (
        f"an output error of 5% takes {needed[AWARE]:,} value-aware keys or {needed[OBLIVIOUS]:,} "
        f"chosen by weight, of {keys:,}"
    )
    if not pairs:
        return f"On {record['model']}, {share}."
    (r, found), *others = pairs
    parts = [
        f"{r} value-aware keys match {_count(found)} keys chosen by attention weight",
        *(f"{r} match {_count(found)}" for r, found in others),
    ]
    return f"On {record['model']}, {', '.join(parts)} (errors pooled over layers); {share}."


def match(record: Record, r: int) -> Record | None:
    """How many keys by weight match r value-aware ones: `keys`, and its ends `low` and `high`.

    `evaluation.keys_needed.matching_keys`, all layers pooled. None where r value-aware keys are
    exact or were not measured.
    """
    return next((row for row in record["matching_keys"] if row["r"] == r), None)


def _count(found: Record) -> str:
    ends = "" if found["low"] is None else f" ({found['low']:,} to {found['high']:,})"
    return f"{found['keys']:,}{ends}"


def _pooled(record: Record) -> list[Record]:
    return [row for row in record["keys_needed"] if row["layer"] is None]


def layer_lines(record: Record) -> list[str]:
    """The table of the keys that each layer needs, by weight and value-aware."""
    titles = [f"{share:.0%} error" for share in SHARES]
    head = "".join(f"{title:>{WIDTH}}" for title in titles)
    below = "".join(f"{'by weight  value-aware':>{WIDTH}}" for _ in SHARES)
    rows = [row for row in record["keys_needed"] if row["head"] is None]
    counts = {(row["layer"], row["share"], row["method"]): row["keys"] for row in rows}
    lines = [f"{'keys needed':12}{head}", f"{'layer':12}{below}"]
    for layer in (*range(record["layers"]), None):
        cells = (
            f"{counts[layer, share, OBLIVIOUS]:>{WIDTH - 13},}{counts[layer, share, AWARE]:>13,}"
            for share in SHARES
        )
        lines.append(f"{'all' if layer is None else layer:<12}" + "".join(cells))
    return lines


def metric_header(exact: Record, record: Record, methods: Sequence[str]) -> str:
    """The heads of the end metric's table, and what exact attention has."""
    names = "".join(f"{NAMES.get(name, name.replace('_', ' ')):>{WIDTH}}" for name in methods)
    value = _number(exact["value"], record)
    return (
        f"{record['metric']} of exact attention: {value}{UNITS[record['metric']]}\n"
        f"{'keys':>6}{names}"
    )


def metric_line(cells: Sequence[Record], record: Record) -> str:
    """One size: the value of every method, and the ends of its 95% interval."""
    return f"{cells[0]['parameters']['r']:>6,}" + "".join(
        f"  {_with_interval(cell, record):>{WIDTH - 2}}" for cell in cells
    )


def all_lines(record: Record) -> list[str]:
    """Both tables of a finished probe."""
    exact, *cells = record["cells"]
    methods = list(dict.fromkeys(cell["approximation"] for cell in cells))
    rows = [[c for c in cells if c["parameters"]["r"] == r] for r in record["sizes"]]
    lines = [*layer_lines(record), "", metric_header(exact, record, methods)]
    return [*lines, *(metric_line(row, record) for row in rows)]


def _with_interval(cell: Record, record: Record) -> str:
    value = _number(cell["value"], record)
    if cell["low"] is None:
        return value
    return f"{value} [{_number(cell['low'], record)}, {_number(cell['high'], record)}]"


def _number(value: float, record: Record) -> str:
    if value >= 1e5:
        return f"{value:.2g}"
    return f"{value:,.{DIGITS[record['metric']]}f}"
