"""Writes the tables of methods in README.md and docs/methods.md, from their cards and classes.

python -m pipelines.method_tables
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipelines.app import ending_with_one_line
from pipelines.methods import method_class
from value_aware_attention.approximations.support import KERNELS, Support, support
from value_aware_study.cards import Card, cards

README, METHODS = "README.md", "docs/methods.md"
TABLE = re.compile(r"(<!-- python -m pipelines\.method_tables -->\n)(?:\|.*\n)*")


def main() -> None:
    """Writes the tables where they stand, in the current folder."""
    with ending_with_one_line():
        for file in (README, METHODS):
            path = Path(file)
            path.write_text(renewed(file, path.read_text(encoding="utf-8")), encoding="utf-8")


def renewed(file: str, text: str) -> str:
    """The text of one of the files with its table as it is to be."""
    table = markdown(readme_rows() if file == README else method_rows())
    return TABLE.sub(lambda found: found[1] + table, text)


def readme_rows() -> Iterator[tuple[str, ...]]:
    """What each method keeps and supports, for those that keep less than everything."""
    yield "", "what it keeps", "kernels", "causal", "mask"
    for card in cards().values():
        if card.keeps:
            row = support(method_class(card))
            mask = "any" if row.any_mask else "padding"
            yield call(card), card.keeps, kernels(row), yes(row.causal), mask


def method_rows() -> Iterator[tuple[str, ...]]:
    """The names of each method, and all that it supports."""
    flags = ("causal", "padding", "any mask", "gradients to query and key")
    yield "method", "option", "in figures", "kernels", *flags
    for card in cards().values():
        row = support(method_class(card))
        supported = map(yes, (row.causal, row.padding, row.any_mask, row.gradients))
        label = card.label.replace("|", "\\|")
        yield call(card), f"`{card.name}`", label, kernels(row), *supported


def call(card: Card) -> str:
    """How the card's class is called, by the names of its arguments."""
    return f"`{method_class(card).__name__}({', '.join(card.arguments)})`"


def kernels(row: Support) -> str:
    """The names of the kernels that are supported."""
    return "all" if row.kernels == KERNELS else ", ".join(k.__name__.lower() for k in row.kernels)


def yes(flag: bool) -> str:
    return "yes" if flag else "no"


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown; the first row is its head."""
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
