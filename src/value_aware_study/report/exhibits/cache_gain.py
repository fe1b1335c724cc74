"""What a joint choice of the keys gains over scores, paired over texts, and what it is worth."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from value_aware_attention.measurement.cache_record import CacheCell, CacheRecord, estimate
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.cache_methods import distance
from value_aware_study.report.formatting import interval, number

__all__ = ["agreement", "gain"]

COMPARED: dict[str, tuple[Callable[[CacheCell], bool], Callable[[CacheCell], bool]]] = {
    "value-aware / best score": (
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
"""Each comparison's methods above and below; of those above the first counts."""
ORDER = {compared: place for place, compared in enumerate(COMPARED)}


def gain(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Compares the joint choice with the best of the others on the same observed queries."""
    rows = [row for record in records for row in _of(record)]
    if not rows:
        return None
    data = pd.DataFrame(rows).sort_values(
        "compared", key=lambda one: one.map(ORDER.get), kind="stable"
    )
    looks = list(dict.fromkeys(data["observed"]))
    head = ["compared", "texts", "r"]
    groups = data.groupby(head, sort=False)
    wide = pd.DataFrame([names for names, _ in groups], columns=head)
    display = wide.astype(str)
    for look in looks:
        found = [group[group["observed"] == look] for _, group in groups]
        display[look] = [_text(one) for one in found]
        for name in ("error", "error low", "error high", "distance", "below"):
            wide[f"{look} {name}"] = [None if one.empty else one[name].iloc[0] for one in found]
    return Exhibit(
        "cache_gain",
        "What the joint choice gains",
        "Its error over that of the best other method, chosen on the same texts; below 1 it gains.",
        [
            "Ratios of mean errors over the same texts, with 95% intervals from their paired "
            "differences; a gain is firm where the interval lies below 1. The best other method is "
            "the one of least mean error on these very texts, with the same queries observed or "
            "none: a choice after the fact, which favours it. The CSV names it, and has the ratio "
            "of the model's distances (KL; of an encoder 1 − cosine)."
        ],
        table=Table(wide, display),
    )


def _of(record: CacheRecord) -> Iterator[dict[str, Any]]:
    def place(cell: CacheCell) -> tuple[int, str]:
        return cell.r, cell.observed

    known = (c for c in record.cells if c.error.value is not None and c.observed != "hindsight")
    cells = sorted(known, key=place)
    blind = [cell for cell in cells if cell.observed == "nothing"]
    for (r, observed), group in groupby((c for c in cells if c not in blind), place):
        same = [*group, *(cell for cell in blind if cell.r == r)]
        for compared, (is_above, is_below) in COMPARED.items():
            above = next((cell for cell in same if is_above(cell)), None)
            others = [cell for cell in same if is_below(cell)]
            if above is None or not others:
                continue
            below = min(others, key=lambda cell: cell.error.value or 0.0)
            row = {"texts": record.task, "r": r, "observed": observed, "compared": compared,
                   "below": below.method}  # fmt: skip
            yield row | _ratio(above, below, "error") | _ratio(above, below, "distance")


def _ratio(above: CacheCell, below: CacheCell, name: str) -> dict[str, float | None]:
    measure = name if name == "error" else _distance_name(above)
    found = estimate(np.array(above.by_unit[measure]), np.array(below.by_unit[measure]))
    return {name: found.value, f"{name} low": found.low, f"{name} high": found.high}


def _distance_name(cell: CacheCell) -> str:
    return next(name for name, one in cell.ends.items() if one is distance(cell))


def _text(found: pd.DataFrame) -> str:
    if found.empty or pd.isna(found["error"].iloc[0]):
        return "–"
    value, low, high = (found[name].iloc[0] for name in ("error", "error low", "error high"))
    return f"{number(value, 2)} ({interval(low, high, 2, number)})"


def agreement(records: Sequence[CacheRecord]) -> Exhibit | None:
    """Ranks methods by output error and by the model's own distance, and compares the two."""
    rows = []
    for record in records:
        for r in sorted({cell.r for cell in record.cells}):
            pairs = [
                (cell.error.value, distance(cell).value)
                for cell in record.cells
                if cell.r == r and cell.error.value is not None
            ]
            if len(pairs) > 2:
                found = float(spearmanr(*zip(*pairs, strict=True)).statistic)
                rows.append(
                    {"texts": record.task, "r": r, "methods": len(pairs), "Spearman": found}
                )
    if not rows:
        return None
    data = pd.DataFrame(rows)
    display = data.astype(str).assign(Spearman=[number(one, 2) for one in data["Spearman"]])
    return Exhibit(
        "cache_agreement",
        "Whether the output error ranks methods as the model's output does",
        "Spearman's rank correlation, over methods, of output error and distance; 1 = alike.",
        ["A method counts once for each way to observe queries; hindsight is among them."],
        table=Table(data, display),
        folded=True,
    )
