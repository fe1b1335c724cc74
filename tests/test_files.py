"""Files appear whole or not at all; a changed file is refused by its name; no JSON has NaN."""

import errno
import fcntl
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipelines.app import write_json
from tests.refusals import assert_refused
from tests.report.synthetic import probed
from value_aware_attention.files import (
    CHECKSUMS,
    DiskFull,
    check_checksums,
    full_disk_named,
    held,
    load_json,
    new_file,
    new_files,
    new_folder,
    with_checksum,
    without_checksum,
    write_checksums,
    write_text,
)
from value_aware_attention.measurement import Record
from value_aware_attention.measurement.store import RecordCache

FORK = multiprocessing.get_context("fork")


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def killed_at(moment: str, call: Callable[[], None]) -> None:
    """Runs `call` in a process that kills itself before the first rename to a name."""

    def child() -> None:
        rename = os.replace

        def patched(old: Path, new: Path) -> None:
            if Path(new).name == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(old, new)

        os.replace = patched
        call()

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def make_folder(target: Path, text: str) -> None:
    with new_folder(target) as folder:
        (folder / "a.txt").write_text(text)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux alone has /proc")
def test_a_folder_that_takes_no_file_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="/proc"), new_file("/proc/page.html"):
        pass


def test_a_file_that_was_not_finished_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "inner/a.txt"
    write_text(target, "old")
    with pytest.raises(RuntimeError), new_file(target) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old" and names(target.parent) == {"a.txt"}
    (tmp_path / "plain").touch()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_text(target, "old")
    killed_at("a.txt", lambda: write_text(target, "new"))
    assert target.read_text() == "old" and len(names(tmp_path)) == 2
    with new_file(target) as first:
        first.write_text("first")
        write_text(target, "second")
        assert first.exists() and len(names(tmp_path)) == 2
    assert target.read_text() == "first" and names(tmp_path) == {"a.txt"}


@pytest.mark.parametrize("moment", [".data.old", "data"])
def test_a_folder_is_never_lost_however_its_writer_is_killed(tmp_path: Path, moment: str) -> None:
    target = tmp_path / "data"
    make_folder(target, "old")
    killed_at(moment, lambda: make_folder(target, "new"))
    with pytest.raises(RuntimeError), new_folder(target):
        assert (target / "a.txt").read_text() == "old"
        raise RuntimeError
    assert (target / "a.txt").read_text() == "old" and names(tmp_path) == {"data"}
    make_folder(target, "new")
    assert (target / "a.txt").read_text() == "new" and names(tmp_path) == {"data"}


STRANGE: dict[str, Callable[[Path], object]] = {
    "texts": lambda folder: [(folder / f"{i}.txt").write_text("mine") for i in range(2)],
    "a hidden file": lambda folder: (folder / ".notes").write_text("mine"),
    "a link to nothing": lambda folder: (folder / "link").symlink_to("nowhere"),
    "below": lambda folder: [(folder / "b").mkdir(), (folder / "b/c").write_text("mine")],
    "beside ours": lambda folder: [make_folder(folder, "ours"), (folder / "b").write_text("mine")],
    "a card alone": lambda folder: (folder / "README.md").write_text("mine"),
    "sums of nothing": lambda folder: [
        (folder / "SHA256SUMS").write_text(f"{'0' * 64}  other\n"),
        (folder / "b").write_text("mine"),
    ],
}


@pytest.mark.parametrize("fill", STRANGE.values(), ids=STRANGE)
def test_a_folder_with_a_file_of_somebody_else_is_never_replaced(
    tmp_path: Path, fill: Callable[[Path], object]
) -> None:
    target = tmp_path / "data"
    target.mkdir()
    fill(target)
    before = sorted(target.rglob("*"))
    refused = pytest.raises(ValueError, match=rf"^{target} holds .*, which no SHA256SUMS there")
    with refused, new_folder(target):
        raise AssertionError("nothing is done before")
    assert sorted(target.rglob("*")) == before and names(tmp_path) == {"data"}


def test_an_empty_folder_and_one_of_ours_with_a_card_are_replaced(tmp_path: Path) -> None:
    target = tmp_path / "data"
    (target / "empty").mkdir(parents=True)
    make_folder(target, "first")
    (target / "README.md").write_text("a card that somebody has edited")
    make_folder(target, "second")
    assert names(target) == {"SHA256SUMS", "a.txt"}


def test_a_link_to_a_folder_on_another_disk_stays_a_link(tmp_path: Path) -> None:
    disk, target = tmp_path / "disk", tmp_path / "data"
    make_folder(disk, "old")
    target.symlink_to(disk)
    make_folder(target, "new")
    assert target.is_symlink() and (disk / "a.txt").read_text() == "new"


def test_a_file_in_the_place_of_a_folder_stays(tmp_path: Path) -> None:
    target = tmp_path / "a.csv"
    target.write_text("old")
    with pytest.raises(NotADirectoryError, match=r"a\.csv is a file"), new_folder(target):
        pass
    assert target.read_text() == "old"


@pytest.mark.parametrize("write", [new_folder, lambda path: new_files(path, last="")])
def test_the_second_at_one_folder_is_refused_at_once_by_name(
    tmp_path: Path, write: Callable
) -> None:
    target = tmp_path / "tokens"
    with write(target) as folder:
        (folder / "a").write_text("first")
        refused = pytest.raises(ValueError, match=f"^{target} belongs to a run that is still going")
        with refused, write(target):
            pass
    assert (target / "a").read_text() == "first" and names(tmp_path) == {"tokens"}


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    def child() -> None:
        with held(tmp_path / "a"):
            os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    assert names(tmp_path) == {".a.lock"}
    with held(tmp_path / "a"):
        pass
    assert not names(tmp_path)


