"""Writes the record of a measured model in a sentence and in tables."""

from collections.abc import Iterator

from value_aware_attention.measurement.record import (
    AWARE,
    OBLIVIOUS,
    SHARES,
    Cell,
    KeysNeeded,
    MatchingKeys,
    OutputError,
    Record,
)

NAMES = {OBLIVIOUS: "by weight", AWARE: "value-aware"}
HEADLINE_SIZES = (4, 8, 16)
DIGITS = {"perplexity": 2, "error": 1, "cosine": 4}
UNITS = {"perplexity": "", "error": " %", "cosine": ""}
WIDTH = 26


def headline(record: Record) -> str:
    """Says "On M, 4 value-aware keys match 70 (65 to 76) keys chosen by attention weight".

    Errors are pooled over the layers; in brackets the 95% interval over windows.
    """
    measured = record.attention[0].output_error
    oblivious, aware = (needed(measured, method, share=0.05) for method in (OBLIVIOUS, AWARE))
    share = (
        f"an output error of 5% takes {aware.keys:,} value-aware keys or {oblivious.keys:,} "
        f"chosen by weight, of {measured.keys:,}"
    )
    pairs = [(r, found) for r in HEADLINE_SIZES if (found := match(measured, r)) is not None]
    if not pairs:
        return f"On {record.model}, {share}."
    (r, found), *others = pairs
    parts = [
        f"{r} value-aware keys match {_count(found)} keys chosen by attention weight",
        *(f"{r} match {_count(found)}" for r, found in others),
    ]
    return f"On {record.model}, {', '.join(parts)} (errors pooled over layers); {share}."


def match(measured: OutputError, r: int, layer: int | None = None) -> MatchingKeys | None:
    """Finds how many keys by weight match r value-aware ones; None where that was not measured."""
    found = (row for row in measured.matching_keys if (row.r, row.layer) == (r, layer))
    return next(found, None)


def needed(
    measured: OutputError, method: str, *, share: float, layer: int | None = None
) -> KeysNeeded:
    """Finds the keys that a method needs for an error of `share`, in a layer or (None) in all."""
    place = (method, share, layer, None)
    rows = measured.keys_needed
    return next(row for row in rows if (row.method, row.share, row.layer, row.head) == place)


def _count(found: MatchingKeys) -> str:
    ends = "" if found.low is None else f" ({found.low:,} to {found.high:,})"
    return f"{_keys(found.keys)}{ends}"


def _keys(count: int | None) -> str:
    return "none" if count is None else f"{count:,}"


def tables(record: Record) -> Iterator[str]:
    """Yields the lines of two tables: keys needed by layer, and the end metric by keys kept."""
    exact, *cells = record.cells
    methods = list(dict.fromkeys(cell.approximation for cell in cells))
    yield from _layer_lines(record.attention[0].output_error)
    names = "".join(f"{NAMES.get(name, name.replace('_', ' ')):>{WIDTH}}" for name in methods)
    value = f"{_number(exact.value, record.metric)}{UNITS[record.metric]}"
    yield from ("", f"{record.metric} of exact attention: {value}", f"{'keys':>6}{names}")
    for first in range(0, len(cells), len(methods) or 1):
        row = cells[first : first + len(methods)]
        found = (f"  {_with_interval(cell, record.metric):>{WIDTH - 2}}" for cell in row)
        yield f"{row[0].parameters['r']:>6,}" + "".join(found)


def _layer_lines(measured: OutputError) -> Iterator[str]:
    """Tabulates the keys that each layer needs, by weight and value-aware."""
    yield f"{'keys needed':12}" + "".join(f"{f'{share:.0%} error':>{WIDTH}}" for share in SHARES)
    yield f"{'layer':12}" + "".join(f"{'by weight  value-aware':>{WIDTH}}" for _ in SHARES)
    for layer in (*range(measured.layers), None):
        counts = [
            tuple(needed(measured, m, share=share, layer=layer).keys for m in (OBLIVIOUS, AWARE))
            for share in SHARES
        ]
        cells = (f"{_keys(a):>{WIDTH - 13}}{_keys(b):>13}" for a, b in counts)
        yield f"{'all' if layer is None else layer:<12}" + "".join(cells)


def _with_interval(cell: Cell, metric: str) -> str:
    value = _number(cell.value, metric)
    if cell.low is None or cell.high is None:
        return value
    return f"{value} [{_number(cell.low, metric)}, {_number(cell.high, metric)}]"


def _number(value: float, metric: str) -> str:
    return f"{value:.2g}" if value >= 1e5 else f"{value:,.{DIGITS[metric]}f}"
