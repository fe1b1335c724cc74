"""Says whether a run came out as the published one of its scale, and where its page is.

Runs are compared finding by finding: another processor is another training, so that a difference
is held against the spread over trainings.

python -m pipelines.verdict
"""

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from pipelines.app import ending_with_one_line
from pipelines.app.values import read_params
from value_aware_attention.files import load_json, reading
from value_aware_study.paths import TIMES

REPORT, PUBLISHED, OUTPUTS = Path("report"), Path("results"), Path("outputs")
CLAIMS, FINDINGS, STRENGTH = "claims.csv", "findings.csv", "strength.csv"
AGAIN, RESTORE = "make it again (make repro)", "restore it (git restore results), or remove it"
COLUMNS = {
    *("claim", "what", "model", "sentence", "holds", "estimate", "unit"),
    *("trainings", "spread", "seeds"),
}
"""Columns of comparisons, of which files of an older form lack some"""
MARKS = {"yes": "✓", "no": "✗", "": "?"}
Row = dict[str, str]


def main() -> None:
    with ending_with_one_line():
        print("\n".join(lines()))


def lines() -> Iterator[str]:
    """Yields the verdict, what differs from the published run, and the page's address."""
    scale, ours = scale_of_run(), findings(REPORT / FINDINGS, AGAIN)
    published = PUBLISHED / scale / FINDINGS
    if published.exists():
        yield from compared(ours, findings(published, RESTORE))
    else:
        counts = Counter(verdicts(ours).values()).most_common()
        found = ", ".join(f"{count} {verdict}" for verdict, count in counts)
        yield f"claims of the paper: {found}; no run of scale {scale} is published to compare with"
    if (REPORT / STRENGTH).exists():
        worse = worse_than_counting(REPORT / STRENGTH)
        times = read_numbers(OUTPUTS / scale / TIMES, AGAIN)
        own = ("train_causal", "train_masked")
        minutes = [spent / 60 for stage, spent in times.items() if stage.startswith(own)]
        trained = f", trained for {math.ceil(max(minutes))} minutes at most" if minutes else ""
        yield f"worse than counts of their own text{trained}: {', '.join(worse) or 'no model'}"
    yield (REPORT / "index.html").resolve().as_uri()


def scale_of_run() -> str:
    return str(read_params()["scale"])


def findings(file: Path, remedy: str) -> list[Row]:
    """Reads the rows of every claim: one for each comparison, or an empty one."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: {remedy}")
    with reading(file, remedy), file.open(encoding="utf-8", newline="") as text:
        found = list(csv.DictReader(text))
        if not found:
            raise ValueError("it holds no claim")
        verdicts(found)
    return found


def verdicts(found: Sequence[Row]) -> dict[str, str]:
    return {row["claim"]: row["verdict"] for row in found}


def compared(ours: Sequence[Row], theirs: Sequence[Row]) -> Iterator[str]:
    """Yields how many claims and comparisons are as published, and names those that are not.

    A comparison is named where its difference is beyond the noise of training, and where its mark
    has changed while that noise is not known.
    """
    new, old = verdicts(ours), verdicts(theirs)
    other = [claim for claim in old if new.get(claim) != old[claim]]
    same = f"{len(old) - len(other)} of {len(old)} claims as published"
    known = all(rows[0].keys() >= COLUMNS for rows in (ours, theirs))
    pairs, alone = paired(ours, theirs) if known else ([], 0)
    changes = changed(pairs) if known else "its comparisons have an older form (make publish)"
    yield f"{same}; {changes}{f'; {alone} are in one of the runs alone' if alone else ''}"
    for claim in other:
        yield f"  {new.get(claim, 'not asked')}, published {old[claim]}: {claim}"
    for pair in pairs:
        if pair.within is False or (pair.changed and pair.within is None):
            yield f"  {pair}"


def changed(pairs: Sequence["Pair"]) -> str:
    """Counts the comparisons whose mark is another, and those of them within training noise."""
    found = [pair for pair in pairs if pair.changed]
    if not found:
        return f"none of {len(pairs)} comparisons changed its mark"
    within = sum(pair.within is True for pair in found)
    inside = "all" if within == len(found) else within or "none"
    marks = "its mark" if len(found) == 1 else "their marks"
    return (
        f"{len(found)} of {len(pairs)} comparisons changed {marks}, {inside} within training noise"
    )


def paired(ours: Sequence[Row], theirs: Sequence[Row]) -> tuple[list["Pair"], int]:
    """Pairs the comparisons of two runs; counts those of one run alone."""
    first, second = (
        {
            (row["claim"], row["what"].partition(" (")[0], row["model"]): row
            for row in rows
            if row["what"]
        }
        for rows in (ours, theirs)
    )
    both = [Pair(first[key], second[key]) for key in second if key in first]
    return both, len(first.keys() ^ second.keys())


@dataclass(frozen=True)
class Pair:
    """A comparison in two runs of a scale, which read the same text."""

    ours: Row
    theirs: Row

    @property
    def changed(self) -> bool:
        return self.ours["holds"] != self.theirs["holds"]

    @property
    def within(self) -> bool | None:
        """Tells whether the runs differ by no more than their trainings may; None if not known.

        The text is the same. The 95% interval of the difference of two means, of k and of l
        trainings, is 0 ± t s sqrt(1/k + 1/l), with the standard deviation s over trainings that
        the published run has, or else this one.
        """
        known = [row for row in (self.theirs, self.ours) if row["seeds"]]
        if not known:
            return None
        share = sum(1 / int(row["trainings"]) for row in (self.ours, self.theirs))
        quantile = float(stdtrit(int(known[0]["seeds"]) - 1, 0.975))
        noise = quantile * float(known[0]["spread"]) * math.sqrt(share)
        return abs(effect(self.ours) - effect(self.theirs)) <= noise

    def __str__(self) -> str:
        (new, mark), (old, before) = (
            (row["sentence"].removeprefix(f"{row['model']} "), MARKS[row["holds"]])
            for row in (self.ours, self.theirs)
        )
        beyond = "no training spread is known" if self.within is None else "beyond training noise"
        where = f"{self.ours['what']}, {self.ours['model']}"
        return f"{where}: {new} {mark}, published {old} {before}; {beyond}"


def effect(row: Row) -> float:
    """Returns a comparison's estimate on the scale of its spread."""
    estimate = float(row["estimate"])
    return math.log(estimate) if row["unit"] == "ratio" else estimate


def worse_than_counting(file: Path) -> list[str]:
    """Reads which models err more than n-grams of their training text."""
    with reading(file, AGAIN), file.open(encoding="utf-8", newline="") as text:
        found = [row["model"] for row in csv.DictReader(text) if row["errs"].startswith("more")]
    return list(dict.fromkeys(found))


def read_numbers(file: Path, remedy: str) -> dict[str, float]:
    """Reads numbers by name; empty where there is no file."""
    found = kept(file)
    with reading(file, remedy):
        for name, value in found.items():
            if not isinstance(value, (int, float)):
                raise ValueError(f"{name} is {value!r:.40}, not a number")
    return found


def published_seconds() -> dict[str, float]:
    """Reads the seconds of each stage in the published run of this scale."""
    return read_numbers(PUBLISHED / scale_of_run() / TIMES, RESTORE)


def kept(file: Path) -> dict[str, Any]:
    """Reads a file's JSON; empty where there is none."""
    return load_json(file, remedy="remove it") if file.exists() else {}


if __name__ == "__main__":
    main()
