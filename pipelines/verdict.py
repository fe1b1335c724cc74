"""Says whether a run came out as the published one of its scale, and where its page is.

python -m pipelines.verdict
"""

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.app import ending_with_one_line
from pipelines.app.values import read_params
from value_aware_attention.files import load_json, reading
from value_aware_study.paths import SUMMARY, TIMES

REPORT, PUBLISHED, OUTPUTS = Path("report"), Path("results"), Path("outputs")
CLAIMS, STRENGTH = "claims.csv", "strength.csv"
AGAIN, RESTORE = "make it again (make repro)", "restore it (git restore results), or remove it"


def main() -> None:
    with ending_with_one_line():
        print("\n".join(lines()))


def lines() -> Iterator[str]:
    """Yields the verdict, the differences, and the page's address."""
    scale = scale_of_run()
    folder, ours = PUBLISHED / scale, verdicts(REPORT / CLAIMS, AGAIN)
    if not (folder / SUMMARY).exists():
        counts = Counter(ours.values()).most_common()
        found = ", ".join(f"{count} {verdict}" for verdict, count in counts)
        yield f"claims of the paper: {found}; no run of scale {scale} is published to compare with"
    else:
        theirs = verdicts(folder / CLAIMS, RESTORE)
        other = [claim for claim in theirs if ours.get(claim) != theirs[claim]]
        share, where = largest_difference(published_summaries(folder / SUMMARY), summaries())
        same = f"all {len(theirs)} claims" if not other else f"{len(theirs) - len(other)} of them"
        yield f"{same} as published; largest difference {share:.1%} ({where})"
        for claim in other:
            yield f"  {ours.get(claim, 'not asked')}, published {theirs[claim]}: {claim}"
    if (REPORT / STRENGTH).exists():
        worse = worse_than_counting(REPORT / STRENGTH)
        yield f"worse than counts of their own text: {', '.join(worse) or 'no model'}"
    yield (REPORT / "index.html").resolve().as_uri()


def scale_of_run() -> str:
    return str(read_params()["scale"])


def verdicts(file: Path, remedy: str) -> dict[str, str]:
    """Reads the verdict of each claim."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: {remedy}")
    with reading(file, remedy), file.open(encoding="utf-8", newline="") as text:
        found = {row["claim"]: row["verdict"] for row in csv.DictReader(text)}
        if not found:
            raise ValueError("it holds no claim")
    return found


def worse_than_counting(file: Path) -> list[str]:
    """Reads which models err more than n-grams of their training text."""
    with reading(file, AGAIN), file.open(encoding="utf-8", newline="") as text:
        found = [row["model"] for row in csv.DictReader(text) if row["errs"].startswith("more")]
    return list(dict.fromkeys(found))


def published_summaries(file: Path) -> dict[str, dict[str, float]]:
    """Reads the published summary of every model."""
    found = kept(file)
    with reading(file, RESTORE):
        return {model: numbers(summary) for model, summary in found.items()}


def summaries() -> dict[str, dict[str, float]]:
    """Reads the summary of every model of this run."""
    files = sorted((OUTPUTS / scale_of_run() / "summary").glob("*.json"))
    return {file.stem: read_numbers(file, AGAIN) for file in files}


def read_numbers(file: Path, remedy: str) -> dict[str, float]:
    """Reads numbers by name; empty where there is no file."""
    found = kept(file)
    with reading(file, remedy):
        return numbers(found)


def numbers(content: Any) -> dict[str, float]:
    """Checks that the content is numbers by name; ValueError where it is anything else."""
    if not isinstance(content, dict):
        raise ValueError(f"it has {content!r:.40} in the place of numbers by name")
    for name, value in content.items():
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} is {value!r:.40}, not a number")
    return {name: float(value) for name, value in content.items()}


def largest_difference(
    published: dict[str, dict[str, float]], ours: dict[str, dict[str, float]]
) -> tuple[float, str]:
    """Finds the largest relative difference of a number that both have, and names it."""
    shares = [
        (abs(ours[model][name] / value - 1), f"{model}, {name}")
        for model, numbers in published.items()
        for name, value in numbers.items()
        if value and name in ours.get(model, {})
    ]
    return max(shares, default=(0.0, "no number in common"))


def published_seconds() -> dict[str, float]:
    """Reads the seconds of each stage in the published run of this scale."""
    return read_numbers(PUBLISHED / scale_of_run() / TIMES, RESTORE)


def kept(file: Path) -> dict[str, Any]:
    """Reads a file's JSON; empty where there is none."""
    return load_json(file, remedy="remove it") if file.exists() else {}


if __name__ == "__main__":
    main()
