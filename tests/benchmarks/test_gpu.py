"""The script of GPU measurements runs at tiny sizes on the CPU."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import gpu
from pipelines.app.training import StepLogger
from tests.refusals import assert_refused
from value_aware_attention.attention import attention

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "RUN_TIME", 0.001)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", *map(str, arguments)])
    gpu.main()


@pytest.mark.parametrize("kernel", gpu.KERNELS.values(), ids=gpu.KERNELS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_eager_attention_is_the_librarys(kernel: Any, is_causal: bool) -> None:
    query, key, value = gpu.gaussian((3, 2, 9, 4), "cpu", torch.float32)
    eager = gpu.Eager()(query, key, value, kernel=kernel, is_causal=is_causal)
    exact = attention(query, key, value, kernel=kernel, is_causal=is_causal)
    torch.testing.assert_close(eager, exact)


def test_training_steps_have_a_speed_and_change_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAK_FLOPS", "2e12")
    rows = list(gpu.training("cpu", True))
    assert [(row["kernel"], row["attention"]) for row in rows] == [
        (kernel, variant) for kernel in gpu.KERNELS for variant in ("not compiled", "eager")
    ]
    for row in rows:
        assert row["tokens/s"] == pytest.approx(1000 * 2 * 32 / row["ms"], rel=0.01)
        assert row["MFU"] == pytest.approx(row["TFLOP/s"] / 2)
    monkeypatch.delenv("PEAK_FLOPS")
    assert gpu.peak_operations("cpu") is None


def test_every_model_of_the_scale_takes_its_steps_in_the_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("PEAK_FLOPS", "2e12")
    rows = list(gpu.steps("cpu", True))
    assert [row["option"] for row in rows] == [
        *(f"kernel={kernel}" for kernel in gpu.KERNELS),
        *(f"length={length}" for length in ("short", "long")),
    ]
    for row in rows:
        assert row["tokens/s"] > 0 and 0 < row["MFU"] < 1 and row["peak MiB"] is None


def test_the_first_steps_which_compile_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        for speed in (1.0, 10.0, 20.0, 60.0):
            StepLogger.log_metrics(Mock(), {"train/tokens_per_second": speed})
            StepLogger.log_metrics(Mock(), {"evaluation/loss": speed})

    monkeypatch.setattr(gpu.train_causal, "main", main)
    row = gpu.trained(gpu.train_causal, [], "cpu")
    assert row == {"tokens/s": 20.0, "MFU": None, "peak MiB": None}


def test_the_losses_are_timed() -> None:
    rows = list(gpu.loss("cpu", True))
    assert [row["loss"] for row in rows][-2:] == ["ours", "ours, compiled"]
    assert all(row["ms"] > 0 for row in rows)


def test_out_of_memory_leaves_a_row_without_numbers() -> None:
    work = Mock(side_effect=torch.OutOfMemoryError)
    assert gpu.measured(work, "cpu") == {"ms": None, "rounds": None, "peak MiB": None}
    assert set(gpu.speed(None, 1, 1.0, None, 1.0).values()) == {None}


def test_a_part_is_a_process_and_the_file_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    common = ("--quick", "--device", "cpu", "--folder", tmp_path)
    call(monkeypatch, "--parts", "solver", *common)
    file = tmp_path / "gpu.json"
    elsewhere = file.read_text().replace(gpu.header("gpu")["source"], "older")
    file.write_text(elsewhere)
    assert_refused(
        r"^error: incomplete: patterns;",
        call,
        monkeypatch,
        "--parts",
        "patterns",
        "--minutes",
        0,
        *common,
        error=SystemExit,
    )
    parts = json.loads(file.read_text())["parts"]
    errors = {row["r"]: row["relative output error"] for row in parts["solver"]["rows"]}
    assert errors[4] > 0.1 > 1e-6 > errors[65]
    assert parts["solver"]["stopped"] is None
    assert parts["patterns"]["rows"] == []
    assert parts["patterns"]["stopped"] == "stopped after 0 minutes"
    assert parts["solver"]["source"] == "older" != parts["patterns"]["source"]
    assert re.search(r"\(gpu\.md\) +\| of older code", (tmp_path / "README.md").read_text())
    text = (tmp_path / "gpu.md").read_text()
    assert "no number means anything" in text and "Incomplete: stopped after 0" in text


def test_a_trial_leaves_the_published_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "run_part", lambda *_: {"rows": [], "stopped": None})
    call(monkeypatch, "--quick", "--device", "cpu")
    assert not list(tmp_path.iterdir())
    call(monkeypatch, "--device", "cpu")
    assert (tmp_path / gpu.FOLDER / "gpu.json").exists()


def test_rows_are_kept_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(device: str, quick: bool) -> gpu.Rows:
        yield {"ms": 1.0}
        raise RuntimeError("the device is gone")

    monkeypatch.setitem(gpu.PARTS, "solver", breaks)
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(RuntimeError, match="gone"):
        call(monkeypatch, "--quick", "--device", "cpu", "--parts", "solver", "--rows", rows)
    assert json.loads(rows.read_text()) == {"ms": 1.0}


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(r"^error: no CUDA device here; --quick", call, monkeypatch, error=SystemExit)
