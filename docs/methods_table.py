"""Writes the two tables of methods in docs/methods.md, from their cards and classes.

python -m docs.methods_table
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hydra.utils import get_class

from pipelines.app import ending_with_one_line
from value_aware_attention.approximations import Approximation
from value_aware_attention.kernels import KERNELS
from value_aware_study.cards import Card, cards

METHODS = Path("docs/methods.md")
TABLE = re.compile(r"(<!-- python -m docs\.methods_table: (\w+) -->\n)(?:\|.*\n)*")


class Support(NamedTuple):
    """Tells which options a method supports; the others raise ValueError, except gradients."""

    kernels: tuple[type, ...]
    """Similarity kernels it computes or approximates."""
    causal: bool
    """Whether `is_causal=True` is supported"""
    padding: bool
    """Whether an `attn_mask` that hides the same keys from every query is supported"""
    any_mask: bool
    """Whether any other `attn_mask` is supported"""
    gradients: bool
    """Whether query and key are given gradients; `value` always is."""


def support(method: type[Approximation]) -> Support:
    """Reads the options that a method supports from its class."""
    return Support(
        kernels=method.kernels or KERNELS,
        causal=method.supports_causal,
        padding=True,
        any_mask=not method.needs_shared_keys,
        gradients=method.differentiable_weights,
    )


def main() -> None:
    """Writes the tables where they stand, in the current folder."""
    with ending_with_one_line():
        METHODS.write_text(renewed(METHODS.read_text(encoding="utf-8")), encoding="utf-8")


def renewed(text: str) -> str:
    """Returns the text of the file with new tables."""
    rows = {"what": kept_rows, "support": support_rows}
    return TABLE.sub(lambda found: found[1] + markdown(rows[found[2]]()), text)


def kept_rows() -> Iterator[tuple[str, ...]]:
    """Lists the names of each method, and what it keeps."""
    yield "method", "what it keeps", "option", "in figures"
    for card in cards().values():
        yield call(card), card.keeps, f"`{card.name}`", card.label.replace("|", "\\|")


def support_rows() -> Iterator[tuple[str, ...]]:
    """Lists the options that each method supports."""
    yield "option", "kernels", "causal", "padding", "any mask", "gradients to query and key"
    for card in cards().values():
        row = support(get_class(card.target))
        flags = map(yes, (row.causal, row.padding, row.any_mask, row.gradients))
        yield f"`{card.name}`", kernels(row), *flags


def call(card: Card) -> str:
    """Writes the call of the card's class, with the names of its arguments."""
    return f"`{get_class(card.target).__name__}({', '.join(card.arguments)})`"


def kernels(row: Support) -> str:
    """Names the kernels that are supported."""
    return "all" if row.kernels == KERNELS else ", ".join(k.__name__.lower() for k in row.kernels)


def yes(flag: bool) -> str:
    return "yes" if flag else "no"


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    """Writes a table in Markdown; the first row is its head."""
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
