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
SHARE = 0.05
DIGITS = {"perplexity": 2, "error": 1, "cosine": 4}
LOSSES = {
    "perplexity": "a perplexity of",
    "error": "wrong predictions, in % of the hidden tokens, of",
    "cosine": "a cosine to the exact hidden states of",
}
WIDTH = 26


def headline(record: Record) -> str:
    """Says what few keys do to the end metric, and how many keys by weight match value-aware ones.

    Beside both stands the control's number, where random weights were measured. In brackets are
    95% intervals over windows; errors are pooled over the layers.
    """
    parts = filter(None, [_loss(record), *_matches(record)])
    return f"On {record.model} at {record.length:,} tokens, {' '.join(parts)}"


def shown_size(record: Record) -> int:
    """Returns the keys that the end metric is told with: 4, or the nearest number measured."""
    sizes = {cell.parameters["r"] for cell in record.cells if "r" in cell.parameters}
    return min(sizes, key=lambda r: (abs(r - HEADLINE_SIZES[0]), r), default=0)


def with_keys(record: Record | None, r: int) -> dict[str, Cell]:
    """Finds the end metric with r keys in every layer, by method."""
    cells = record.cells if record else ()
    return {cell.approximation: cell for cell in cells if cell.parameters.get("r") == r}


def _loss(record: Record) -> str:
    """Says what r keys leave of the end metric, or that every method is as good as exact."""
    r, metric = shown_size(record), record.metric
    found = with_keys(record, r)
    if not {OBLIVIOUS, AWARE} <= set(found):
        return ""
    exact = f"exact attention's {_number(record.cells[0].value, metric)}"
    ends = [(cell.difference_low, cell.difference_high) for cell in found.values()]
    if all(low is not None and low <= 1e-9 and high >= -1e-9 for low, high in ends):  # type: ignore[operator]
        return (
            f"the {metric} cannot tell the choices apart: with {r} keys in every layer, by each "
            f"of {len(found)} methods, {exact} lies within its interval."
        )
    nets = [of for of in (record, record.control) if of and with_keys(of, r)]
    own, *random = (
        [_with_interval(with_keys(of, r)[k], metric, "{} ({} to {})") for k in (AWARE, OBLIVIOUS)]
        + ["" if metric == "cosine" else f", exact {_number(of.cells[0].value, metric)}"]
        for of in nets
    )
    beside = "".join(f"; with random weights {a} and {b}{exact}" for a, b, exact in random)
    return (
        f"{r} value-aware keys in every layer leave {LOSSES[metric]} {own[0]} and {r} by weight "
        f"{own[1]}{own[2]}{beside}."
    )


def _matches(record: Record) -> Iterator[str]:
    """Yields the keys that match, then those with random weights; without any, the keys needed."""
    measured = _own(record)
    if said := matches(measured):
        yield from filter(None, [f"{said}.", matches_at_random(record)])
    else:
        oblivious, aware = (needed(measured, one, share=SHARE) for one in (OBLIVIOUS, AWARE))
        yield (
            f"an output error of {SHARE:.0%} takes {aware.keys:,} value-aware keys or "
            f"{oblivious.keys:,} chosen by weight, of {measured.keys:,}."
        )


def matches_at_random(record: Record) -> str:
    """Says how many keys match with random weights, and whether training has any part in it."""
    found = _pairs(_own(record.control)) if record.control else {}
    if not found:
        return ""
    pairs = [(one, found[r]) for r, one in _pairs(_own(record)).items()]
    fewer = all((one.low or one.keys or 0) <= (b.high or b.keys or 0) for one, b in pairs)
    geometry = ", no fewer within the intervals: these counts are geometry, not training"
    return (
        f"With random weights they match {', '.join(_count(one) for _, one in pairs)}"
        f"{geometry if fewer else ''}."
    )


def matches(measured: OutputError) -> str:
    """Says how many keys chosen by weight match 4, 8 and 16 value-aware keys; "" if not counted."""
    if not (found := [*_pairs(measured).values()]):
        return ""
    first, *others = found
    more = "".join(f", {one.r} match {_count(one)}" for one in others)
    return (
        f"{first.r} value-aware keys match {_count(first)}{more} of {measured.keys:,} keys chosen "
        f"by attention weight (errors pooled; of single queries, {first.r} match {first.median:,} "
        f"in the median, {first.lower_quartile:,} to {first.upper_quartile:,} in the quartiles)"
    )


