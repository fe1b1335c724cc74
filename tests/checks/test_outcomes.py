"""Outcomes are told apart (one line, a traceback, accepted) and counted on a page."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.record import header
from checks.values import suite
from checks.values.cases import ValueCase, cases

CASE = ValueCase(
    kind="type",
    found="new",
    given="train_causal causal.steps=abc",
    exit=1,
    line="causal.steps is abc; it must be",
)
LINE = "error: causal.steps is abc; it must be a whole number"


def outcome(code: int | None, *lines: str) -> dict[str, Any]:
    return {"code": code, "stderr": list(lines), "changed": []}


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (outcome(1, LINE), suite.LINE),
        (outcome(1, "error: invalid literal for int()"), suite.OTHER_LINE),
        (outcome(2, LINE), suite.OTHER_LINE),
        (outcome(1, "Traceback (most recent call last):", "TypeError: steps"), suite.MORE),
        (outcome(1, LINE, LINE), suite.MORE),
        (outcome(0), suite.ACCEPTED),
        (outcome(None), suite.NO_END),
    ],
)
def test_an_outcome_is_one_of_those_of_the_page(ended: dict[str, Any], kind: str) -> None:
    assert suite.came_out(CASE, ended) == kind
    assert (suite.came_out(replace(CASE, exit=0, line=""), outcome(0))) == suite.RIGHT


def test_a_case_is_wrong_where_its_line_is_another_or_a_file_changed() -> None:
    right = suite.judged(CASE, outcome(1, LINE))
    for changes, reason in (
        ({}, ""),
        ({"outcome": suite.OTHER_LINE}, suite.OTHER_LINE),
        ({"changed": ["outputs/smoke/metrics/corpus.json"]}, "changed a file"),
        ({"outcome": suite.ACCEPTED}, "accepted"),
    ):
        wrong = suite.wrong(CASE, {**right, **changes})
        assert wrong.startswith(reason) and bool(wrong) is bool(reason)


def test_the_page_counts_outcomes_and_names_the_wrong_ones() -> None:
    bad, *good = [case for case in cases() if case.exit][:9]
    outcomes = {case.name: suite.judged(case, outcome(1, f"error: {case.line}")) for case in good}
    outcomes[bad.name] = suite.judged(bad, outcome(1, "x"))
    text = suite.page([bad, *good], header("values") | {"outcomes": outcomes})
    assert f"- `{bad.name}`: {suite.MORE}" in text
    assert f"{suite.LINE} | 8" in " ".join(text.split())
