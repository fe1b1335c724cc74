"""Writes the record of a measured model in sentences."""

from collections.abc import Iterator
from dataclasses import replace

from value_aware_attention.records.estimate import Estimate, in_unit, number, whole, with_interval
from value_aware_attention.records.matching import NOT_DETERMINED, SLOT, end_matches, whole_cells
from value_aware_attention.records.record import (
    AWARE,
    OBLIVIOUS,
    WITH_MEAN,
    Cell,
    EndMetric,
    KeysNeeded,
    MatchingKeys,
    OutputError,
    Record,
)

METHOD_NAMES = {
    OBLIVIOUS: "by weight",
    SLOT: "by weight + mean slot",
    AWARE: "value-aware",
    WITH_MEAN: "value-aware, with the mean",
}
HEADLINE_SIZES = (4, 8, 16)
FIVE_PERCENT = 0.05
WINDOWS = 4
"""Fewest windows for a credible interval"""
LOSS_WORDS = {
    "perplexity": "a perplexity of",
    "error": "wrong predictions, in % of the hidden tokens, of",
    "cosine": "a cosine to the exact hidden states of",
}
ROUNDING = 1e-9
"""Largest difference that counts as rounding"""
NARROW = 1 / 3
"""Largest relative width of a count's interval for saying that another count is no smaller. Wider
ones, such as those of two windows, overlap with nearly any count."""


def headline(record: Record) -> str:
    """Reports the end metric with few keys, and how many keys by weight match value-aware ones.

    Next to both is the control's number, if random weights were measured. In brackets are 95%
    intervals over windows; errors are pooled over the layers. The text begins with the
    architecture, as a folder's name may say nothing, and ends with a warning of too few windows.
    """
    few = too_few(record)
    sentences = filter(None, [_loss(record), *_matches(record), f"{few}." if few else ""])
    architecture = f" ({record.architecture})" if record.architecture != record.model else ""
    return f"On {record.model}{architecture} at {record.length:,} tokens, {' '.join(sentences)}"


def shown_size(record: Record) -> int:
    """Returns the number of keys for reporting the end metric: 4, or the nearest measured one."""
    sizes = {cell.parameters["r"] for cell in record.cells if "r" in cell.parameters}
    return min(sizes, key=lambda r: (abs(r - HEADLINE_SIZES[0]), r), default=0)


def with_keys(record: Record | None, r: int) -> dict[str, Cell]:
    """Finds the end metric with r keys in every layer, by method; slots without the exact mass."""
    cells = whole_cells(record) if record else []
    return {cell.approximation: cell for cell in cells if cell.parameters["r"] == r}


def exact_ratio(record: Record, cell: EndMetric) -> Estimate:
    """Divides an end metric by exact attention's; for a perplexity this is exp of paired nats."""
    exact = record.cells[0].value
    value, low, high = (end and exact and end / exact for end in (cell.value, cell.low, cell.high))
    return Estimate(value=value, low=low, high=high)


def with_ratio(record: Record, cell: EndMetric, *, brackets: bool = False) -> str:
    """Writes an end metric with its interval; for a perplexity, that of its ratio to exact.

    "20.60, × 1.10 (1.06 to 1.14)", or for a cosine "0.946 (0.941 to 0.950)". With `brackets`, for
    tables, "20.60 × 1.10 [1.06, 1.14]".
    """
    if record.metric != "perplexity":
        return format(cell, f"[{record.metric}]" if brackets else record.metric)
    ratio = with_interval(
        **vars(exact_ratio(record, cell)), digits=2, text=factor, brackets=brackets
    )
    return f"{number(cell.value, 2)}{'' if brackets else ','} × {ratio}"


def factor(value: float | None, digits: int) -> str:
    """Writes a ratio, with one decimal from ten on and none from a hundred on."""
    return number(value, digits if not value or value < 10 else int(value < 100))