def _pairs(measured: OutputError) -> dict[int, MatchingKeys]:
    return {r: one for r in HEADLINE_SIZES if (one := match(measured, r))}


def _own(record: Record) -> OutputError:
    return record.attention[0].output_error


def by_layer(record: Record) -> str:
    """Names the layers where training changes most how many keys by weight `SHARE` error takes."""
    if record.control is None:
        return ""
    nets = (record, record.control)
    pairs = sorted(
        (
            [needed(_own(of), OBLIVIOUS, share=SHARE, layer=layer) for of in nets]
            for layer in range(_own(record).layers)
        ),
        key=lambda pair: (pair[0].keys or 0) - (pair[1].keys or 0),
    )
    most, least = (
        f"{_count(own)} in layer {own.layer} ({_count(random)} with random weights)"
        for own, random in (pairs[-1], pairs[0])
    )
    return (
        f"Keys by weight for {SHARE:.0%} error, trained minus random weights: most with {most}, "
        f"least with {least}."
    )


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


def _count(found: MatchingKeys | KeysNeeded) -> str:
    ends = "" if found.low is None else f" ({found.low:,} to {found.high:,})"
    return f"{_keys(found.keys)}{ends}"


def _keys(count: int | None) -> str:
    return "none" if count is None else f"{count:,}"


def tables(record: Record) -> Iterator[str]:
    """Yields the lines of two tables: keys needed by layer, and the end metric by keys kept.

    Random weights have a row in the first one and a table like the second one.
    """
    yield from _layer_lines(record)
    yield from _end_lines(record, "exact attention")
    if record.control:
        yield from _end_lines(record.control, "exact attention with random weights")


def _end_lines(record: Record, of: str) -> Iterator[str]:
    """Tabulates the end metric: a row for each number of keys, a column for each method."""
    exact, *cells = record.cells
    methods = list(dict.fromkeys(cell.approximation for cell in cells))
    names = "".join(f"{NAMES.get(name, name.replace('_', ' ')):>{WIDTH}}" for name in methods)
    value = f"{_number(exact.value, record.metric)}{' %' if record.metric == 'error' else ''}"
    yield from ("", f"{record.metric} of {of}: {value}", f"{'keys':>6}{names}")
    for first in range(0, len(cells), len(methods) or 1):
        row = cells[first : first + len(methods)]
        found = (f"  {_with_interval(cell, record.metric):>{WIDTH - 2}}" for cell in row)
        yield f"{row[0].parameters['r']:>6,}" + "".join(found)


def _layer_lines(record: Record) -> Iterator[str]:
    """Tabulates the keys that each layer needs, by weight and value-aware."""
    yield f"{'keys needed':12}" + "".join(f"{f'{share:.0%} error':>{WIDTH}}" for share in SHARES)
    yield f"{'layer':12}" + "".join(f"{'by weight  value-aware':>{WIDTH}}" for _ in SHARES)
    layers = [(str(layer), record, layer) for layer in range(_own(record).layers)]
    random = [("random", record.control, None)] if record.control else []
    for name, of, layer in [*layers, ("all", record, None), *random]:
        counts = [
            [needed(_own(of), m, share=share, layer=layer).keys for m in (OBLIVIOUS, AWARE)]
            for share in SHARES
        ]
        cells = (f"{_keys(a):>{WIDTH - 13}}{_keys(b):>13}" for a, b in counts)
        yield f"{name:<12}" + "".join(cells)
    yield from filter(None, [by_layer(record)])


def _with_interval(cell: Cell, metric: str, form: str = "{} [{}, {}]") -> str:
    if cell.low is None or cell.high is None:
        return _number(cell.value, metric)
    return form.format(*(_number(end, metric) for end in (cell.value, cell.low, cell.high)))


def _number(value: float, metric: str) -> str:
    return f"{value:.2g}" if value >= 1e5 else f"{value:,.{DIGITS[metric]}f}"
