"""A result says which code it measured, and the overview whether that is still the present one."""

import json
from importlib import import_module
from pathlib import Path

import pytest

import benchmarks
from benchmarks.record import header, overview, setting, source_of, write

FILES = sorted(Path(benchmarks.__path__[0]).glob("[a-z]*.py"))
RUN_ON = {"hardware": "none", "threads": 1, "versions": {"torch": "0"}}


def rows(text: str) -> dict[str, str]:
    """Name -> row of the overview's table."""
    lines = [line for line in text.splitlines() if line.startswith("| [")]
    return {line[3 : line.index("]")]: line for line in lines}


def test_a_result_is_of_older_code_once_its_hash_differs(tmp_path: Path) -> None:
    for name in ("peers", "adapter"):
        write(name, header(name), f"# {name}", tmp_path)
    assert all("| current" in row for row in rows(overview(tmp_path)).values())
    changed = json.loads((tmp_path / "peers.json").read_text()) | {"source": "0" * 64}
    (tmp_path / "peers.json").write_text(json.dumps(changed))
    found = rows(overview(tmp_path))
    assert "| of older code |" in found["peers"] and "| current" in found["adapter"]
    assert "python -m benchmarks.peers" in found["peers"] and changed["date"] in found["peers"]


def test_a_result_without_a_hash_is_of_older_code(tmp_path: Path) -> None:
    (tmp_path / "patterns.json").write_text("{}")
    assert "| of older code |" in rows(overview(tmp_path))["patterns"]


def test_the_overview_is_written_with_every_result(tmp_path: Path) -> None:
    write("peers", header("peers"), "the page", tmp_path)
    assert (tmp_path / "README.md").read_text() == overview(tmp_path)
    assert (tmp_path / "peers.md").read_text() == "the page"


def test_every_benchmark_has_a_hash_of_its_own() -> None:
    names = ("peers", "adapter", "patterns", "training_step", "tokenization", "gpu")
    assert len({source_of(name) for name in names}) == len(names)


def test_the_setting_names_machine_command_and_code() -> None:
    record = {"date": "2000-01-01", "command": "c", "source": "abcdef0123456789", "run_on": RUN_ON}
    text = setting(record)
    assert all(word in text for word in ("none, 1 threads; torch 0", "2000-01-01", "abcdef012345;"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_benchmark_imports_what_there_is(file: Path) -> None:
    import_module(f"benchmarks.{file.stem}")
