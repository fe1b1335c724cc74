"""Values that nothing can be trained with are refused by their key before any work."""

from pathlib import Path

import numpy as np
import pytest

from tests.apps import refusal
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("masked.block=7", ("masked.block is 7; ", f"was made with {LENGTH}")),
        (
            "masked.fraction=0.0001",
            ("no masked token in 3 held-out sequences; masked.fraction is 0.0001",),
        ),
    ],
)
def test_what_the_tokens_cannot_give_is_refused(
    root: Path, given: str, said: tuple[str, ...]
) -> None:
    line = refusal(f"train_masked length=short {given}", root)
    assert all(words in line for words in said)
    assert not (root / ".cache").exists() and not (root / "outputs/smoke/metrics").exists()
