"""The suite of kills finds one small stage right, and calls wrong outcomes wrong."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from checks.kills import suite
from checks.kills.killing import killed, kills, torn, wrong_end
from checks.kills.stages import STAGES, Ended, Undisturbed, difference, tree, undisturbed

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
