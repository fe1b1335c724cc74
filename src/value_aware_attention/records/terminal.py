"""Writes measurements as tables for a terminal."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from value_aware_attention.records.cache_record import CacheCell, CacheRecord
from value_aware_attention.records.estimate import counted, in_unit
from value_aware_attention.records.headline import (
    FIVE_PERCENT,
    METHOD_NAMES,
    by_layer,
    count_text,
    ends_of,
    keys_by_head,
    layers_of,
    match,
    needed,
    shown_size,
    too_few,
    visible_keys,
    warning,
    with_keys,
    with_ratio,
)
from value_aware_attention.records.matching import SLOT, end_matches, whole_cells
from value_aware_attention.records.record import AWARE, OBLIVIOUS, SHARES, Cell, Record

COLUMN = 26
"""Width of a column, in characters"""
LOSS = 0.01
"""Allowed loss of the end metric with budgets: relative to a perplexity, absolute for a cosine, as
a share of all predictions for an error"""
HEADS_IN_LINE = 16
"""Heads per line"""
DISTANCE_TITLES = {"kl": "KL in nats a token", "cosine_distance": "1 - cosine"}


def tables(record: Record) -> Iterator[str]:
    """Yields the lines of tables: keys needed by layer and by head, the end metric by keys kept.

    Random weights have a row in the first table and a table like the last. Further lines have the
    end metric with budgets by head, the keys that match in it, and warnings if it says nothing or
    if there are too few windows.
    """
    yield from _layer_lines(record)
    yield from _head_lines(record)
    yield from _budget_lines(record)
    yield from _end_lines(record, "exact attention")
    yield from _match_lines(record)
    yield from _first_token_lines(record)
    if record.text.begins_with_bos:
        yield "every window begins with BOS: a key that queries see, never a prediction"
    if record.control:
        yield from _end_lines(record.control, "exact attention with random weights")
    for text in filter(None, [warning(record), too_few(record)]):
        yield from ("", f"warning: {text}")


def _first_token_lines(record: Record) -> Iterator[str]:
    """Reports the attention to a window's first token, over all layers and in the highest one."""
    if layers := layers_of(record).first_token:
        most = max(layers, key=lambda layer: layer.mass)
        mass, top = (fmean(getattr(layer, name) for layer in layers) for name in ("mass", "top"))
        yield (
            f"the first token has {mass:.0%} of the weight, the largest of {top:.0%} of queries; "
            f"in layer {most.layer} {most.mass:.0%} and {most.top:.0%}"
        )


def _head_lines(record: Record) -> Iterator[str]:
    """Lists the keys by weight that every head needs, `HEADS_IN_LINE` heads per line."""
    measured = layers_of(record)
    counts = keys_by_head(measured, OBLIVIOUS, FIVE_PERCENT)
    yield from (
        "",
        f"keys by weight for {FIVE_PERCENT:.0%} error, of {visible_keys(measured)}, by head",
    )
    heads = range(measured.heads)
    for first in range(0, len(heads), HEADS_IN_LINE):
        row = slice(first, first + HEADS_IN_LINE)
        yield "head".ljust(12) + "".join(f"{head:>6}" for head in heads[row])
        for layer, by_head in enumerate(counts):
            yield f"layer {layer}".ljust(12) + "".join(f"{count:>6,}" for count in by_head[row])


def _budget_lines(record: Record) -> Iterator[str]:
    """Tabulates the end metric with the number of keys that each head needs, in all heads."""
    if not record.budgets:
        return
    metric, available = record.metric, layers_of(record).keys
    title = f"{metric}, exact {in_unit(record.cells[0].value, metric)}"
    yield from ("", "each head with the keys that it needs for an output error, all heads at once")
    yield f"{'error':>6}  {'keys a head':>22}  {'chosen':<30}{title:>{COLUMN}}"
    for cell in record.budgets:
        share, count = cell.parameters["share"], cell.parameters["keys"]
        keys = f"{count:,.1f} of {available:,} ({count / available:.0%})"
        alike = ", all alike" if cell.parameters["each"] == "equal" else ""
        chosen = f"{_shown(cell.approximation)}{alike}"
        value = with_ratio(record, cell, brackets=True)
        yield f"{share:>6.0%}  {keys:>22}  {chosen:<30}{value:>{COLUMN}}"
    if not warning(record):
        yield _affordable(record)


