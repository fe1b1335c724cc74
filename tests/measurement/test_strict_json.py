"""NaN and infinity reach no JSON file, and no damaged file is taken for a record."""

import json
import math
from pathlib import Path

import pytest

from pipelines.app import write_json
from tests.refusals import assert_refused
from value_aware_attention.files import from_json, to_json
from value_aware_attention.measurement.store import RecordCache

NOT_FINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("number", NOT_FINITE)
def test_the_keys_of_a_number_that_is_not_finite_are_named(number: float) -> None:
    content = {"cells": [{"value": 1.0}, {"value": 2.0, "layers": (0.5, number)}]}
    assert_refused(rf"^cells\.1\.layers\.1 is {number}, which JSON", to_json, content)
    assert json.loads(to_json({"a": [1, 2.5, None, "NaN"]})) == {"a": [1, 2.5, None, "NaN"]}


@pytest.mark.parametrize("text", ["NaN", '{"a": [Infinity]}', "-Infinity", "{", ""])
def test_only_json_is_read(text: str) -> None:
    assert_refused(r".", from_json, text)


@pytest.mark.parametrize("number", NOT_FINITE)
def test_a_good_file_outlives_content_that_is_not_json(tmp_path: Path, number: float) -> None:
    file = tmp_path / "record.json"
    write_json(file, {"value": 1.0})
    before = file.read_bytes()
    assert_refused(r"record\.json was not written: value is", write_json, file, {"value": number})
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("number", NOT_FINITE)
def test_a_record_that_is_not_finite_is_never_kept(tmp_path: Path, number: float) -> None:
    cache = RecordCache(tmp_path / "cells", {})
    assert_refused(r"^errors\.1 is", cache.get, {"a": 1}, lambda: {"errors": [0.0, number]})
    assert not (tmp_path / "cells").exists()
    assert cache.get({"a": 1}, lambda: {"errors": [0.0, 1.0]}) == {"errors": [0.0, 1.0]}


@pytest.mark.parametrize(
    "broken", ["", "{}", "[1]", '{"value": 1', '{"value": NaN}', "\x00\x00", "null", "3", "\udcff"]
)
def test_a_broken_record_is_dropped_and_computed_again(tmp_path: Path, broken: str) -> None:
    cache = RecordCache(tmp_path, {})
    cache.get({"a": 1}, lambda: {"value": 1})
    (file,) = tmp_path.iterdir()
    file.write_bytes(broken.encode(errors="surrogateescape"))  # \udcff is a byte of no text
    assert cache.get({"a": 1}, lambda: {"value": 2}) == {"value": 2}
    assert cache.get({"a": 1}, lambda: pytest.fail("computed again")) == {"value": 2}
