"""JSON that holds the sha256 of its content: a changed digit is named, a changed layout is none."""

import json
from pathlib import Path

import pytest

from tests.report.synthetic import probed
from value_aware_attention.measurement import Record
from value_aware_attention.storage import read_json, with_checksum, without_checksum

CONTENT = {"b": [1, 0.1, None], "a": {"10": "text", "9": True}}


@pytest.mark.parametrize("indent", [None, 1])
def test_what_was_written_is_read_and_its_text_stays(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps(CONTENT, indent=indent) + "\n"
    kept = with_checksum(text)
    assert kept.startswith(text.rstrip("\n}")) and kept.endswith("}\n")
    assert kept.count("\n") == text.count("\n") + (indent is not None)
    file = tmp_path / "a.json"
    for given in (text, kept, json.dumps(json.loads(kept), indent=3, sort_keys=True)):
        file.write_text(given)
        assert read_json(file) == CONTENT


@pytest.mark.parametrize("old, new", [("0.1", "0.3"), ("text", "tent"), ("true", "false")])
def test_another_value_is_refused_by_the_files_name(tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(with_checksum(json.dumps(CONTENT)).replace(old, new))
    line = rf"^{file} is damaged .it has changed since it was written.: run it$"
    with pytest.raises(ValueError, match=line):
        read_json(file, remedy="run it")


def test_a_record_with_another_digit_is_refused_and_its_version_is_said_first() -> None:
    record = probed()
    text = with_checksum(record.to_json())
    assert Record.from_json(text) == Record.from_json(record.to_json()) == record
    with pytest.raises(ValueError, match=r"^x is damaged .it has changed since"):
        Record.from_json(text.replace('"length": ', '"length": 1'), "x")
    with pytest.raises(ValueError, match="schema version 9"):
        Record.from_json(text.replace('"version": 1', '"version": 9'))


def test_without_one_all_is_taken_as_it_is() -> None:
    assert without_checksum(CONTENT) == CONTENT