def warning(record: Record) -> str:
    """Explains why the end metric cannot judge the keys: it is at chance, or all methods are alike.

    "" if it can. A difference counts if its interval excludes 0; with one window and so no
    interval, any difference counts.
    """
    metric, r = record.metric, shown_size(record)
    exact = f"exact attention's {in_unit(record.cells[0].value, metric)}"
    guess = record.baselines.get("chance")
    if guess is not None and ends_of(guess)[0] <= ROUNDING:
        return (
            f"the {metric} cannot tell what keys do: {exact} is no better than chance, a guess "
            f"without reading has {in_unit(guess.value, metric)}"
        )
    differences = [ends_of(cell) for cell in with_keys(record, r).values()]
    if differences and all(low <= ROUNDING and high >= -ROUNDING for low, high in differences):
        return (
            f"the {metric} cannot tell the choices apart: with {r} keys in every layer, by each "
            f"of {len(differences)} methods, {exact} lies within its interval"
        )
    return ""


def too_few(record: Record) -> str:
    """Warns of too few windows for intervals, with a remedy; "" if there are enough."""
    if record.text.units >= WINDOWS:
        return ""
    return (
        f"Too few {record.unit}s ({record.text.units}) for intervals to be believed: read at least "
        f"{WINDOWS}, better {2 * WINDOWS} (windows={2 * WINDOWS}), of a longer text or with a "
        f"smaller length where it has fewer"
    )


def ends_of(cell: EndMetric) -> tuple[float, float]:
    """Returns the interval of the difference from exact attention; a point if there is none."""
    low, high = cell.difference_low, cell.difference_high
    return (cell.difference if low is None else low, cell.difference if high is None else high)


def _loss(record: Record) -> str:
    """Reports the end metric with r keys, or why it cannot, and how many keys match.

    A factor is a perplexity's ratio to exact attention's.
    """
    r, metric = shown_size(record), record.metric
    trained = with_keys(record, r)
    if not {OBLIVIOUS, AWARE} <= set(trained):
        return ""
    if blind := warning(record):
        return f"{blind}."
    random = ""
    if record.control and (cells := with_keys(record.control, r)):
        random = (
            f"; with random weights {with_ratio(record.control, cells[AWARE])} and "
            f"{with_ratio(record.control, cells[OBLIVIOUS])}{_exact(record.control)}"
        )
    with_mean = (
        f", or {with_ratio(record, trained[WITH_MEAN])} if the mean may be one of them"
        if WITH_MEAN in trained
        else ""
    )
    slot = (
        f"; {r - 1} by weight with the mean of the others {with_ratio(record, trained[SLOT])}"
        if SLOT in trained and r > 1
        else ""
    )
    keys, slots = (end_matches(record, r, by=by) for by in (OBLIVIOUS, SLOT))
    beside = f", or {slots!s} with that mean as the last one" if slots else ""
    matching = keys and f"By weight it takes {keys!s} keys to do as well in this metric{beside}."
    return (
        f"{r} value-aware keys in every layer leave {LOSS_WORDS[metric]} "
        f"{with_ratio(record, trained[AWARE])}{with_mean}; {r} by weight "
        f"{with_ratio(record, trained[OBLIVIOUS])}{slot}{_exact(record)}{random}. "
        f"{matching or ''}"
    ).rstrip()


def _exact(record: Record) -> str:
    """Writes exact attention's end metric after others; "" for a cosine, where it is 1."""
    if record.metric == "cosine":
        return ""
    return f"; exact {in_unit(record.cells[0].value, record.metric)}"


def _matches(record: Record) -> Iterator[str]:
    """Yields the keys that match, then those for random weights; without any, the keys needed."""
    measured = layers_of(record)
    if counts := matches(measured):
        yield from filter(None, [f"{counts}.", matches_at_random(record)])
    else:
        oblivious, aware = (
            needed(measured, name, share=FIVE_PERCENT) for name in (OBLIVIOUS, AWARE)
        )
        yield (
            f"an output error of {FIVE_PERCENT:.0%} takes {aware.keys:,} value-aware keys or "
            f"{oblivious.keys:,} chosen by weight, of {visible_keys(measured)}."
        )


def visible_keys(measured: OutputError) -> str:
    """Writes how many keys a query sees; for a causal query, which sees its past, the average."""
    if measured.causal:
        return f"the {(measured.keys + 1) // 2:,} that a query sees on average"
    return f"{measured.keys:,}"


