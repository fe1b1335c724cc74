"""Records with values that no measurement writes are refused by name."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.refusals import assert_refused
from tests.report.pages import exploration
from tests.report.surveyed import cache_record
from tests.report.synthetic import probed
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.record import Record
from value_aware_study.evaluation.exploration import Exploration

Edit = Callable[[dict[str, Any]], object]


def edited(text: str, edit: Edit) -> str:
    content = json.loads(text)
    edit(content)
    return json.dumps(content).replace("Infinity", "1e999")


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda it: it.update(task="nope"), "task is 'nope'; it must be one of causal, masked"),
        (lambda it: it.update(metric="nats"), "metric is 'nats'; it must be one of perplexity"),
        (lambda it: it.update(head_dim=0), "head_dim is 0; it must be at least 1"),
        (lambda it: it.update(length=-5), "length is -5; it must be at least 1"),
        (lambda it: it.update(cells=[]), "its cells do not begin with exact attention"),
        (lambda it: it["cells"].pop(0), "its cells do not begin with exact attention"),
        (lambda it: it.update(cells={}), r"cells is \{\}; it must be a list"),
        (lambda it: it["cells"][2].update(value=-5), r"cells\.2 has a perplexity of -5"),
        (
            lambda it: it["cells"][2].update(value=math.inf),
            r"is damaged .cells\.2\.value is inf, w",
        ),
        (lambda it: it["cells"][2].update(low=0), r"cells\.2 has a perplexity of 0"),
        (lambda it: it["cells"][1]["unit_totals"].pop(), r"cells\.1 has other units than exact"),
        (lambda it: it.update(version="1"), "schema version '1'; this program reads version 1"),
    ],
)
def test_a_record_that_no_measurement_writes_is_refused(edit: Edit, line: str) -> None:
    assert_refused(
        rf"^r\.json.*{line}", Record.from_json, edited(probed().to_json(), edit), "r.json"
    )


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda it: it.update(cells=[]), "its first cell is not of the full cache"),
        (lambda it: it["cells"].pop(0), "its first cell is not of the full cache"),
        (lambda it: it["cells"][0].update(kl=[]), r"cells have \[0, 2\] prompts"),
        (lambda it: it["cells"][1]["kl"].pop(), r"cells have \[1, 2\] prompts"),
        (lambda it: it.update(version="4"), "schema version '4'; this program reads version 1"),
    ],
)
def test_a_cache_record_that_no_measurement_writes_is_refused(edit: Edit, line: str) -> None:
    text = cache_record().to_json()
    assert CacheRecord.from_json(text) == cache_record()
    assert_refused(rf"^r\.json.*{line}", CacheRecord.from_json, edited(text, edit), "r.json")


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda it: it.update(models=[]), "it has no sizes, no methods or no models"),
        (lambda it: it.update(sizes=[]), "it has no sizes, no methods or no models"),
        (lambda it: it["models"][0].update(heads=[]), "tiny has no tokens or no heads"),
        (lambda it: it["models"][0].update(tokens=[]), "tiny has no tokens or no heads"),
        (lambda it: it["models"][0]["heads"][1]["queries"].pop(), "tiny has not a query for ever"),
    ],
)
def test_an_exploration_without_a_part_that_is_shown_is_refused(edit: Edit, line: str) -> None:
    assert_refused(line, Exploration.from_json, edited(exploration().to_json(), edit))
