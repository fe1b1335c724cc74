"""What has changed since it was written is named; what is damaged is named by its reader."""

import logging
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from value_aware_attention.measurement.record_cache import RecordCache
from value_aware_attention.storage import CHECKSUMS, check_checksums, read_json, write_checksums


def test_a_changed_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    file, other = tmp_path / "8/source/train.npy", tmp_path / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"tokens")
    other.write_text("{}")
    (tmp_path / "README.md").write_text("a card")
    write_checksums(tmp_path)
    subprocess.run(["sha256sum", "--quiet", "-c", CHECKSUMS], cwd=tmp_path, check=True)
    (tmp_path / "README.md").write_text("a better card")
    (tmp_path / "more").write_text("somebody's own")
    for path in (tmp_path, file.parent, file, other):
        check_checksums(path)
    file.write_bytes(b"tokenz")
    os.utime(file)
    check_checksums(other)
    for path in (tmp_path, file.parent, file):
        with pytest.raises(ValueError, match=f"^{file} has changed since it was written: do it"):
            check_checksums(path, "do it")
    file.unlink()
    with pytest.raises(ValueError, match=f"^{file} is missing: make it again"):
        check_checksums(tmp_path)
    (tmp_path / CHECKSUMS).write_text("")
    with pytest.raises(ValueError, match=f"^{tmp_path / CHECKSUMS} is damaged"):
        check_checksums(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("../../etc/passwd", "line 2 names ../../etc/passwd, which lies outside of its folder"),
        ("/etc/passwd", "line 2 names /etc/passwd, which lies outside of its folder"),
        ("a/../../b", "line 2 names a/../../b, which lies outside"),
        ("", "line 2 is no sha256 with a name"),
    ],
)
def test_a_list_names_files_of_its_own_folder_only(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a").touch()
    write_checksums(tmp_path)
    with (tmp_path / CHECKSUMS).open("a") as file:
        file.write(f"{'0' * 64}  {line}\n")
    with pytest.raises(ValueError, match=f"^{tmp_path / CHECKSUMS} is damaged .{re.escape(said)}"):
        check_checksums(tmp_path)


def test_a_folder_that_other_people_made_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    check_checksums(tmp_path)


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[:-9],
    "empty": lambda text: "",
    "another value": lambda text: text.replace("1.25", "1.75"),
    "of before checksums": lambda text: '{"value": 1.25}',
    "list": lambda text: "[]",
    "null": lambda text: "null",
    "object": lambda text: "{}",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_cell_that_is_not_as_it_was_written_is_computed_again(
    tmp_path: Path, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    cache = RecordCache(tmp_path, {})
    record = {"value": 1.25, "parts": [1, None]}
    assert cache.get({"r": 1}, lambda: record) == record
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    assert cache.get({"r": 1}, dict) == record
    file.write_text(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert cache.get({"r": 1}, lambda: record) == record
    (line,) = caplog.messages
    assert str(file) in line and "computed again" in line
    assert file.read_text() == whole


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"a": NaN}', "\ud800"])
def test_json_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=rf"^{file} is damaged \(.*\): run it$") as error:
        read_json(file, "b", remedy="run it")
    assert "\n" not in str(error.value)


def test_a_cell_under_the_name_of_another_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RecordCache(tmp_path, {})
    for r in (1, 2):
        cache.get({"r": r}, lambda r=r: {"r": r})
    one, other = tmp_path.iterdir()
    aside = one.rename(tmp_path / "aside")
    other.rename(one)
    aside.rename(other)
    with caplog.at_level(logging.WARNING):
        assert [cache.get({"r": r}, lambda r=r: {"r": r}) for r in (1, 2)] == [{"r": 1}, {"r": 2}]
    assert len(caplog.messages) == 2 and "has changed" in caplog.messages[0]
