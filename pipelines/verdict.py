"""Says whether a run came out as the published one of its scale, and where its page is.

python -m pipelines.verdict
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from value_aware_attention.storage import read_json

REPORT, PUBLISHED, METRICS = Path("report"), Path("results"), Path("outputs/summary")
SUMMARY, CLAIMS, TIMES = "summary.json", "claims.csv", "seconds.json"


def main() -> None:
    print("\n".join(lines()))


def lines() -> Iterator[str]:
    """The verdict, what differs, and the page's address."""
    scale = scale_of_run()
    folder, ours = PUBLISHED / scale, verdicts(REPORT / CLAIMS)
    if not (folder / SUMMARY).exists():
        counts = pd.Series(ours).value_counts()
        found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        yield f"claims of the paper: {found}; no run of scale {scale} is published to compare with"
    else:
        theirs = verdicts(folder / CLAIMS)
        other = [claim for claim in theirs if ours.get(claim) != theirs[claim]]
        share, where = largest_difference(kept(folder / SUMMARY), summaries())
        same = f"all {len(theirs)} claims" if not other else f"{len(theirs) - len(other)} of them"
        yield f"{same} as published; largest difference {share:.1%} ({where})"
        for claim in other:
            yield f"  {ours.get(claim, 'not asked')}, published {theirs[claim]}: {claim}"
    yield (REPORT / "index.html").resolve().as_uri()


def scale_of_run() -> str:
    return str(OmegaConf.load("params.yaml").scale)


def verdicts(file: Path) -> dict[str, str]:
    """Claim -> verdict."""
    read = pd.read_csv(file).drop_duplicates("claim")
    return dict(zip(read["claim"], read["verdict"], strict=True))


def summaries() -> dict[str, dict[str, float]]:
    """The summary of every model of this run."""
    return {file.stem: kept(file) for file in sorted(METRICS.glob("*.json"))}


def largest_difference(
    published: dict[str, dict[str, float]], ours: dict[str, dict[str, float]]
) -> tuple[float, str]:
    """The largest relative difference of a number that both have, and which number it is."""
    shares = [
        (abs(ours[model][name] / value - 1), f"{model}, {name}")
        for model, numbers in published.items()
        for name, value in numbers.items()
        if value and name in ours.get(model, {})
    ]
    return max(shares, default=(0.0, "no number in common"))


def published_seconds() -> dict[str, float]:
    """How long each stage took in the published run of this scale."""
    return kept(PUBLISHED / scale_of_run() / TIMES)


def kept(file: Path) -> dict[str, Any]:
    """A file's JSON; empty where there is none."""
    return read_json(file, remedy="remove it") if file.exists() else {}


if __name__ == "__main__":
    main()
