"""The loss of every cache method on queries that it has not observed, its gaps, and its budgets.

Of budgets the gain of pooled keys over equal ones, and the heads that get them: every method is
compared with itself, with the same queries, search and number of keys in all.
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, log10

import altair as alt
import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from value_aware_attention.measurement.cache_record import CacheCell, CacheGaps, CacheRecord
from value_aware_attention.measurement.estimate import (
    DASH,
    Estimate,
    estimate,
    number,
    rounded,
    whole,
    with_interval,
)
from value_aware_study.cards import cache_cards
from value_aware_study.report.charts import (
    JOINED,
    LINE,
    OPACITY,
    OUTPUT_ERROR,
    colour,
    count_axis,
    curves,
    direction,
    dots,
    figure,
    heat_map,
    of_field,
    powers,
    toggled,
)
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.frame import FLOOR, RANGE, Row, with_range
from value_aware_study.report.look import SERIES, Mark, Panel
from value_aware_study.report.words import intervals, sentences

ORACLE = "hindsight (oracle)"
MARKS = {
    "last 1": Mark.of("olive", "triangle-down"),
    "last 16": Mark.of("purple"),
    "last 32": Mark.of("plum"),
    "last 64": Mark.of("wine"),
    "causal": Mark.of("orange", "square"),
    "noncausal": Mark.of("green", "diamond"),
    "continued": Mark.of("deep", "triangle-left"),
    "repeat": Mark.of("teal", "triangle-up"),
    "nothing": Mark.of("brown", "triangle-right"),
    ORACLE: Mark.of("grey", "cross"),
}
PLACES = {name: place for place, name in enumerate(MARKS)}
"""Order of the queries observed; other numbers of last rows come first."""
OPENS = ("recall", "minilm", "markov", "docstrings", "copying")
"""Order of the study's texts; on copying, the last, no set of so few keys helps."""
END = {"kl": "KL, milli-nats", "cosine_distance": "1 − cos, × 1000"}
"""The distance from the exact model's output, of decoders and of encoders"""
MEANING = (
    "Error: mean over layers of sum ‖o − õ‖² / sum ‖o‖² over heads and the exact model's queries "
    "after the prefix (of an encoder: those not observed). KL is that of the next token from the "
    "exact model's, with the method in all layers; of an encoder, without tokens to predict, 1 − "
    "cosine of the last hidden states. r keys a head, or, with one budget, r on average; sinks and "
    "recent keys are counted in r."
)
OBSERVED = (
    "Queries observed: last 32 = the last 32 of the prefix (16, 64 and so on alike); causal = all "
    "of the prefix, as they attend in the text; noncausal = all of the prefix, each of which sees "
    "all of it; continued = the same, each of which sees its own past once more beside it; repeat "
    "= those of the prefix read once more; hindsight = the served queries themselves, an oracle; "
    "nothing: the method looks at no query. Published methods observe as in their papers; other "
    "rows of their scores tell the score from the queries."
)
TRAININGS = "The range over trainings is that of models of the same recipe from other seeds."
OWN = {
    "accuracy": "answers right",
    "exact_match": "whole rows right",
    "nats_to_bayes": "nats above Bayes",
}
"""End metrics of the tasks, with their titles."""
BUDGETS = {
    "": "",
    "layer": ", a budget a layer",
    "model": ", one budget",
    "checked": ", one budget where it helps",
    "by_layer": ", profiled by layer",
    "by_head": ", profiled by head",
    "by_layer_refitted": ", profiled by layer",
}
"""The budgets of a method, as its label says them"""
EXACT = "exact model"
SCORES = "value-aware / best score"
GAPS = {
    "criterion": "criterion: keys not chosen together",
    "information": "information: served queries not seen",
    "sharing": "sharing: one set for all queries",
    "weights": "weights: weights and values kept",
}
GAP_MARKS = {
    title: Mark.of(colour)
    for title, colour in zip(GAPS.values(), ("orange", "green", "purple", "brown"), strict=True)
}
OWN_COLOURS = SERIES[2:]
"""Colours of cache methods: neither of the two oracles'"""
POOLED = "model"
SEES = "repeat"
"""Queries of the figures: every model with a prefix allows them."""
BUDGET = (
    "Equal: every head keeps r keys. A budget a layer, or one for the model: r keys a head on "
    "average; in each text, the key whose loss costs the output least is dropped, again and again. "
    "One budget where it helps: the prefix is read once more with either choice, and a text gets "
    "the one budget if the model's outputs then stay nearer to the exact ones, otherwise r keys in "
    "every head. Profiled: the number of keys of each layer or head is the same for all texts, "
    "found on other texts by the KL that it costs there. Keys are counted as used, the 2 first and "
    "4 last of each head among them."
)
GAINED = ["texts", "one key of", "r", "method", "observed", "budget"]
COMPARED: dict[str, tuple[Callable[[CacheCell], bool], Callable[[CacheCell], bool]]] = {
    SCORES: (
        lambda cell: cell.joint and not cell.refits,
        lambda cell: not cell.joint and not cell.refits,
    ),
    "value-aware, refitted / best without refit": (
        lambda cell: cell.joint and cell.refits,
        lambda cell: not cell.refits,
    ),
    "value-aware, refitted / best refit of another set": (
        lambda cell: cell.joint and cell.refits,
        lambda cell: not cell.joint and cell.refits,
    ),
}
"""Numerator and denominator of each ratio; the first method of the numerator counts."""
SAME = ["compared", "texts", "r", "observed"]
"""Columns that tell one comparison from another"""


