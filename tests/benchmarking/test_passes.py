"""The benchmark times a pre-norm layer's passes, with arguments that follow the length."""

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.benchmark import Timer

from tests.refusals import assert_refused
from value_aware_attention import attention
from value_aware_attention.approximations import Exact, Nystrom, SlidingWindow
from value_aware_attention.kernels import Elu
from value_aware_attention.measurement.store import RecordCache
from value_aware_study.benchmarking import measurement
from value_aware_study.benchmarking.measurement import ROUNDS, Benchmark, in_turn, peak_mib, summary
from value_aware_study.benchmarking.passes import PASSES, EagerAttention, Setting, Subject, layer_of

SETTING = Setting(16, 2, 32, 1, "cpu", "float32", 1, 0)


def subject(method: type, by_length: dict[str, Any] | None = None, **arguments: object) -> Subject:
    target = {"_target_": f"{method.__module__}.{method.__name__}", **arguments}
    return Subject(method.__name__, {"build": target, "by_length": by_length or {}})


def benchmark(subjects: Iterable[Subject], folder: Path, slowest: float = 1.0) -> Benchmark:
    return Benchmark(list(subjects), SETTING, 0.01, slowest, RecordCache(folder, {"machine": "a"}))


def test_eager_attention_is_exact_attention(generator: torch.Generator) -> None:
    query, key, value = torch.randn(3, 2, 9, 4, generator=generator)
    output = EagerAttention()(query, key, value)
    torch.testing.assert_close(output, attention(query, key, value))
    assert_refused("Elu", EagerAttention(), query, key, value, kernel=Elu())


def test_layer_is_pytorchs_pre_norm_encoder_layer() -> None:
    ours = layer_of(subject(Exact), 7, SETTING)
    theirs = torch.nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    mixer = ours.mixer
    theirs.self_attn.in_proj_weight = mixer.projections.weight
    theirs.self_attn.in_proj_bias = mixer.projections.bias
    theirs.self_attn.out_proj.load_state_dict(mixer.output.state_dict())
    theirs.linear1.load_state_dict(ours.feedforward[0].state_dict())
    theirs.linear2.load_state_dict(ours.feedforward[2].state_dict())
    x = SETTING.random(1, 7, 16)
    torch.testing.assert_close(ours(x), theirs(x))


def test_forward_keeps_no_graph_and_backward_reaches_every_parameter() -> None:
    assert not PASSES["forward"](subject(Exact), 8, SETTING)().requires_grad
    gradients = PASSES["forward_backward"](subject(Exact), 8, SETTING)()
    parameters = list(layer_of(subject(Exact), 8, SETTING).parameters())
    assert [g.shape for g in gradients] == [(1, 8, 16), *(p.shape for p in parameters)]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_arguments_follow_the_length() -> None:
    window = subject(SlidingWindow, {"r": [1, 0.5]})
    assert window.arguments(256) == {"r": 16} and window.module(256).r == 16
    capped = subject(Nystrom, {"landmarks": [1, 1, 64]})
    assert [capped.arguments(n)["landmarks"] for n in (16, 64, 512)] == [16, 64, 64]


def test_multiply_adds_are_of_all_heads_and_queries() -> None:
    assert subject(Exact).multiply_adds(10, SETTING) == 2 * 10 * 10 * 16
    assert subject(torch.nn.Identity).multiply_adds(10, SETTING) is None


def test_peak_memory_is_the_most_that_tensors_hold_at_once() -> None:
    x = torch.ones(2**18)  # a MiB

    def work() -> torch.Tensor:
        first = torch.cat([x, x])
        second = torch.cat([first, first])
        del first
        return second.add_(1) + second

    assert peak_mib(work, "cpu") == pytest.approx(8, rel=1e-3)  # 2 + 4, then 4 + 4
    assert peak_mib(lambda: x.add_(1), "cpu") < 1e-3


def test_every_round_times_all_in_turn_and_a_summary_has_each_rounds_median() -> None:
    order: list[str] = []

    def noted(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    timers = {name: Timer("work()", globals={"work": noted(name)}) for name in "ab"}
    turns = in_turn(timers, 0.006)
    assert "".join(name for name, _ in groupby(order)) == ROUNDS * "ab"
    cell = summary(turns["a"])
    assert cell["low"] <= cell["milliseconds"] <= cell["high"] and len(cell["rounds"]) == ROUNDS
    assert cell["passes"] >= ROUNDS


def test_measurements_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on measures only what is missing: a pass at a length."""
    lengths = {"attention": [8], "forward": [8, 16]}
    measured: list[int] = []

    def interrupted(timers: dict[str, Timer], seconds: float) -> dict[str, Any]:
        measured.append(len(timers))
        if len(measured) == 2:
            raise KeyboardInterrupt
        return in_turn(timers, seconds)

    monkeypatch.setattr(measurement, "in_turn", interrupted)
    narrow = benchmark([subject(Exact), subject(SlidingWindow, r=4)], tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(narrow.cells(lengths))
    cells = list(narrow.cells(lengths))
    assert measured == [2] * 4  # the one of the attention was kept, the one that ended was not
    assert len(cells) == 6 and all(cell["time"]["passes"] >= ROUNDS for cell in cells)
    assert list(narrow.cells(lengths)) == cells and len(measured) == 4
    list(benchmark([subject(Exact), subject(SlidingWindow, r=5)], tmp_path).cells(lengths))
    assert len(measured) == 7


def test_what_would_take_too_long_or_need_too_much_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = [subject(Exact), subject(SlidingWindow, r=4)]
    cells = list(benchmark(subjects, tmp_path, slowest=1e-9).cells({"forward": [16, 32, 64]}))
    assert [cell["length"] for cell in cells if "time" in cell] == [16, 16]
    reasons = [cell["left_out"] for cell in cells if cell["length"] > 16]
    assert len(reasons) == 4 and all("slowest = 1e-09" in reason for reason in reasons)
    monkeypatch.setattr(measurement, "memory_mib", lambda device: 1e-6)
    *_, last = benchmark(subjects, tmp_path).cells({"forward": [16, 32]})
    assert last["left_out"] == "expected to need up to 0 GiB of memory"


def test_a_pass_that_runs_out_of_memory_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(work: object, device: str) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate")

    monkeypatch.setattr(measurement, "peak_mib", fails)
    (cell,) = benchmark([subject(Exact)], tmp_path).cells({"attention": [8]})
    assert cell["left_out"] == "CUDA out of memory. Tried to" and "time" not in cell


def test_a_method_that_cannot_run_is_named_before_any_work(tmp_path: Path) -> None:
    wrong = benchmark([subject(Exact), subject(Nystrom, landmarks=17)], tmp_path)
    assert_refused(r"Nystrom at length 16: landmarks", next, wrong.cells({"forward": [16]}))
    assert_refused("divisible by heads = 3", Setting, 16, 3, 32, 1, "cpu", "float32", 1, 0)
