"""The survey's benchmark as an app: tiny, in a temporary folder."""

import json
from pathlib import Path

import pytest
import torch

from pipelines.app import composed, plain
from tests.apps import refusal, run_app
from value_aware_attention.measurement.store import RecordCache
from value_aware_study.benchmarking.measurement import Benchmark
from value_aware_study.benchmarking.passes import Setting, Subject

ROOT = Path(__file__).parents[1]
KEPT = {"eager", "sliding_window", "reformer"}
pytestmark = pytest.mark.filterwarnings("ignore")


def command(*overrides: str) -> str:
    """Names the app with three of its methods."""
    methods = composed("benchmark", []).benchmark.methods
    fewer = [f"~benchmark.methods.{name}" for name in methods if name not in KEPT]
    return " ".join(["benchmark", *fewer, *overrides])


@pytest.mark.parametrize("length", [16, 128])
def test_every_configured_method_runs(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    cfg = composed("benchmark", ["scale=smoke"]).benchmark
    subjects = [Subject(name, method) for name, method in plain(cfg.methods).items()]
    assert len(subjects) >= 20
    setting = Setting.here(plain(cfg.layer))
    Benchmark(subjects, setting, 0.0, 1.0, RecordCache(tmp_path, {})).check(length)


def test_a_run_leaves_a_record_and_resumes(tmp_path: Path) -> None:
    run_app(command(), tmp_path)
    record = json.loads((tmp_path / "outputs/smoke/records/benchmark/benchmark.json").read_text())
    steps = {(c["pass"], c["length"], c["method"]) for c in record["cells"]}
    measured = {("forward", 16), ("forward_backward", 16), ("attention", 16), ("attention", 32)}
    assert steps == {(*step, method) for step in measured for method in KEPT}
    for cell in record["cells"]:
        assert cell["time"]["low"] <= cell["time"]["milliseconds"] <= cell["time"]["high"]
        assert cell["time"]["passes"] >= len(cell["time"]["rounds"]) >= 6 and cell["peak_mib"] >= 0
    assert set(json.loads((tmp_path / "outputs/smoke/metrics/benchmark.json").read_text())) == KEPT
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / ".cache/benchmark").iterdir()}
    next(iter(before)).unlink()  # as if the run had been ended before it
    run_app(command(), tmp_path)
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / ".cache/benchmark").iterdir()}
    assert set(after) == set(before) and sum(after[p] != before[p] for p in before) == 1
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("benchmark.methods.sliding_window.build.r=0", ("r is 0", "at least 1")),
        ("benchmark.methods.reformer.build.r=127", ("127", "even")),
    ],
)
def test_bad_input_ends_with_one_line_and_nothing_written(
    tmp_path: Path, override: str, named: tuple[str, ...]
) -> None:
    message = refusal(command(override), tmp_path)
    assert all(words in message for words in named), message
    assert not (tmp_path / "outputs").exists()


def test_a_gpu_that_is_not_there_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refusal("benchmark benchmark.layer.device=cuda", tmp_path)
    assert "benchmark.layer.device is cuda and there is no GPU" in line
    assert not (tmp_path / "outputs").exists()
