"""Records depend on no number of processes and no folder, and on threads in last digits alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.apps import run_app, write_run
from tests.training.processes import ROOT, VOCABULARY, exit_code, free_port, start, write_tokens
from value_aware_attention import distributed
from value_aware_attention.files import without_checksum
from value_aware_attention.measurement.store import RecordCache
from value_aware_attention.models import build_roberta, save_masked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LENGTH = 16
# Three batches of causal windows and two of sequences, the last of each short.
CAUSAL = ("kernel=elu", "evaluation.causal_units=5", "evaluation.batch_size=2")
MASKED = ("model=masked", "length=short", "evaluation.masked_units.short=3")
GRID = (
    *("grid.keys=[1]", "grid.value_aware_keys=[4,65]", "grid.window_keys=[4]"),
    *("grid.baseline_keys=[4]", "grid.lsh_keys=[8]", "grid.lsh_rounds=[1]"),
    *("grid.orf_features=[16]", "grid.random_seeds=[0]"),
)


@given(items=st.lists(st.integers(), max_size=30), count=st.integers(2, 8))
def test_every_item_is_computed_by_one_process_and_comes_back_in_order(
    items: list[int], count: int
) -> None:
    dealt = [items[rank::count] for rank in range(count)]
    for rank in range(count):

        def gather(shares: list[list[int]], mine: list[int], rank: int = rank) -> None:
            assert mine == dealt[rank]
            shares[:] = dealt

        with (
            patch.object(distributed, "processes", lambda: count),
            patch("torch.distributed.get_rank", lambda rank=rank: rank),
            patch("torch.distributed.all_gather_object", gather),
        ):
            assert distributed.shared_map(lambda item: item, items) == items


def together(count: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Starts `count` processes in the environment of torchrun and returns their exit codes."""
    port = free_port()
    ranks = [start(as_process, rank, count, port, function, arguments) for rank in range(count)]
    return [exit_code(process) for process in ranks]


def as_process(
    rank: int, count: int, port: int, function: Callable[..., None], arguments: tuple
) -> None:
    torch.set_num_threads(1)
    os.chdir(ROOT)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    function(*arguments)


def write_masked(root: Path, name: str = "short", length: int = LENGTH) -> None:
    """Writes random outputs of the stages `tokens` and `train_masked`, for three sequences."""
    folder = root / "outputs/smoke/tokens/masked"
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    names = [*special, *(f"w{i}" for i in range(VOCABULARY - len(special)))]
    words = WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), mask_token="<mask>", bos_token="<s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / f"{length}/random").mkdir(parents=True)
    rows = np.random.default_rng(0).integers(5, VOCABULARY, size=(3, length), dtype=np.uint16)
    for split in ("train", "evaluation"):
        np.save(folder / f"{length}/random/{split}.npy", rows)
    torch.manual_seed(0)
    model = build_roberta(
        vocabulary_size=VOCABULARY, layers=2, width=64, heads=1, feedforward=64, length=length,
        block=16, dropout=0.0,
    )  # fmt: skip
    save_masked(model, root / f"outputs/smoke/models/masked_{name}")
    tokenizer.save_pretrained(root / f"outputs/smoke/models/masked_{name}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path)
    write_masked(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "values"), [("causal_elu", CAUSAL), ("masked_short", MASKED)])
def test_two_processes_write_the_record_of_one(
    root: Path, name: str, values: tuple[str, ...]
) -> None:
    alone = ("paths.records=" + str(root / "alone"), "paths.cache=" + str(root / "cache"))
    run_app(" ".join(["evaluate", *values, *GRID, *alone]), root)
    assert together(2, run_app, " ".join(["evaluate", *values, *GRID]), root) == [0, 0]
    single, shared = (
        without_checksum(json.loads((root / folder / f"{name}.json").read_text()))
        for folder in ("alone", "outputs/smoke/records")
    )
    for record_of in (lambda record: record, lambda record: record["control"]):
        ran = record_of(shared)["run_on"], record_of(single)["run_on"]
        assert [on.pop("processes") for on in ran] == [2, 1]
    assert shared == single
    assert len(single["cells"][0]["unit_totals"]) == (5 if name == "causal_elu" else 3)
    assert any(cell["error"]["largest_support"] for cell in single["cells"])
    # computed by both, kept by one: as many files as with one process, none half-written
    cells = [sorted(p.name for p in (root / f).glob("*")) for f in ("cache/cells", ".cache/cells")]
    assert cells[0] == cells[1]


def test_more_processes_than_batches_still_agree_on_what_was_computed_before(root: Path) -> None:
    values = ("kernel=elu", "approximation=optimal_v_aware", "approximation.r=4")
    values += ("evaluation.causal_units=2",)  # the first window is shorter: a batch each
    assert together(3, run_app, " ".join(["evaluate", *values]), root) == [0, 0, 0]
    files = {path: path.stat().st_mtime_ns for path in (root / ".cache/cells").glob("*")}
    assert len(files) == 4  # exact attention and the cell: end metric, output error
    assert together(2, run_app, " ".join(["evaluate", *values]), root) == [0, 0]
    assert {path: path.stat().st_mtime_ns for path in (root / ".cache/cells").glob("*")} == files


def finds_what_the_first_has(folder: Path) -> None:
    """Reads a cache in a folder of its own, like a process that does not see a new file yet."""
    cache = RecordCache(folder / os.environ["RANK"], {})
    with distributed.started_processes():
        assert cache.get({"a": 1}, lambda: pytest.fail("computed again")) == {"found": 1}
        # what is new is computed by both, and kept by the first
        ranks = cache.get(
            {"b": 2}, lambda: distributed.shared_map(lambda _: os.environ["RANK"], [0, 1])
        )
        assert ranks == ["0", "1"]


def test_all_processes_do_what_the_first_one_finds_in_the_cache(tmp_path: Path) -> None:
    RecordCache(tmp_path / "0", {}).get({"a": 1}, lambda: {"found": 1})
    assert together(2, finds_what_the_first_has, tmp_path) == [0, 0]
    assert len(list((tmp_path / "0").iterdir())) == 2 and not (tmp_path / "1").exists()


def fails_in_the_second(log: str) -> None:
    """Fails in the second process, while the first one waits for its number."""

    distributed.SECONDS_TO_SPEAK = 1.0  # nobody ends the processes here

    def compute(item: int) -> int:
        if item == 1:
            raise ValueError("the second item is bad")
        return item

    try:
        with distributed.started_processes():
            distributed.shared_map(compute, [0, 1])
    except ValueError as error:
        with open(log, "a") as file:
            print(f"error: {error}", file=file)
        raise SystemExit(1) from None


def test_what_one_process_refuses_ends_all_and_is_said_once(tmp_path: Path) -> None:
    log = tmp_path / "said"
    assert together(2, fails_in_the_second, str(log)) == [1, 1]
    assert log.read_text() == "error: the second item is bad\n"


def test_torchrun_says_in_one_line_what_every_process_refuses(root: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    values = ["-m", "kernel=elu", "scale=smoke", "logger=none", f"paths.root={root}"]
    run = subprocess.run(
        [*command, "-m", "pipelines.evaluate", *values],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": "src"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 1
    lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "2 processes would run the whole sweep" in lines[0]
    assert "Error executing job" not in run.stderr


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