def _shown(method: str) -> str:
    """Names a method; an oracle reads exact attention, so no model runs faster with it."""
    oracle = METHOD_NAMES.get(method)
    return f"{oracle} (oracle)" if oracle else method.replace("_", " ")


def _affordable(record: Record) -> str:
    """Names the fewest keys by weight, by head, whose loss is at most `LOSS`, interval included."""
    metric, exact = record.metric, record.cells[0].value
    most = {"perplexity": LOSS * exact, "error": 100 * LOSS, "cosine": LOSS}[metric]
    interval = "" if record.cells[0].low is None else ", interval included"
    allowed = f"For a loss of at most {in_unit(most, metric)} in {metric}{interval}"
    sign = -1 if metric == "cosine" else 1
    for cell in own_budgets(record):
        if max(sign * end for end in ends_of(cell)) <= most:
            return (
                f"{allowed}: the budgets by weight for {cell.parameters['share']:.0%} error, "
                f"{cell.parameters['keys']:,.1f} keys a head on average."
            )
    return f"{allowed}: none of these budgets by weight."


def _end_lines(record: Record, of: str) -> Iterator[str]:
    """Tabulates the end metric: a row per number of keys, a column per method.

    Cells without a number of keys, which are floors for the others, follow one per line.
    """
    exact, *cells = record.cells
    metric, unit = record.metric, " %" if record.metric == "error" else ""
    over = "; × is over that, with its 95% interval" if metric == "perplexity" else ""
    yield from ("", f"{metric} of {of}: {in_unit(exact.value, metric)}{unit}{over}")
    methods = list(dict.fromkeys(cell.approximation for cell in whole_cells(record)))
    rows = [["keys", *map(_shown, methods)]]
    for r in sorted({cell.parameters["r"] for cell in whole_cells(record)}):
        by_method = with_keys(record, r)
        values = (
            with_ratio(record, by_method[name], brackets=True) if name in by_method else "-"
            for name in methods
        )
        rows.append([f"{r:,}", *values])
    yield from _aligned(rows, 0)
    for cell in cells:
        if "r" not in cell.parameters:
            yield f"{_shown(cell.approximation)}: {with_ratio(record, cell)}"


def _match_lines(record: Record) -> Iterator[str]:
    """Tabulates the keys that lose as little of the end metric as value-aware ones."""
    sizes = [c.parameters["r"] for c in whole_cells(record) if c.approximation == AWARE]
    matches = {
        METHOD_NAMES[by]: [str(keys) for r in sizes if (keys := end_matches(record, r, by=by))]
        for by in (OBLIVIOUS, SLOT)
    }
    counted_sizes = {"r": [f"{r:,}" for r in sizes]} | {t: m for t, m in matches.items() if m}
    if len(counted_sizes) > 1 and not warning(record):
        yield from ("", f"keys that leave as good a {record.metric} as r value-aware ones")
        yield from _aligned([[*counted_sizes], *zip(*counted_sizes.values(), strict=True)], 0)


def _layer_lines(record: Record) -> Iterator[str]:
    """Tabulates the keys that each layer needs, by weight and value-aware."""
    yield f"{'keys needed':12}" + "".join(f"{f'{share:.0%} error':>{COLUMN}}" for share in SHARES)
    yield f"{'layer':12}" + "".join(f"{'by weight  value-aware':>{COLUMN}}" for _ in SHARES)
    layers = [(str(layer), record, layer) for layer in range(layers_of(record).layers)]
    random = [("random", record.control, None)] if record.control else []
    for name, of, layer in [*layers, ("all", record, None), *random]:
        counts = [
            [needed(layers_of(of), m, share=share, layer=layer).keys for m in (OBLIVIOUS, AWARE)]
            for share in SHARES
        ]
        yield f"{name:<12}" + "".join(
            f"{counted(a):>{COLUMN - 13}}{counted(b):>13}" for a, b in counts
        )
    yield from filter(None, [by_layer(record)])


