"""What nothing can be trained with ends with one line that names the key, before any work."""

from pathlib import Path

import numpy as np
import pytest

from tests.test_apps import run_app
from tests.test_distributed import LENGTH, write_masked
from tests.training.processes import write_tokens

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder)
    write_masked(folder)
    rows = folder / f"outputs/smoke/tokens/masked/{LENGTH}/random"
    np.save(rows / "train.npy", np.load(rows / "evaluation.npy"))
    return folder


def refusal(command: str, root: Path) -> str:
    with pytest.raises(SystemExit) as stop:
        run_app(command, root)
    message = str(stop.value)
    assert message.startswith("error: ") and "\n" not in message
    assert not (root / ".cache").exists() and not (root / "outputs/smoke/metrics").exists()
    return message


def test_another_block_than_the_tokens_were_made_with_is_refused(root: Path) -> None:
    message = refusal("train_masked length=short masked.block=7", root)
    assert "masked.block is 7; " in message and f"was made with {LENGTH}" in message


def test_held_out_text_without_a_masked_token_is_refused(root: Path) -> None:
    message = refusal("train_masked length=short masked.fraction=0.0001", root)
    assert "no masked token in 3 held-out sequences; masked.fraction is 0.0001" in message