def keys_of(record: CacheRecord) -> int:
    """Counts the keys that are chosen from."""
    return record.prefix or record.length


def observed_by(cell: CacheCell | CacheGaps) -> str:
    """Names the queries that it observed: "last 32"; others are all of the prefix, or so spaced."""
    if cell.observed == "last":
        return f"last {cell.rows}"
    return ORACLE if cell.observed == "hindsight" else cell.observed


def label(method: str) -> str:
    """Returns the label of a method's card; of a method without one, its name."""
    card = cache_cards().get(method)
    return card.label if card else method


def named(cell: CacheCell) -> str:
    """Names a cell's method with its budget: "value-aware, one budget"."""
    return label(cell.method) + BUDGETS.get(cell.pool, f", {cell.pool}")


def distance(cell: CacheCell) -> Estimate:
    """Returns the cell's distance from the exact model's output."""
    return next(cell.ends[name] for name in END if name in cell.ends)


def in_order(records: Sequence[CacheRecord]) -> list[CacheRecord]:
    """Sorts records: the study's texts as `OPENS` has them, the first training of a model first."""
    places = {task: place for place, task in enumerate(OPENS)}
    return sorted(
        records,
        key=lambda r: (places.get(r.task, len(places)), r.task, is_again(r), r.model),
    )


def is_again(record: CacheRecord) -> bool:
    """Tells whether its model is a further training: recall_second of the task recall."""
    return record.model.startswith(f"{record.task}_")


def by_text(records: Sequence[CacheRecord]) -> list[Exhibit]:
    """Lists one table a share of keys: methods by texts.

    Sizes at which every method observes repeated queries are those of the figure of budgets alone.
    """
    shares = {
        keys_of(record) // cell.r
        for record in records
        for cell in record.cells
        if cell.observed != "repeat"
    }
    return [_of_share(records, share) for share in sorted(shares, reverse=True)]