def own_budgets(record: Record) -> list[Cell]:
    """Lists the cells of the choice by weight where each head gets the keys that it needs."""
    return [
        cell
        for cell in record.budgets
        if cell.approximation == OBLIVIOUS and cell.parameters["each"] == "own"
    ]


def cache_table(record: CacheRecord) -> Iterator[str]:
    """Yields a line for each method and the queries that it observes, with a column per size.

    A cell has the distance from exact attention's output with its interval, and the output error
    where layers were measured.
    """
    full, *compressed = record.cells
    distance, sizes = next(iter(full.ends)), sorted({cell.r for cell in compressed})
    yield (
        f"a cache that keeps r of {record.prefix or record.length:,} keys for all later queries: "
        f"{DISTANCE_TITLES[distance]} from exact attention's output"
        f"{', and output error' if compressed[0].error else ''}"
    )
    rows: dict[tuple[str, str], dict[int, CacheCell]] = {}
    for cell in compressed:
        rows.setdefault(_method(cell), {})[cell.r] = cell
    lines = [
        [
            *names,
            *(_losses(cells[r], distance) if r in cells else "not measured" for r in sizes),
        ]
        for names, cells in rows.items()
    ]
    yield from _aligned([["method", "queries seen", *(f"r = {r:,}" for r in sizes)], *lines], 2)


def _losses(cell: CacheCell, distance: str) -> str:
    error = "" if cell.error is None else f"  {cell.error.value:6.1%}"
    return f"{cell.ends[distance]:[]}{error}"


def _method(cell: CacheCell) -> tuple[str, str]:
    budget = f", budget: {cell.pool}" if cell.pool else ""
    return (
        f"{cell.cache}{budget}",
        "oracle: the later" if cell.observed == "hindsight" else cell.observed,
    )


def side_by_side(records: Sequence[Record]) -> Iterator[str]:
    """Yields the lines of a table with a column per model, and a line for each difference in setup.

    Counts of keys depend on the windows' length, so those of different lengths do not compare.
    """
    columns = [dict(_column(record)) for record in records]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    yield from _aligned([["", *(record.model for record in records)], *rows], 1)
    for what in ("length", "metric"):
        if len(values := {str(vars(record)[what]) for record in records}) > 1:
            yield f"not alike: {what} is {' and '.join(sorted(values))}"


def _aligned(rows: Sequence[Sequence[str]], names: int) -> Iterator[str]:
    """Yields the lines of a table: the first `names` columns are left-aligned, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            cell.ljust(width) if place < names else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )


def _column(record: Record) -> Iterator[tuple[str, str]]:
    measured, metric = layers_of(record), record.metric
    yield "tokens of a window, windows", f"{record.length:,}, {record.text.units:,}"
    yield "layers, heads, head size", f"{measured.layers}, {measured.heads}, {measured.head_dim}"
    yield f"exact {metric}", in_unit(record.cells[0].value, metric)
    r = shown_size(record)
    for method, cell in with_keys(record, r).items():
        yield f"{metric}, {r} keys, {_shown(method)}", with_ratio(record, cell, brackets=True)
    if matched := end_matches(record, r):
        yield f"keys by weight with the {metric} of {r} value-aware", str(matched)
    for name, net in (("", record), (", random weights", record.control)):
        if net is None:
            continue
        for method, choice in ((OBLIVIOUS, "by weight"), (AWARE, "value-aware")):
            yield (
                f"keys {choice} for {FIVE_PERCENT:.0%} error{name}",
                str(needed(layers_of(net), method, share=FIVE_PERCENT)),
            )
        if match_of_4 := match(layers_of(net), 4):
            yield (
                f"keys by weight that match 4 value-aware{name}",
                count_text(match_of_4, layers_of(net)),
            )
    for cell in own_budgets(record):
        share = f"{cell.parameters['share']:.0%}"
        yield f"keys a head by weight, {share} error in each", f"{cell.parameters['keys']:,.1f}"
        yield f"{metric} with these, {share}", with_ratio(record, cell, brackets=True)
