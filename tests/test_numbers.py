"""Every number that README and docs claim is one of a record, which a comment in the page names.

    <!-- numbers
    hours/table_2.csv | kernel == "elu" and column == "exact" | value, low, high | .1f
    search/causal.json | trials.2 | perplexity | .1f
    -->

stands below the text with these numbers: a file of results/, a row of a CSV (a query of pandas) or
a path in JSON, its columns or keys, and the form in which the page has them; `*100` before the form
multiplies. `range time` is the least and the largest of a column in all rows of the
query. A line "given 0.010 512" lists settings, and numbers of others' papers.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITHOUT_OTHERS = {"recipe.md", "README.md", "caches.md", "decoding.md", "probe.md"}
"""Pages in which every measured number must have one"""
COMMENT = re.compile(r"<!-- numbers\n(.*?)-->", re.DOTALL)
NOT_MEASURED = re.compile(
    r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|95% interval|\d{4}\.\d{5}", re.DOTALL
)
"""Code, addresses of links, comments, the level of every interval, and numbers of arXiv"""
MEASURED = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.]*\d)|(?<![\w.])\d+(?= ?%)")
"""Decimals and percentages"""


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the text of a page in front of each comment, with the comment's lines."""
    *parts, last = COMMENT.split(page.read_text())
    for shown, comment in zip(parts[::2], parts[1::2], strict=True):
        yield shown, comment.strip().splitlines()
    yield last, []


def numbers(line: str) -> list[str]:
    """Reads the numbers that a line of a comment names, as the page should have them."""
    if line.startswith("given "):
        return line.split()[1:]
    file, row, columns, form = (part.strip() for part in line.split("|"))
    factor, _, form = form.rpartition(" ")
    path = ROOT / "results" / file
    if path.suffix == ".csv":
        frame = pd.read_csv(path).query(row)
        if columns.startswith("range "):
            ends = frame[columns.removeprefix("range ")].agg(["min", "max"])
            found, columns = ends.to_dict(), "min, max"
        else:
            assert len(frame) == 1, f"{line}: {len(frame)} rows"
            found = frame.iloc[0].to_dict()
    else:
        found = json.loads(path.read_text())
        for key in row.split(".") if row else []:
            found = found[int(key)] if isinstance(found, list) else found[key]
    scale = float(factor.removeprefix("*")) if factor else 1.0
    named = [scale * float(found[name.strip()]) for name in columns.split(",")]
    return [f"{number:{form}}".replace("-", "−") for number in named]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_numbers_of_its_records(page: Path) -> None:
    for shown, lines in blocks(page):
        said = NOT_MEASURED.sub(" ", shown)
        known = {number for line in lines for number in numbers(line)}
        for number in known:
            assert re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d|\.\d)", said), number
        if page.name in WITHOUT_OTHERS:
            plain = {number.strip("−%") for number in known}
            assert [one for one in MEASURED.findall(said) if one not in plain] == []