def _of_share(records: Sequence[CacheRecord], share: int) -> Exhibit:
    cells = {
        (named(cell), observed_by(cell), record.task): cell
        for record in records
        for cell in record.cells
        if keys_of(record) // cell.r == share
    }
    tasks = list(dict.fromkeys(task for *_, task in cells))
    rows = list(dict.fromkeys((method, observed) for method, observed, _ in cells))
    rows.sort(key=lambda row: row[1] == ORACLE)
    data = pd.DataFrame(rows, columns=["method", "observed"])
    display = data.copy()
    for task in tasks:
        of_task = [cells.get((*row, task)) for row in rows]
        data[f"{task} error"] = [cell.error.value if cell else None for cell in of_task]
        data[f"{task} distance"] = [distance(cell).value if cell else None for cell in of_task]
        end = next(END[name] for name in END if any(cell and name in cell.ends for cell in of_task))
        texts = [_error_and_distance(cell) if cell else DASH for cell in of_task]
        display[f"{task}: error ({end})"] = texts
    units = "; ".join(f"{r.task}: {r.units} texts from {len(set(r.seeds))} draws" for r in records)
    return Exhibit(
        f"cache_methods_{share}",
        f"Caches that keep one key of {share}: error of the outputs",
        "On queries that were not observed, with 95% intervals over texts.",
        [MEANING, OBSERVED, f"{units}."],
        [_panel(record, share) for record in records if record.task in tasks],
        Table(data, display),
        choices=tasks,
    )


def _panel(record: CacheRecord, share: int) -> Panel:
    """Draws every method's error on one model and its texts, a mark a way to observe."""
    frame = pd.DataFrame(
        {"name": named(cell), "series": observed_by(cell), "value": cell.error.value,
         "low": cell.error.low, "high": cell.error.high}
        for cell in record.cells if keys_of(record) // cell.r == share
    )  # fmt: skip
    frame["said"] = sentences(frame, "{name}, queries observed: {series}, output error")
    numbers = ["value", "low", "high"]
    frame[numbers] = frame[numbers].astype(float).clip(FLOOR)
    names = sorted(frame["series"].unique(), key=lambda name: PLACES.get(name, 0))
    used = {name: MARKS.get(name, MARKS["last 32"]) for name in names}
    means = frame.assign(log=np.log(frame["value"])).groupby("name")["log"].mean()
    order = means.sort_values().index.tolist()
    axis = _error_axis(frame[numbers])
    drawn = dots(frame, used, axis, order=order, legend="queries observed")
    step = 30 if max(map(len, order)) > LINE else 24
    return toggled(drawn, step, record.task)


def _error_axis(numbers: pd.DataFrame) -> alt.X:
    """Builds a logarithmic axis that ends at the numbers, labelled at round ones."""
    low, high = float(numbers.min().min()) / 1.1, float(numbers.max().max()) * 1.1
    digits = (1, 2, 5) if high > 10 * low else range(1, 10)
    steps = [
        float(f"{digit}e{power}")
        for power in range(floor(log10(low)), ceil(log10(high)))
        for digit in digits
    ]
    axis = alt.Axis(values=[step for step in steps if low < step < high], format="~g")
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    return alt.X("value:Q", title=OUTPUT_ERROR, scale=scale, axis=axis)


def _error_and_distance(cell: CacheCell) -> str:
    far, error = distance(cell).value, number(cell.error.value, 4)
    return error if far is None else f"{error} ({number(1e3 * far, 1)})"


