"""Processes that train are killed, and started again."""

from hashlib import sha256
from pathlib import Path

import pytest
import torch

from tests.refusals import assert_refused
from tests.training.processes import exit_code, start, train_app, write_tokens
from tests.training.test_fit import run
from tests.training.tiny import causal_module

pytestmark = pytest.mark.slow

CHECKPOINTS = ".cache/checkpoints/causal_exponential"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the hash of the weights of a run that nobody killed."""
    root = tmp_path_factory.mktemp("straight")
    write_tokens(root)
    assert exit_code(start(train_app, root)) == 0
    return weights(root)


def weights(root: Path) -> str:
    file = root / "outputs/smoke/models/causal_exponential/model.safetensors"
    return sha256(file.read_bytes()).hexdigest()


def saved_steps(root: Path) -> dict[str, int]:
    files = (root / CHECKPOINTS).glob("*.ckpt")
    return {file.stem: torch.load(file, weights_only=True)["global_step"] for file in files}


def test_a_process_killed_at_any_moment_ends_with_the_same_weights(
    tmp_path: Path, straight: str
) -> None:
    write_tokens(tmp_path)
    for dies, at, left in (
        ("while_training", 1, {}),
        ("while_training", 5, {"last": 4, "previous": 2}),
        ("while_writing", 6, {"last": 4, "previous": 2}),
        ("between_names", 8, {"previous": 6}),
        ("while_training", 11, {"last": 10, "previous": 8}),
    ):
        assert exit_code(start(train_app, tmp_path, dies, at)) == -9
        assert saved_steps(tmp_path) == left
        assert not (tmp_path / "outputs/smoke/models").exists()
    assert exit_code(start(train_app, tmp_path)) == 0
    assert weights(tmp_path) == straight
    assert not list((tmp_path / CHECKPOINTS).iterdir())


def test_a_process_asked_to_end_saves_the_step_it_is_at(tmp_path: Path, straight: str) -> None:
    write_tokens(tmp_path)
    # the second is asked before an evaluation, which it does not finish: that step is taken again
    for at, saved in ((2, 3), (4, 4), (8, 9)):
        assert exit_code(start(train_app, tmp_path, "when_asked", at)) == 143
        assert saved_steps(tmp_path)["last"] == saved
    assert exit_code(start(train_app, tmp_path)) == 0
    assert weights(tmp_path) == straight


def cut(content: bytes) -> bytes:
    return content[:-100]


def flip(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b""])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_continued(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    assert_refused("killed", run, causal_module(), tmp_path, breaks_at=8, error=KeyError)
    last = tmp_path / "last.ckpt"
    last.write_bytes(damage(last.read_bytes()))
    curve, _ = run(causal_module(), tmp_path / "straight")
    again, read = run(causal_module(), tmp_path)
    assert read == list(range(3, 13)) and again == curve
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/last.ckpt is damaged: the run continues from the one before it, if any"
    ]


def test_two_damaged_checkpoints_leave_the_start(tmp_path: Path) -> None:
    assert_refused("killed", run, causal_module(), tmp_path, breaks_at=8, error=KeyError)
    for file in tmp_path.glob("*.ckpt"):
        file.write_bytes(cut(file.read_bytes()))
    _, read = run(causal_module(), tmp_path)
    assert read == list(range(13))
