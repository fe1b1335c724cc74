"""Outcomes are told apart (one line, a traceback, accepted) and counted on a page."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.record import header
from checks.values import suite
from checks.values.cases import NEW, ValueCase, cases

CASE = ValueCase(
    kind="type",
    found=NEW,
    given="train_causal causal.steps=abc",
    exit=1,
    line="causal.steps is abc; it must be",
)
SAID = "error: causal.steps is abc; it must be a whole number"


def outcome(code: int | None, *lines: str, seconds: float = 1.0) -> dict[str, Any]:
    return {"code": code, "stderr": list(lines), "seconds": seconds, "changed": []}


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (outcome(1, SAID), suite.LINE),
        (outcome(1, "error: invalid literal for int()"), suite.OTHER_LINE),
        (outcome(1, "Traceback (most recent call last):", "TypeError: steps"), suite.MORE),
        (outcome(1, SAID, SAID), suite.MORE),
        (outcome(0), suite.ACCEPTED),
        (outcome(None), suite.NO_END),
    ],
)
def test_an_outcome_is_one_of_those_of_the_page(found: dict[str, Any], kind: str) -> None:
    assert suite.came_out(CASE, found) == kind
    assert (suite.came_out(replace(CASE, exit=0, line=""), outcome(0))) == suite.RIGHT


def test_a_case_is_wrong_where_its_line_is_another_or_a_file_changed() -> None:
    right = suite.kept(CASE, outcome(1, SAID))
    for changes, said in (
        ({}, ""),
        ({"line": "error: causal.steps is wrong"}, "another line"),
        ({"changed": ["outputs/smoke/metrics/corpus.json"]}, "changed a file"),
        ({"outcome": suite.ACCEPTED}, "accepted"),
    ):
        found = {"outcomes": {CASE.name: right | changes}}
        assert suite.wrong(CASE, found).startswith(said)
        assert bool(suite.wrong(CASE, found)) is bool(said)


def test_the_page_counts_outcomes_and_names_the_wrong_ones() -> None:
    some = [case for case in cases() if case.exit][:9]
    right = {case.name: suite.kept(case, outcome(1, f"error: {case.line}")) for case in some[1:]}
    late = {some[0].name: suite.kept(some[0], outcome(1, "x", seconds=9))}
    record = header("values") | {"outcomes": right | late}
    counted = [suite.counts(record, is_new=is_new) for is_new in (True, False)]
    for name, count in ((suite.MORE, 1), (suite.LINE, 8), (suite.SOON, 8)):
        assert sum(column[name] for column in counted) == count
    assert f"- `{some[0].name}`: {suite.MORE}" in suite.page(record)
