"""The source hash of a number covers all modules that compute it; progress is lines or a bar."""

import io
import sys
from pathlib import Path

import pytest

from tests.refusals import assert_refused
from value_aware_attention.approximations import Exact, OptimalValueAware
from value_aware_attention.measurement.run_on import Progress
from value_aware_attention.measurement.store import import_closure, source_hash


def closure_of(method: type) -> set[str]:
    names = import_closure(method.__module__)
    return {name.removeprefix("value_aware_attention.") for name in names}


def test_a_closure_has_what_a_method_runs_and_no_other_method() -> None:
    exact = closure_of(Exact)
    assert {"approximations.approximation", "attention", "error", "kernels"} <= exact
    assert "approximations.lsh" not in exact and "approximations" not in exact
    assert "approximations.closest_combination.compiled" in closure_of(OptimalValueAware)


def test_a_closure_follows_names_that_a_face_offers_lazily() -> None:
    closure = import_closure("benchmarks.decoding")
    rooms = {"caches.refit", "hugging_face.traits", "decoding.after_prefix", "decoding.padding"}
    rooms |= {"decoding.filling", "decoding.kept_layer"}
    assert {f"value_aware_attention.{name}" for name in rooms} <= closure.keys()


def test_the_hash_changes_with_what_is_imported_and_with_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "__init__": "from measured_here.method import method\n",
        "main": "from measured_here import method\n",
        "method": "def method():\n    from measured_here.inner import deep\n",
        "inner": "deep = 1\n",
        "other": "",
    }
    package = tmp_path / "measured_here"
    package.mkdir()
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def found() -> str:
        source_hash.cache_clear()
        return source_hash("measured_here.main", packages=("measured_here",))

    before = found()
    (package / "other.py").write_text("changed = True\n")
    (package / "inner.py").write_text('"""Said."""\n\ndeep = 1  # so\n"""Of the constant"""\n')
    assert found() == before
    (package / "inner.py").write_text("deep = 2\n")
    after = found()
    assert after != before
    (package / "solver.cpp").write_text("// compiled beside it")
    assert found() != after
    assert "measured_here" not in sys.modules  # nothing was imported
    guard = "if typing.TYPE_CHECKING:\n    from measured_here import other\n"
    (package / "inner.py").write_text(f"import typing\n{guard}")
    closure = import_closure("measured_here.main", packages=("measured_here",))
    assert "measured_here.inner" in closure and "measured_here.other" not in closure


def test_a_module_without_source_is_refused() -> None:
    line = "the module is 'nothing_here'; it must have a file"
    assert_refused(line, import_closure, "nothing_here")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO, steps: int, total: float) -> str:
    with Progress(total=total, file=file, leave=False) as progress:
        for step in range(steps):
            progress.set_postfix_str(f"part {step}")
            progress.update(total / steps)
    return file.getvalue()


@pytest.mark.parametrize(("steps", "lines"), [(100, 10), (10, 10), (3, 3), (1, 1)])
def test_a_file_has_a_line_for_each_tenth(steps: int, lines: int) -> None:
    written = shown(io.StringIO(), steps, total=7.0).splitlines()
    assert len(written) == lines and "\r" not in "".join(written)
    assert written[-1] == f"100% measured, 00:00 left; part {steps - 1}"


def test_a_terminal_has_a_bar() -> None:
    assert "\r" in shown(Terminal(), 3, total=3) and "measured" not in shown(Terminal(), 3, total=3)
