"""The fault suite finds one small stage right, and calls wrong outcomes wrong."""

import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from checks.faults import damage, suite
from checks.faults.apps import (
    DAMAGED,
    KILLED,
    SKIPPED,
    STAGES,
    Ended,
    FaultCase,
    Trial,
    Undisturbed,
    difference,
    tree,
    undisturbed,
)
from checks.faults.concurrent_starts import two, wrong_ends
from checks.faults.full_disk import BEGUN, OVER, changed, on_small_disk
from checks.faults.kills import killed, torn

STAGE = "train_masked"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("run"), ["corpus", "tokens", STAGE])


TRIALS: dict[str, Callable[[Undisturbed], FaultCase]] = {
    "killed": lambda run: killed(run, STAGE, signal.SIGKILL, 0.7, over=True),
    "two at once": lambda run: two(run, STAGE, 0.0),
    "full disk behind a checkpoint": lambda run: on_small_disk(run, STAGE, BEGUN, 0.5),
}
SLOW: dict[str, Callable[[Undisturbed], FaultCase]] = {
    "asked to end": lambda run: killed(run, STAGE, signal.SIGTERM, 0.5, over=False),
    "full disk": lambda run: on_small_disk(run, STAGE, OVER, 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "trial",
    [
        *(pytest.param(trial, id=name) for name, trial in TRIALS.items()),
        *(pytest.param(trial, id=name, marks=pytest.mark.slow) for name, trial in SLOW.items()),
    ],
)
def test_a_stage_is_right_whatever_happens_to_it(
    run: Undisturbed, trial: Callable[[Undisturbed], FaultCase]
) -> None:
    case = trial(run)
    if case.outcome.startswith(SKIPPED):
        pytest.skip(case.outcome)
    assert not case.wrong


@pytest.mark.parametrize("kind", sorted(set(suite.KINDS) - {DAMAGED}))
def test_a_kind_of_fault_is_tried_at_every_stage_alike_from_one_seed(
    tmp_path: Path, kind: str
) -> None:
    nothing = Undisturbed(tmp_path, tmp_path, {})
    first, other = ([t.args[1:] for t in trials(nothing, kind)] for _ in range(2))
    assert first == other
    tried = Counter(arguments[0] for arguments in first if arguments[0] in STAGES)
    assert tried.keys() == STAGES.keys()
    assert kind != KILLED or (min(tried.values()) >= 2 and tried.total() == suite.KILLS)


def trials(run: Undisturbed, kind: str) -> list[Trial]:
    return suite.KINDS[kind](run, suite.numbers(0, kind))


def test_every_file_that_is_damaged_is_read_by_a_stage() -> None:
    assert {stage for stage, _ in damage.READ.values()} <= set(STAGES)


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


def test_a_refused_run_may_leave_whole_cells_and_nothing_else() -> None:
    earlier = {"outputs": "folder"}
    cells = {".cache": "folder", ".cache/cells": "folder", ".cache/cells/a.json": "1"}
    assert not changed(earlier | cells | {"outputs/smoke/records": "folder"}, earlier)
    for name in (".cache/cells/.a.partial", "outputs/.tokens.partial", "outputs/a.json"):
        assert name in changed(earlier | cells | {name: "1"}, earlier)
    assert "outputs/.a.partial" in changed(earlier | {"outputs/.a.partial": "folder"}, earlier)


def test_one_line_is_a_refusal_and_a_traceback_is_none() -> None:
    line = "error: outputs/smoke/corpus belongs to a run that is still going: wait for it"
    refused, done = Ended(1, f"40%\n{line}\n", 1.0), Ended(0, "", 1.0)
    assert refused.refusal == line and not wrong_ends([refused, done])
    for other in (
        Ended(1, f"Traceback (most recent call last)\n{line}", 1.0),
        Ended(1, f"{line}\n{line}", 1.0),
        Ended(0, line, 1.0),
        Ended(None, line, 1.0),
    ):
        assert other.refusal is None
    assert wrong_ends([refused, refused]).startswith("both failed")
    assert wrong_ends([done, Ended(1, "error: no such file", 1.0)])


def test_a_bit_and_a_cut_change_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(bytes(100))
    damage.flip(file, random.Random(0))
    assert sum(byte.bit_count() for byte in file.read_bytes()) == 1
    damage.cut(file, random.Random(0))
    assert len(file.read_bytes()) < 100
