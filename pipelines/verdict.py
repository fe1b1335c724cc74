"""Says whether a run came out as the published one of its scale, and where its page is.

    python -m pipelines.verdict

Runs are compared finding by finding: another processor is another training, so that a difference
is held against the spread over trainings.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from pipelines.app import ending_with_one_line
from pipelines.app.values import read_params
from value_aware_attention.files import load_json, reading

REPORT, PUBLISHED, FINDINGS = Path("report"), Path("results"), "findings.csv"
AGAIN, RESTORE = "make it again (make repro)", "restore it (git restore results), or remove it"
KEYS = ["claim", "what", "model"]
TEXTS = [*KEYS, "verdict", "sentence", "holds", "unit"]
NUMBERS = ["estimate", "trainings", "spread", "seeds"]
MARKS = {"yes": "✓", "no": "✗", "": "?"}


def main() -> None:
    with ending_with_one_line():
        print("\n".join(lines()))


def lines() -> Iterator[str]:
    """Yields the verdict, what differs from the published run, and the page's address."""
    scale, ours = read_params()["scale"], findings(REPORT / FINDINGS, AGAIN)
    published = PUBLISHED / scale / FINDINGS
    if published.exists():
        yield from compared(ours, findings(published, RESTORE))
    else:
        counts = verdicts(ours).str.partition(" (")[0].value_counts()
        text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        yield f"claims of the paper: {text}; no run of scale {scale} is published to compare with"
    yield (REPORT / "index.html").resolve().as_uri()


def findings(file: Path, remedy: str) -> pd.DataFrame:
    """Reads the rows of every claim: one for each comparison, or one without a comparison."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: {remedy}")
    with reading(file, remedy):
        table = pd.read_csv(file, usecols=[*TEXTS, *NUMBERS], dtype=dict.fromkeys(NUMBERS, float))
        if table.empty:
            raise ValueError("it holds no claim")
    return table.fillna(dict.fromkeys(TEXTS, ""))


def verdicts(table: pd.DataFrame) -> pd.Series:
    """Returns the verdict of each claim."""
    return table.groupby("claim", sort=False)["verdict"].last()


def compared(ours: pd.DataFrame, theirs: pd.DataFrame) -> Iterator[str]:
    """Yields how many claims and comparisons are as published, and names those that are not.

    A comparison is named where its mark has changed or its difference is beyond training noise.
    """
    old = verdicts(theirs)
    new = verdicts(ours).reindex(old.index, fill_value="not asked")
    pairs = paired(ours, theirs)
    changed = pairs["holds"] != pairs["holds_published"]
    within = (changed & (pairs["noise"] == "within")).sum()
    yield (
        f"{(old == new).sum()} of {len(old)} claims as published; {changed.sum()} of {len(pairs)} "
        f"comparisons changed their mark, {within} of these within training noise"
    )
    for claim in old.index[old != new]:
        yield f"  {new[claim]}, published {old[claim]}: {claim}"
    for pair in pairs[changed | (pairs["noise"] == "beyond")].itertuples():
        yield (
            f"  {pair.what}, {pair.sentence} {MARKS[pair.holds]}, published "
            f"{pair.sentence_published.removeprefix(f'{pair.model} ')} "
            f"{MARKS[pair.holds_published]}; {pair.noise} training noise"
        )


def paired(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """Pairs the comparisons of two runs of a scale, which read the same text.

    The column "noise" says whether they differ by no more than their trainings may: the 95%
    interval of the difference of two means, of k and of l trainings, is 0 ± t s sqrt(1/k + 1/l),
    with the standard deviation s over trainings that the published run has, or else this one.
    """
    # what is compared may end in a number of keys, which belongs to the run
    ours, theirs = (
        table[table["what"] != ""].assign(what=table["what"].str.partition(" (")[0])
        for table in (ours, theirs)
    )
    pairs = theirs.merge(ours, on=KEYS, suffixes=("_published", ""))
    spread, seeds = (pairs[f"{name}_published"].fillna(pairs[name]) for name in ("spread", "seeds"))
    share = 1 / pairs["trainings"] + 1 / pairs["trainings_published"]
    noise = stdtrit(seeds - 1, 0.975) * spread * np.sqrt(share)
    effects, is_ratio = pairs[["estimate", "estimate_published"]], pairs["unit"] == "ratio"
    effects = effects.where(~is_ratio, np.log(effects.where(is_ratio, axis=0)), axis=0)
    distance = effects.diff(axis=1).iloc[:, 1].abs()
    unknown = noise.isna() | distance.isna()
    pairs["noise"] = np.select([unknown, distance <= noise], ["unknown", "within"], "beyond")
    return pairs


def numbers(file: Path) -> dict[str, float]:
    """Reads numbers by name; empty where there is no file."""
    content = load_json(file, remedy="remove it") if file.exists() else {}
    with reading(file, "remove it"):
        return {name: float(number) for name, number in content.items()}


if __name__ == "__main__":
    main()
