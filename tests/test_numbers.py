"""Every number that README and docs claim is one of a record, which a comment in the page names.

    <!-- numbers
    hours/table_2.csv | kernel == "elu" and column == "exact" | value, low, high | .1f
    search/causal.json | trials.2 | perplexity | .1f
    -->

stands below the text with these numbers: a file of results/, a row of a CSV (a query of pandas) or
a path in JSON, its columns or keys, and the form in which the page has them; `*100` before the form
multiplies. `range time` is the least and the largest of a column in all rows of the
query. A line "given 0.010 512" lists settings, and numbers of others' papers.

A model that is trained here several times is quoted by the mean over its trainings: no line names a
column or a file with the numbers of single ones (`of_one_training`).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITHOUT_OTHERS = {
    "recipe.md", "README.md", "caches.md", "caches-measured.md", "cache-methods.md",
    "cache-optimum.md", "decoding.md", "probe.md",
}  # fmt: skip
"""Pages in which every measured number must have one"""
COMMENT = re.compile(r"<!-- numbers\n(.*?)-->", re.DOTALL)
NOT_MEASURED = re.compile(
    r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|95% interval|\d{4}\.\d{5}", re.DOTALL
)
"""Code, addresses of links, comments, the level of every interval, and numbers of arXiv"""
MEASURED = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.]*\d)|(?<![\w.])\d+(?= ?%)")
"""Decimals and percentages"""
SINGLE = re.compile(r"(\w+_)?training_\w+")
"""Columns of single trainings, beside their mean: `ratio_training_first`"""
PROBED = re.compile(r"hero|matching|model_\w+")
"""Exhibits of a page that are of models trained by others"""


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


def of_one_training(line: str) -> bool:
    """Tells whether a line of a comment names numbers of one training of ours.

    These are columns of single trainings, rows that name theirs, summaries by training, and all of
    a page whose models were trained once.
    """
    if line.startswith("given "):
        return False
    file, _, columns, _ = (part.strip() for part in line.split("|"))
    models = (ROOT / "results" / file).with_name("models.csv")
    if not models.exists():  # no page of our models
        return False
    if Path(file).suffix != ".csv":
        return True
    if PROBED.fullmatch(Path(file).stem):
        return False
    header = set(pd.read_csv(ROOT / "results" / file, nrows=0))
    named = [name for part in columns.split(",") for name in part.split()]
    several = any(map(SINGLE.fullmatch, pd.read_csv(models, nrows=0)))
    return "training" in header or any(map(SINGLE.fullmatch, named)) or not several


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_number_is_of_one_training(page: Path) -> None:
    lines = [line for _, lines in blocks(page) for line in lines]
    assert [line for line in lines if of_one_training(line)] == []


@pytest.mark.parametrize(
    ("line", "single"),
    [
        ('hours/table_2.csv | kernel == "elu" and column == "exact" | value | .1f', False),
        ('hours/table_2.csv | column == "exact" | own_training_second | .1f', True),
        ("hours/figure_1.csv | r == 1 | range training_first | .1f", True),
        ('hours/grid.csv | model == "causal_elu" | cosine | .2f', True),
        ("hours/figure_8.csv | layer == 0 | gap | .2f", True),
        ("hours/summary.json | causal_elu | exact | .1f", True),
        ('laptop/table_2.csv | column == "exact" | value | .1f', True),
        ("laptop/hero.csv | r == 4 | keys_needed | .0f", False),
        ("pretrained/hero.csv | r == 4 | value | .2f", False),
        ("given 512", False),
    ],
)
def test_numbers_of_one_training_are_told_from_means(line: str, single: bool) -> None:
    assert of_one_training(line) == single


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