def test_a_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_over = tmp_path / ".a.txt.0.partial"
    left_over.touch()

    def without_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    write_text(tmp_path / "a.txt", "new")
    make_folder(tmp_path / "data", "new")
    assert names(tmp_path) == {"a.txt", "data", left_over.name}  # it may be somebody's


def arrow(file: Path) -> None:
    from datasets import Dataset

    def rows() -> Iterator[dict]:
        for _ in range(30):
            yield {"text": "x" * 100_000}

    Dataset.from_generator(rows, cache_dir=str(file))


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda file: file.write_text("x" * 2**21),
    "torch": lambda file: torch.save(torch.zeros(2**20), file),
    "safetensors": lambda file: save_file({"x": torch.zeros(2**20)}, file),
    "arrow": arrow,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_lack_of_room_is_named_whichever_library_found_it_and_the_old_files_stay(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    make_folder(tmp_path / "data", "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        line = rf" in {tmp_path} \([\d,]+ bytes are free\)$"
        with pytest.raises(DiskFull, match=line), new_folder(tmp_path / "data") as folder:
            write(folder / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == {"data"} and names(tmp_path / "data") == {"SHA256SUMS", "a.txt"}


def test_a_full_disk_is_named_and_another_error_is_none(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=f"^no space left in {tmp_path}"), full_disk_named(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(RuntimeError, match="size"), full_disk_named(tmp_path):
        torch.ones(2) @ torch.ones(3)


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
        assert_refused(
            f"^{file} has changed since it was written: do it", check_checksums, path, "do it"
        )
    file.unlink()
    assert_refused(f"^{file} is missing: make it again", check_checksums, tmp_path)
    (tmp_path / CHECKSUMS).write_text("")
    assert_refused(f"^{tmp_path / CHECKSUMS} is damaged", check_checksums, tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("../../etc/passwd", "line 2 names ../../etc/passwd, which lies outside of its folder"),
        ("/etc/passwd", "line 2 names /etc/passwd, which lies outside of its folder"),
        ("a/../../b", "line 2 names a/../../b, which lies outside"),
        ("", "line 2 is no sha256 with a name"),
    ],
)
def test_a_list_names_files_of_its_own_folder_only(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "a").touch()
    write_checksums(tmp_path)
    with (tmp_path / CHECKSUMS).open("a") as file:
        file.write(f"{'0' * 64}  {line}\n")
    assert_refused(
        f"^{tmp_path / CHECKSUMS} is damaged .{re.escape(words)}", check_checksums, tmp_path
    )


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[:-9],
    "empty": lambda text: "",
    "another value": lambda text: text.replace("1.25", "1.75"),
    "of before checksums": lambda text: '{"value": 1.25}',
    "another list": lambda text: "[1]",
    "bytes of no text": lambda text: "\udcff",
    "list": lambda text: "[]",
    "no number": lambda text: '{"value": NaN}',
    "null": lambda text: "null",
    "number": lambda text: "3",
    "object": lambda text: "{}",
    "unclosed": lambda text: '{"value": 1',
    "zeros": lambda text: "\0\0",
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
    file.write_bytes(damage(whole).encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert cache.get({"r": 1}, lambda: record) == record
    (line,) = caplog.messages
    assert str(file) in line and "computed again" in line
    assert file.read_text() == whole


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"a": NaN}', '{"b": [-Infinity]}', "\ud800"]
)
def test_json_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert_refused(rf"^{file} is damaged \(.*\): run it$", load_json, file, "b", remedy="run it")


def test_a_cell_under_the_name_of_another_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RecordCache(tmp_path, {})
    for r in (1, 2):
        cache.get({"r": r}, lambda r=r: {"r": r})
    first, other = tmp_path.iterdir()
    other.write_bytes(first.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert [cache.get({"r": r}, lambda r=r: {"r": r}) for r in (1, 2)] == [{"r": 1}, {"r": 2}]
    assert len(caplog.messages) == 1 and "has changed" in caplog.messages[0]


CONTENT = {"b": [1, 0.1, None], "a": {"10": "text", "9": True}}


@pytest.mark.parametrize("indent", [None, 1])
def test_what_was_written_is_read_and_its_text_stays(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps(CONTENT, indent=indent) + "\n"
    summed = with_checksum(text)
    assert summed.startswith(text.rstrip("\n}")) and summed.endswith("}\n")
    assert summed.count("\n") == text.count("\n") + (indent is not None)
    assert without_checksum(CONTENT) == CONTENT
    file = tmp_path / "a.json"
    for layout in (text, summed, json.dumps(json.loads(summed), indent=3, sort_keys=True)):
        file.write_text(layout)
        assert load_json(file) == CONTENT


def test_a_record_with_another_digit_is_refused_and_its_version_is_said_first() -> None:
    record = probed()
    text = with_checksum(record.to_json())
    assert Record.from_json(text) == Record.from_json(record.to_json()) == record
    assert_refused(
        r"^x is damaged .it has changed since",
        Record.from_json,
        text.replace('"length": ', '"length": 1'),
        "x",
    )
    assert_refused(
        "schema version 9", Record.from_json, text.replace('"version": 1', '"version": 9')
    )


NOT_FINITE = (math.nan, math.inf, -math.inf)


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
    broken = {"cells": [{"value": 1.0}, {"value": 2.0, "layers": (0.5, number)}]}
    line = rf"^cells\.1\.layers\.1 is {number}, which JSON"
    assert_refused(line, cache.get, {"a": 1}, lambda: broken)
    assert not (tmp_path / "cells").exists()
    assert cache.get({"a": 1}, lambda: {"b": [0.0, "NaN"]}) == {"b": [0.0, "NaN"]}