def matches_at_random(record: Record) -> str:
    """Reports how many keys match with random weights, and whether training affects that."""
    if record.control is None or not (random := _matching(layers_of(record.control))):
        return ""
    pairs = [(count, random[r]) for r, count in _matching(layers_of(record)).items()]
    counts = [count_text(count, layers_of(record.control)) for _, count in pairs]
    alike = all(_is_narrow(*pair) and (pair[0].low or 0) <= (pair[1].high or 0) for pair in pairs)
    not_fewer = ", no fewer as far as the intervals tell: these counts do not come from training"
    return f"With random weights they match {', '.join(counts)}{not_fewer if alike else ''}."


def _is_narrow(*counts: MatchingKeys) -> bool:
    """Returns whether each count has an interval, with a relative width of at most `NARROW`."""
    return all(
        count.keys is not None
        and count.low is not None
        and count.high is not None
        and count.high - count.low <= NARROW * count.keys
        for count in counts
    )


def matches(measured: OutputError) -> str:
    """Reports how many keys by weight match 4, 8 and 16 value-aware keys; "" if not counted."""
    counts = [*_matching(measured).values()]
    if not counts:
        return ""
    first, *others = counts
    more = "".join(f", {count.r} match {count_text(count, measured)}" for count in others)
    layers = [
        row.keys
        for row in measured.matching_keys
        if row.r == first.r and row.layer is not None and row.keys is not None
    ]
    apart = f"; by layer {min(layers):,} to {max(layers):,}" if layers else ""
    return (
        f"{first.r} value-aware keys match {count_text(first, measured)}{more} keys chosen by "
        f"attention weight, of {visible_keys(measured)} (errors pooled{apart}; of single queries, "
        f"{first.r} match {first.median:,} in the median, {first.lower_quartile:,} to "
        f"{first.upper_quartile:,} in the quartiles)"
    )


def count_text(count: MatchingKeys, measured: OutputError) -> str:
    """Writes a count with its interval; an end at all keys is not determined."""
    if count.keys is None or count.high is None or count.high < measured.keys:
        return str(count)
    return f"{whole(count.keys)} ({whole(count.low)} to {NOT_DETERMINED})"


def _matching(measured: OutputError) -> dict[int, MatchingKeys]:
    """Maps the headline's sizes to the keys by weight that match them, if these were counted."""
    return {r: count for r in HEADLINE_SIZES if (count := match(measured, r))}


def layers_of(record: Record) -> OutputError:
    return record.attention[0].output_error


def by_layer(record: Record) -> str:
    """Names the layers where training adds most and least keys by weight for 5% error."""
    if record.control is None:
        return ""
    pairs = sorted(
        (
            [
                needed(layers_of(net), OBLIVIOUS, share=FIVE_PERCENT, layer=layer)
                for net in (record, record.control)
            ]
            for layer in range(layers_of(record).layers)
        ),
        key=lambda pair: (pair[0].keys or 0) - (pair[1].keys or 0),
    )
    most, least = (
        f"{trained} in layer {trained.layer} ({random} with random weights)"
        for trained, random in (pairs[-1], pairs[0])
    )
    return (
        f"Keys by weight for {FIVE_PERCENT:.0%} error, trained minus random weights: most with "
        f"{most}, least with {least}."
    )


def match(measured: OutputError, r: int, layer: int | None = None) -> MatchingKeys | None:
    """Finds how many keys by weight match r value-aware ones; None if not measured.

    The interval is cut at r: fewer keys by weight cannot match, even if few units suggest it.
    """
    row = next((row for row in measured.matching_keys if (row.r, row.layer) == (r, layer)), None)
    return row and replace(row, low=row.low and max(row.low, min(r, row.keys or r)))


def needed(
    measured: OutputError, method: str, *, share: float, layer: int | None = None
) -> KeysNeeded:
    """Finds the keys that a method needs for an error of `share`, in a layer or (None) in all."""
    place = (method, share, layer, None)
    return next(
        row for row in measured.keys_needed if (row.method, row.share, row.layer, row.head) == place
    )


def keys_by_head(measured: OutputError, method: str, share: float) -> list[list[int]]:
    """Lists, by layer and query head, the fewest keys with at most that relative output error.

    It is 1 for a head whose outputs are all 0.
    """
    counts = [[1] * measured.heads for _ in range(measured.layers)]
    for row in measured.keys_needed:
        is_asked = (row.method, row.share) == (method, share)
        if is_asked and row.layer is not None and row.head is not None:
            counts[row.layer][row.head] = row.keys or 1
    return counts