def answers(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Shows the tasks' own metrics: right answers, or the distance from Bayes' predictions."""
    rows = [
        {"texts": record.task, "measure": title, "method": name, "observed": observed,
         "column": f"r = {r}", "value": answered.value}
        for record in records
        for end, title in OWN.items()
        if end in record.exact
        for r, name, observed, answered in _answered(record, end)
    ]  # fmt: skip
    if not rows:
        return None
    head = ["texts", "measure", "method", "observed"]
    long = with_range(pd.DataFrame(rows), [*head, "column"], "value")
    settings = long[head].drop_duplicates(ignore_index=True)
    data, display = settings.copy(), settings.copy()
    for column in long["column"].drop_duplicates():
        ends = settings.merge(long[long["column"] == column], how="left")
        ends = ends.reindex(columns=["value", *RANGE])
        display[column] = _texts(ends, "value", *RANGE, digits=3)
        ends = ends.dropna(axis="columns", how="all")
        data[[f"{column} {name}".removesuffix(" value") for name in ends]] = ends
    return Exhibit(
        "cache_answers",
        "What a compressed cache leaves of the answers",
        "Queries after the prefix, with the method in all layers; means over texts.",
        [
            "Recall and copying: the share of right answers (of recall those keys that were not "
            "asked before), and of rows whose answers are all right. Markov: nats above the "
            "predictions of Bayes. A trained model without the method is the first row.",
            f"In parentheses the range over trainings. {TRAININGS}",
            OBSERVED,
        ],
        table=Table(data, display),
    )


def _answered(record: CacheRecord, end: str) -> Iterator[tuple[int, str, str, Estimate]]:
    """Yields the exact model's answers at every size, then those of each cell, oracles last."""
    for r in sorted({cell.r for cell in record.cells}):
        yield r, EXACT, "", record.exact[end]
    for cell in sorted(record.cells, key=lambda cell: (observed_by(cell) == ORACLE, cell.r)):
        yield cell.r, named(cell), observed_by(cell), cell.ends[end]


def every_cell(records: Sequence[CacheRecord]) -> Exhibit:
    """Shows every measurement of every method, with its interval and the cost of choosing."""
    rows = [
        {"texts": record.task, "keys": keys_of(record), "r": cell.r, "method": cell.method,
         "budget": cell.pool or "equal", "observed": observed_by(cell), "measure": name,
         "value": end.value, "low": end.low, "high": end.high, **_of_draws(record, cell, name),
         "multiply-adds": cell.multiply_adds, "seconds": cell.seconds,
         "prefills": cell.seconds / record.prefill_seconds}
        for record in records
        for cell in record.cells
        for name, end in {"error": cell.error, **cell.ends}.items()
    ]  # fmt: skip
    head = ["texts", "keys", "r", "method", "budget", "observed", "measure"]
    data = with_range(pd.DataFrame(rows), head, "value")
    trainings = {"over trainings": intervals(data, 4, ends=RANGE)} if RANGE[0] in data else {}
    display = (
        data[head]
        .astype(str)
        .assign(
            method=data["method"].map(label),
            value=[number(value, 4) for value in data["value"].astype(float)],
            **{"95% interval": intervals(data, 4)},
            **trainings,
            milliseconds=[number(1e3 * x, 2) for x in data["seconds"]],
        )
    )
    return Exhibit(
        "cache_cells",
        "Every measure of every cache method",
        "With its interval over texts; milliseconds of one choice for a key-value head.",
        [MEANING, OBSERVED],
        table=Table(data, display),
        folded=True,
    )


def _of_draws(record: CacheRecord, cell: CacheCell, name: str) -> dict[str, float]:
    """Returns the lowest and highest mean of a draw."""
    means = pd.Series(cell.by_unit[name]).groupby(list(record.seeds)).mean()
    return {"lowest draw": means.min(), "highest draw": means.max()}


def gaps(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Shows the loss of each method in four factors, pooled over layers and heads."""
    rows = [
        {"texts": record.task, "r": gap.r, "method": gap.method, "observed": observed_by(gap)}
        | {name: getattr(gap, name) for name in GAPS}
        for record in records
        for gap in record.gaps
        if gap.layer is None
    ]
    if not rows:
        return None
    drawn, of = _drawn_gaps(records)
    head = ["texts", "r", "method", "observed"]
    factors = pd.DataFrame(rows)
    data, display = factors[head].copy(), factors[head].astype(str)
    display["method"] = display["method"].map(label)
    for name in GAPS:
        for end in ("value", "low", "high"):
            column = name if end == "value" else f"{name} {end}"
            data[column] = [getattr(factor, end) for factor in factors[name]]
        display[name] = [with_interval(f.value, f.low, f.high, 2) for f in factors[name]]
    return Exhibit(
        "cache_gaps",
        "What a cache method loses, and which of four things it is",
        f"Factors of the error on served queries, of {' and '.join(of)}: the longer a part of the "
        "bar, the more is lost there; a part left of × 1 is a gain.",
        [
            "Each is a ratio of errors. Criterion: the method / the best set for the observed "
            "queries (below 1, where a set fitted to few queries carries over less). Information: "
            "the best set for the observed queries / the best set for as many of the served "
            "queries; 1 in hindsight. Sharing: the best set for the served queries / a set for "
            "each query alone. Weights: the best set for the served queries with attention's "
            "weights / the same set with refitted biases and values. Best sets are best found by "
            "the method's own search or the default one, not proved. The first three multiply to "
            "the error over that of a set for each query; the fourth starts again from the best "
            "set for the served queries.",
            OBSERVED,
        ],
        [_gaps_panel(frame) for frame in drawn.values()],
        Table(data, display),
        choices=[f"one key of {share} kept" for share in drawn],
    )


def _drawn_gaps(records: Sequence[CacheRecord]) -> tuple[dict[int, pd.DataFrame], list[str]]:
    """Tabulates the parts of a bar a task, by share of keys kept; names the methods of the bars.

    The bar is that of the first method with the first queries observed.
    """
    rows, methods = [], []
    for record in records:
        firsts = {gap.r: gap for gap in reversed(record.gaps) if gap.layer is None}
        for r, gap in sorted(firsts.items()):
            methods.append(f"{label(gap.method)} (queries observed: {observed_by(gap)})")
            ends = {True: 0.0, False: 0.0}
            for name, title in GAPS.items():
                value = getattr(gap, name).value
                if value:
                    begin = ends[value > 1]
                    ends[value > 1] = end = begin + log10(value)
                    rows.append(
                        {"share": keys_of(record) // r, "name": record.task, "series": title,
                         "begin": begin, "end": end, **vars(getattr(gap, name))}
                    )  # fmt: skip
    frame = pd.DataFrame(rows)
    shares = sorted(set(frame["share"]), reverse=True) if rows else []
    return {n: frame[frame["share"] == n] for n in shares}, list(dict.fromkeys(methods))


def _gaps_panel(frame: pd.DataFrame) -> Panel:
    """Draws a bar a task, whose parts are as long as the logarithms of their factors."""
    frame = frame.assign(
        said=sentences(frame, "{name}, {series}", " times the error"),
        text=[f"× {rounded(value, 2)}" for value in frame["value"]],
        middle=(frame["begin"] + frame["end"]) / 2,
    )
    last = ceil(frame["end"].max())
    axis = alt.Axis(
        values=list(range(last + 1)), labelExpr="'× ' + format(pow(10, datum.value), ',')"
    )
    x = alt.X("begin:Q", title="factor of the error (log scale)", axis=axis)
    columns = ["name", "series", "begin", "end", "middle", "text", "said"]
    y = alt.Y("name:N", sort=None, title=None, axis=alt.Axis(domain=False, ticks=False))
    base = alt.Chart(frame[columns]).encode(y=y, opacity=OPACITY, tooltip="said:N")
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=x, x2="end:Q", color=colour(GAP_MARKS, orient="bottom", columns=2)
    )
    span = frame["end"].max() - min(frame["begin"].min(), 0.0)
    wide = f"abs(datum.end - datum.begin) * width / {span} > 40 ? datum.text : ''"
    numbers = base.mark_text(fontWeight="bold").encode(
        x=of_field(x, "middle"),
        text=alt.TextValue(alt.ExprRef(wide)),
        color=alt.value("var(--ground)"),
    )
    return toggled([bars, numbers], 40)


def gain(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Compares the joint choice with the best score, of the same queries and of any."""
    return _comparison(
        "cache_gain",
        "What the joint choice gains",
        "Its error over that of the best score, which is named; below 1 it gains.",
        [row for record in records for row in _gains(record) if row["compared"] == SCORES],
    )


def refit_gain(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Compares refitted joint sets with the best others, refitted or not."""
    return _comparison(
        "cache_refit",
        "What refitted biases and values gain",
        "The error of the refitted joint set over that of the best other; below 1 it gains.",
        [row for record in records for row in _gains(record) if row["compared"] != SCORES],
        folded=True,
    )


def _comparison(
    name: str, title: str, caption: str, rows: Sequence[Row], folded: bool = False
) -> Exhibit | None:
    """Shows ratios, with the methods compared and the cost of the choice."""
    if not rows:
        return None
    data = with_range(pd.DataFrame(rows), SAME, "error")
    order = list(dict.fromkeys(data["compared"]))
    data = data.sort_values("compared", key=lambda names: names.map(order.index), kind="stable")
    head = [*(SAME[:1] if len(order) > 1 else []), "texts", "one key of", "r", "observed"]
    trainings = {"over trainings": intervals(data, 2, ends=RANGE)} if RANGE[0] in data else {}
    named = zip(data["any below"].map(label), data["any observed"], strict=True)
    display = (
        data[head]
        .astype(str)
        .assign(
            error=ratios(data, "error"),
            **trainings,
            **{
                "KL (encoder: 1 − cos)": ratios(data, "distance"),
                "best": data["below"].map(label),
                "error, over the best of any queries": ratios(data, "any error"),
                "best of any queries": [f"{method} ({look})" for method, look in named],
                "choice, in prefills": [number(count, 0) for count in data["prefills"]],
            },
        )
    )
    return Exhibit(
        name,
        title,
        caption,
        [
            "Ratios of mean errors over the same texts, with 95% intervals from their paired "
            "differences; a gain is firm where the interval lies below 1. The best other method is "
            "the one of least mean error on these very texts, with the same queries observed or "
            "none: a choice after the fact, which favours it. Where it is random, every score is "
            "worse than chance. The best of any queries is chosen among all ways to observe but "
            "hindsight. KL, or 1 − cosine, is compared for the two methods of the first ratio.",
            "Choice, in prefills: the time of the choice for a key-value head over that of exact "
            "attention of the keys that it chooses from: so few that much of both is overhead. The "
            "second reading of the prefix that repeat needs is not in it.",
            TRAININGS,
            OBSERVED,
        ],
        table=Table(data, display),
        folded=folded,
    )


def ratios(data: pd.DataFrame, name: str) -> list[str]:
    return _texts(data, name, f"{name} low", f"{name} high")


def _texts(data: pd.DataFrame, value: str, low: str, high: str, digits: int = 2) -> list[str]:
    """Writes numbers and their ends, of three columns: "0.19 (0.16 to 0.21)"."""
    rows = zip(data[value], data[low], data[high], strict=True)
    return [with_interval(*row, digits=digits) for row in rows]


def _gains(record: CacheRecord) -> Iterator[Row]:
    """Yields the comparisons of a record: one for each of `COMPARED`, size and way to observe."""
    cells = [
        c for c in record.cells
        if c.error.value is not None and c.observed != "hindsight" and not c.pool
    ]  # fmt: skip
    for compared, (is_above, is_below) in COMPARED.items():
        firsts = {(c.r, observed_by(c)): c for c in reversed(cells) if is_above(c)}
        for r, look in sorted(firsts, key=lambda place: (place[0], PLACES.get(place[1], 0))):
            above, others = firsts[r, look], [c for c in cells if c.r == r and is_below(c)]
            same = [c for c in others if observed_by(c) in (look, "nothing")]
            if not same:
                continue
            below, best = (min(some, key=lambda c: c.error.value or 0.0) for some in (same, others))
            row = {"compared": compared, "texts": record.task, "one key of": keys_of(record) // r,
                   "r": r, "observed": look, "below": below.method, "any below": best.method,
                   "any observed": observed_by(best),
                   "prefills": above.seconds / record.prefill_seconds}  # fmt: skip
            far = next(name for name in END if name in above.ends)
            row |= ratio(above, below, "error", "error") | ratio(above, below, far, "distance")
            yield row | ratio(above, best, "error", "any error")


def ratio(above: CacheCell, below: CacheCell, measure: str, name: str) -> dict[str, float | None]:
    units = (np.array(cell.by_unit[measure]) for cell in (above, below))
    ends = estimate(*units, least=0.0)
    return {name: ends.value, f"{name} low": ends.low, f"{name} high": ends.high}


def agreement(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Ranks methods by output error and by the model's own distance, and compares the two."""
    rows = [
        {"texts": record.task, "r": cell.r, "error": cell.error.value}
        | {"distance": distance(cell).value}
        for record in records
        for cell in sorted(record.cells, key=lambda cell: cell.r)
        if cell.error.value is not None
    ]
    groups = pd.DataFrame(rows).groupby(["texts", "r"], sort=False)
    data = pd.DataFrame(
        {"texts": texts, "r": r, "methods": len(cells)}
        | {"Spearman": spearmanr(cells["error"], cells["distance"]).statistic}
        for (texts, r), cells in groups
        if len(cells) > 2
    )
    if data.empty:
        return None
    display = data.astype(str).assign(Spearman=[number(rank, 2) for rank in data["Spearman"]])
    return Exhibit(
        "cache_agreement",
        "Whether the output error ranks methods as the model's output does",
        "Spearman's rank correlation, over methods, of output error and distance; 1 = alike.",
        ["A method counts once for each way to observe queries; hindsight is among them."],
        table=Table(data, display),
        folded=True,
    )


def by_memory(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Draws the model's distance from the exact one against the keys kept, equal and pooled."""
    of_task = {record.task: frame for record in records if len(frame := _curves(record))}
    if not of_task:
        return None
    curved = {task: frame for task, frame in of_task.items() if frame["count"].nunique() >= JOINED}
    of_task = curved or of_task  # the deeper models have two sizes
    data = pd.concat([frame.assign(texts=task) for task, frame in of_task.items()])
    milli = data.assign(**{end: 1e3 * data[end] for end in ("value", "low", "high")})
    display = data[["texts", "series"]].assign(
        r=data["count"].astype(str),
        distance=[number(value, 2) for value in milli["value"]],
        **{"95% interval": intervals(milli)},
    )
    return Exhibit(
        "cache_memory",
        "Quality against memory: one budget for the whole model, and equal ones",
        "KL from the exact model's next tokens with the method in all layers, in nats.",
        [BUDGET, "Queries observed: those of the prefix read once more (repeat). The table has "
         "milli-nats."],
        [_memory_panel(task, frame) for task, frame in of_task.items()],
        Table(data, display),
        choices=list(of_task),
    )  # fmt: skip


def _curves(record: CacheRecord) -> pd.DataFrame:
    """Lists the cells of methods that were measured with one budget, at every size."""
    cells = [cell for cell in record.cells if observed_by(cell) == SEES and not cell.refits]
    pooled = {cell.method for cell in cells if cell.pool == POOLED}
    return pd.DataFrame(
        {"series": named(cell), "method": cell.method, "pool": cell.pool, "count": cell.r}
        | vars(distance(cell))
        for cell in cells
        if cell.method in pooled and cell.pool in ("", POOLED)
    )


def _memory_panel(task: str, frame: pd.DataFrame) -> Panel:
    methods = list(dict.fromkeys(frame["method"]))
    series = frame.drop_duplicates("series")[["series", "method", "pool"]].to_numpy()
    marks = {
        name: Mark.of(OWN_COLOURS[methods.index(method)], "circle" if pool else "cross")
        for name, method, pool in series
    }
    frame = frame.assign(said=sentences(frame, "{series}, {count:,.0f} keys a head", " nats"))
    values = frame["value"].clip(FLOOR)
    ends = frame[["low", "high"]].clip(values.min() / 2, 2 * values.max())
    x = count_axis("keys kept of the prefix, a head on average", frame["count"].tolist())
    y = powers(alt.Y, "value", direction("KL, nats", "lower"), values.tolist(), room=2)
    return figure(curves(frame.assign(value=values, **ends), marks, x, y), task)


def pooled_gains(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Tabulates errors and the model's distances with other budgets over those with equal ones."""
    rows = [row for record in records for row in _pooled_gains(record)]
    if not rows:
        return None
    data = with_range(pd.DataFrame(rows), GAINED, "distance")
    trainings = {"over trainings": intervals(data, 2, ends=RANGE)} if RANGE[0] in data else {}
    display = (
        data[GAINED]
        .astype(str)
        .assign(
            method=data["method"].map(label),
            **{"KL over equal": ratios(data, "distance")},
            **trainings,
            **{
                "error over equal": ratios(data, "error"),
                "own measure, equal → this": [
                    f"{number(equal, 3)} → {number(pooled, 3)}" if pd.notna(equal) else ""
                    for equal, pooled in zip(data["equal"], data["own"], strict=True)
                ],
            },
        )
    )
    return Exhibit(
        "cache_budgets",
        "What budgets other than equal ones gain",
        "Ratios to the same method with r keys in every head; below 1 it gains.",
        [
            BUDGET,
            "Ratios of sums over the same texts, with paired 95% intervals. The own measure is the "
            "share of right answers, or, of Markov chains, nats above Bayes.",
            TRAININGS,
            OBSERVED,
        ],
        table=Table(data, display),
    )


def _pooled_gains(record: CacheRecord) -> Iterator[Row]:
    def place(cell: CacheCell) -> tuple[str, str, int]:
        return cell.method, observed_by(cell), cell.r

    equal = {place(cell): cell for cell in record.cells if not cell.pool}
    for cell in record.cells:
        base = equal.get(place(cell))
        if not cell.pool or base is None:
            continue
        measure = next((name for name in OWN if name in cell.ends), None)
        far = next(name for name in END if name in cell.ends)
        yield {
            "texts": record.task, "one key of": keys_of(record) // cell.r, "r": cell.r,
            "method": cell.method, "observed": observed_by(cell), "budget": cell.pool,
            **ratio(cell, base, far, "distance"), **ratio(cell, base, "error", "error"),
            "equal": measure and base.ends[measure].value,
            "own": measure and cell.ends[measure].value,
        }  # fmt: skip


def keys_by_head(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Draws the number of keys that each head keeps of one budget for the model."""
    rows = [
        {"texts": record.task, "r": cell.r, "observed": observed_by(cell)}
        | {"layer": layer, "head": head, "value": keys}
        for record in records
        for cell in sorted(record.cells, key=lambda cell: cell.r)
        if cell.joint and not cell.refits and cell.pool == POOLED and observed_by(cell) == SEES
        for layer, heads in enumerate(cell.keys)
        for head, keys in enumerate(heads)
    ]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    frame = data.assign(text=[whole(value) for value in data["value"]], low=None, high=None)
    display = data[["texts", "r", "layer", "head"]].astype(str).assign(keys=frame["text"])
    names = [f"{task}, r = {r}" for task, r in data[["texts", "r"]].drop_duplicates().to_numpy()]
    panels = [
        heat_map(heads.drop(columns=["texts", "observed", "r"]), name, data["value"], " keys")
        for name, (_, heads) in zip(names, frame.groupby(["texts", "r"], sort=False), strict=True)
    ]
    return Exhibit(
        "cache_keys",
        "Which layers and heads keep the keys of one budget",
        "Keys that each key-value head keeps, the mean over texts; r a head on average.",
        [BUDGET],
        panels,
        Table(data, display),
        choices=names,
    )
