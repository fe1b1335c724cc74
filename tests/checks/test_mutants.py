"""Mutants change one place each, and files name tests to kill them; killed stages are whole."""

import ast
import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from checks import mutants
from checks.kills import suite
from checks.kills.killing import killed, kills, torn, wrong_end
from checks.kills.stages import STAGES, Ended, Undisturbed, difference, tree, undisturbed

SOURCE = '''"""Text of 1 module."""
__all__ = ["f"]


def f(x: int | None = 0, *, largest=-1) -> float:
    """Text."""
    if x is None:
        raise ValueError(f"x is {x + 1}; {1 < 2}")
    x += 2
    x.add_(y)
    return -x.clamp_min(y).sum(dim=z) if not x < y else torch.where(x, a, b)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes the text above as a file of the sources."""
    monkeypatch.setattr(mutants, "SOURCES", tmp_path)
    (tmp_path / "f.py").write_text(SOURCE)
    return "f.py"


def test_every_kind_of_change_is_made_and_none_to_texts_and_annotations(file: str) -> None:
    found = {(one.line, one.before, one.after) for one in mutants.mutants(file)}
    returned = "-x.clamp_min(y).sum(dim=z)"
    assert found == {
        *((5, "0", "1"), (5, "1", "2")),
        *((7, "x is None", "x is not None"), (7, "x is None", "not (x is None)")),
        *((9, "x += 2", "x -= 2"), (9, "2", "3"), (10, "x.add_(y)", "pass")),
        (11, returned, returned[1:]),
        (11, returned[1:], "x.clamp_min(y).sum()"),
        (11, "x.clamp_min(y).sum", "x.clamp_min(y).mean"),
        (11, "x.clamp_min", "x.clamp_max"),
        (11, "x.clamp_min(y)", "x"),
        *((11, "not x < y", "x < y"), (11, "x < y", "x <= y"), (11, "x < y", "x >= y")),
        (11, "torch.where(x, a, b)", "torch.where(x, b, a)"),
        (
            11,
            f"{returned} if not x < y else torch.where(x, a, b)",
            f"torch.where(x, a, b) if not x < y else {returned}",
        ),
    }


def test_a_mutant_differs_from_its_file_by_its_change_alone(file: str) -> None:
    for one in mutants.mutants(file):
        changed = one.source().decode()
        ast.parse(changed)
        lines = zip(SOURCE.splitlines(), changed.splitlines(), strict=True)
        assert [n for n, (old, new) in enumerate(lines, 1) if old != new] == [one.line]


def test_names_tell_mutants_apart_and_do_not_move_with_lines(file: str) -> None:
    before = [one.name for one in mutants.mutants(file)]
    assert len(set(before)) == len(before)
    path = mutants.SOURCES / file
    path.write_text(path.read_text().replace("__all__", "\n\n__all__"))
    assert [one.name for one in mutants.mutants(file)] == before


def test_a_sample_is_the_same_each_time_and_part_of_a_larger_one() -> None:
    few, many = mutants.sample(20), mutants.sample(60)
    assert few == many[:20] and len({one.file for one in many}) > 10


def test_every_file_has_tests_that_exist_and_every_explained_mutant_is_one() -> None:
    every = mutants.sample(10**9)
    for one in {one.file for one in every}:
        assert all(Path("tests", test).exists() for test in mutants.tests_of(one))
    assert set(mutants.TABLE["explained"]) <= {one.name for one in every}


def test_the_last_outcome_counts_and_the_first_is_remembered(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.jsonl"
    runs = [("a", ""), ("b", "first"), ("c", ""), ("c", "later")]
    lines = (json.dumps({"name": name, "killed_by": killer}) for name, killer in runs)
    outcomes.write_text("\n".join(lines))
    found = [mutants.outcome(name, some) for name, some in mutants.known(outcomes).items()]
    assert [one["killed_by"] for one in found] == ["", "first", "later"]
    assert [one["survived_at_first"] for one in found] == [True, False, True]


STAGE = "train_masked"


@pytest.mark.slow
def test_a_stage_that_is_killed_or_asked_to_end_is_made_whole_by_the_same_command(
    tmp_path: Path,
) -> None:
    run = undisturbed(tmp_path, ["corpus", "tokens", STAGE])
    assert not killed(run, STAGE, signal.SIGKILL, 0.7, over=True).wrong
    assert not killed(run, STAGE, signal.SIGTERM, 0.5, over=False).wrong


def test_every_stage_is_killed_alike_from_one_seed(tmp_path: Path) -> None:
    nothing = Undisturbed(tmp_path, tmp_path, {})
    first, other = (
        [case.args[1:] for case in kills(nothing, suite.numbers(0), suite.COUNT)] for _ in range(2)
    )
    assert first == other
    tried = Counter(arguments[0] for arguments in first if arguments[0] in STAGES)
    assert tried.keys() == STAGES.keys()
    assert min(tried.values()) >= 2 and tried.total() == suite.COUNT


def test_what_lies_there_is_compared_by_name_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "outputs/a").write_text("a")
    whole = tree(tmp_path)
    assert set(whole) == {"outputs", "outputs/a"} and not difference(whole, whole)
    (tmp_path / "outputs/.a.partial").write_text("")
    assert difference(tree(tmp_path), whole) == "left behind: outputs/.a.partial"
    assert not torn(tree(tmp_path), whole)
    (tmp_path / "outputs/a").write_text("b")
    assert torn(tree(tmp_path), whole) == "half-written after the signal: outputs/a"
    (tmp_path / "outputs/.a.partial").unlink()
    assert difference(tree(tmp_path), whole) == "other bytes: outputs/a"
    assert difference({}, whole) == "missing: outputs, outputs/a"


def test_an_end_by_the_signal_or_a_success_is_right_and_every_other_is_none() -> None:
    for code in (0, -signal.SIGKILL, 128 + signal.SIGKILL):
        assert not wrong_end(Ended(code, "", 1.0), signal.SIGKILL)
    for code in (1, None, -signal.SIGTERM):
        ended = Ended(code, "Traceback (most recent call last)\nKeyError: 1\n", 1.0)
        line = f"exit code {code}, a traceback: KeyError: 1"
        assert wrong_end(ended, signal.SIGKILL) == line
