"""Recorded values depend on no folder, and on memory and threads in last digits alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.apps import run_app
from tests.training.processes import write_tokens
from value_aware_attention.files import without_checksum

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of libraries

LAST_DIGITS = 1e-4
"""Relative tolerance of a recorded value.

fp32 has 6e-8 in a sum; a layer sums hundreds of them, a loss is as precise as its logits, and an
output error is a difference of outputs, which costs it about three digits where the error is a
thousandth of the output.
"""
ROUNDING = 1e-9
"""Relative error of an output below which it is rounding alone."""
OF_A_NORM = 1e-6
"""Tolerance of a row's largest error, a norm whose square has the tolerance above."""
OF_A_LOSS = 1e-4
"""Tolerance of a difference of two perplexities near 280: 280 times that of two losses near 4 to 6,
whose last digits in fp32 are up to 5e-7 each, fewer in their mean."""
LEAST = {".difference": OF_A_LOSS, ".largest_error": OF_A_NORM}
CUT = "evaluation.batch_size=1 evaluation.memory_gib=1e-4"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_tokens(folder)
    run_app("train_causal kernel=elu", folder)
    return folder


def record(folder: Path, name: str, options: str = "") -> dict[str, Any]:
    """Returns the record of an evaluation that finds no cell computed before."""
    run_app(f"evaluate kernel=elu {options} paths.cache={folder}/{name}", folder)
    content = json.loads((folder / "outputs/smoke/records/causal_elu.json").read_text())
    return without_checksum(content)  # which follows the last digits


def values(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a record but the description of its machine."""
    if isinstance(content, (dict, list)):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, leaf in pairs:
            if key != "run_on":
                yield from values(leaf, f"{path}.{key}")
    else:
        yield path, content


def test_batches_memory_and_threads_change_last_digits_alone(trained: Path) -> None:
    before = dict(values(record(trained, "before")))
    torch.set_num_threads(2)
    try:
        after = dict(values(record(trained, "after", CUT)))
    finally:
        torch.set_num_threads(1)
    assert before.keys() == after.keys() and len(before) > 100
    for path, value in before.items():
        if isinstance(value, float):
            least = next((LEAST[ending] for ending in LEAST if ending in path), ROUNDING)
            assert after[path] == pytest.approx(value, rel=LAST_DIGITS, abs=least), path
        else:
            assert after[path] == value, path


def test_two_folders_hold_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path)
    run_app("train_causal kernel=elu", tmp_path)
    for folder in (trained, tmp_path):
        run_app(f"evaluate kernel=elu paths.cache={folder}/same", folder)
    for name in ("models/causal_elu/model.safetensors", "records/causal_elu.json"):
        files = [folder / "outputs/smoke" / name for folder in (trained, tmp_path)]
        assert files[0].read_bytes() == files[1].read_bytes()
