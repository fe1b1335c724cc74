"""The benchmark times a pre-norm layer's passes, with arguments that follow the length."""

import os
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from value_aware_attention import attention
from value_aware_attention.approximations import Exact, Nystrom, SlidingWindow, Strided
from value_aware_attention.kernels import Elu
from value_aware_attention.measurement.store import RecordCache
from value_aware_study.benchmarking import process
from value_aware_study.benchmarking.measurement import Plan, check, measure
from value_aware_study.benchmarking.passes import PASSES, EagerAttention, Setting, Subject, layer_of
from value_aware_study.benchmarking.process import in_fresh_process, peak_memory, times

SETTING = Setting(16, 2, 32, 1, "cpu", "float32", 1, 0)


def subject(method: type, **arguments: object) -> Subject:
    return Subject(method.__name__, partial(method, **arguments))


def test_eager_attention_is_exact_attention(generator: torch.Generator) -> None:
    query, key, value = torch.randn(3, 2, 9, 4, generator=generator)
    output = EagerAttention()(query, key, value)
    torch.testing.assert_close(output, attention(query, key, value))
    with pytest.raises(ValueError, match="Elu"):
        EagerAttention()(query, key, value, kernel=Elu())


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
    work = PASSES["forward"](subject(Exact), 8, SETTING)
    assert not work().requires_grad
    layers: list[torch.nn.Module] = []

    def build() -> torch.nn.Module:
        layers.append(Exact())
        return layers[-1]

    backward = PASSES["forward_backward"](Subject("exact", build), 8, SETTING)
    backward()
    layer = backward.__closure__
    assert layer is not None
    module = next(c.cell_contents for c in layer if isinstance(c.cell_contents, torch.nn.Module))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_arguments_follow_the_length() -> None:
    strided = Subject("s", partial(Strided), {"stride": (1, 0.5)})
    assert strided.arguments(256) == {"stride": 16}
    assert strided.module(256).stride == 16
    capped = Subject("n", partial(Nystrom), {"landmarks": (1, 1, 64)})
    assert [capped.arguments(n)["landmarks"] for n in (16, 64, 512)] == [16, 64, 64]


def test_multiply_adds_are_of_all_heads_and_queries() -> None:
    assert subject(Exact).multiply_adds(10, SETTING) == 2 * 10 * 10 * 16
    assert Subject("identity", torch.nn.Identity).multiply_adds(10, SETTING) is None


class Doubled(torch.nn.Module):
    """Allocates its output and nothing else; a matrix product may take scratch space beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)


@pytest.mark.slow
def test_peak_memory_is_what_a_pass_allocates() -> None:
    setting = Setting(2000, 1, 8, 1, "cpu", "float32", 1, 0)
    doubling = Subject("double", Doubled, mixes_hidden=True)
    found, seconds = in_fresh_process(peak_memory, "attention", doubling, 2000, 2, setting)
    assert pytest.approx(found, rel=0.15) == 4 * 2000 * 4000 / 2**20
    assert seconds > 0


def test_times_run_every_method_at_every_length_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow while of the machine thus falls on all methods and lengths."""
    order: list[tuple[str, int]] = []

    def noted(name: str, subject: Subject, length: int, setting: Setting) -> Callable[[], None]:
        def work() -> None:
            order.append((subject.name, length))
            time.sleep(process.TURN)

        return work

    monkeypatch.setattr(process, "prepare", noted)
    subjects = [subject(Exact), subject(SlidingWindow, r=4)]
    runs = [(method, length) for method in subjects for length in (8, 16)]
    spent = times("attention", runs, 0.0, SETTING)
    once = [(method.name, length) for method, length in runs]
    assert order == [*once, *(process.LEAST // 2 * [*once[::-1], *once])]
    assert [len(rounds) for rounds in spent] == [process.LEAST] * 4


def test_a_short_pass_is_repeated_in_its_turn() -> None:
    (spent,) = times("attention", [(subject(Exact), 8)], 0.0, SETTING)
    assert all(len(turn) > 1 and sum(turn) >= process.TURN for turn in spent)
    assert all(seconds > 0 for turn in spent for seconds in turn)


def test_a_summary_has_every_rounds_median_for_ratios_within_rounds() -> None:
    found = process.summary([[0.001, 0.003, 0.002], [0.004]])
    assert found["rounds"] == [2.0, 4.0] and found["passes"] == 4 and found["milliseconds"] == 2.5


def test_a_process_passes_errors_on() -> None:
    with pytest.raises(ValueError, match="r is 0"):
        in_fresh_process(SlidingWindow, 0)
    with pytest.raises(MemoryError, match="exit code"):
        in_fresh_process(os._exit, 9)


def test_measurements_are_found_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on measures only missing cells."""
    from value_aware_study.benchmarking import measurement

    made: list[str] = []

    def fake(function, *given):
        made.append(function.__name__)
        if len(made) == 4:
            raise KeyboardInterrupt
        if function is peak_memory:
            return 2.0, 1e-3
        return [[[1e-3], [2e-3], [3e-3]]] * len(given[1])

    monkeypatch.setattr(measurement, "in_fresh_process", fake)
    subjects = [subject(Exact), subject(SlidingWindow, r=4)]
    plan = Plan({"attention": [8], "forward": [8, 16]}, seconds=0.1, slowest=1.0)
    cache = RecordCache(tmp_path, {"machine": "a"})
    with pytest.raises(KeyboardInterrupt):
        measure(subjects, plan, SETTING, cache)
    assert len(made) == 4
    cells = measure(subjects, plan, SETTING, cache)
    assert len(made) == 9  # two of memory and one of times were kept; the one that ended was not
    assert [cell["time"]["milliseconds"] for cell in cells] == [2.0] * 6
    assert measure(subjects, plan, SETTING, cache) == cells and len(made) == 9
    wider = [subject(Exact), subject(SlidingWindow, r=5)]
    measure(wider, plan, SETTING, cache)
    assert len(made) == 14  # the other window's memory thrice, and the times of both passes


def test_what_would_take_too_long_is_left_out_with_its_reason(tmp_path, monkeypatch) -> None:
    from value_aware_study.benchmarking import measurement

    def fake(function, *given):
        if function is peak_memory:
            return 1.0, 0.5 if given[1].name == "Exact" else 0.1
        return [[[0.1]] * 3] * len(given[1])

    monkeypatch.setattr(measurement, "in_fresh_process", fake)
    plan = Plan({"forward": [16, 32, 64]}, seconds=0.1, slowest=1.0)
    subjects = [subject(Exact), subject(SlidingWindow, r=4)]
    cells = measure(subjects, plan, SETTING, RecordCache(tmp_path, {}))
    kept = [(c["method"], c["length"]) for c in cells if "time" in c]
    assert kept == [("Exact", 16), *(("SlidingWindow", n) for n in (16, 32, 64))]
    left = [cell for cell in cells if "left_out" in cell]
    assert [cell["length"] for cell in left] == [32, 64]
    assert all("2 s" in cell["left_out"] and "slowest = 1" in cell["left_out"] for cell in left)


@pytest.mark.parametrize(
    ("lengths", "named"),
    [({"backward": [8]}, "backward"), ({"forward": [0]}, "0"), ({"forward": []}, "no lengths")],
)
def test_bad_plans_are_refused(lengths: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Plan(lengths, seconds=1.0, slowest=1.0)


def test_a_method_that_cannot_run_is_named_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"Nystrom at length 16: landmarks"):
        check([subject(Exact), subject(Nystrom, landmarks=17)], 16, SETTING)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="divisible by heads = 3"):
        Setting(16, 3, 32, 1, "cpu", "float32", 1, 0)
    with pytest.raises(ValueError, match="float33"):
        Setting(16, 2, 32, 1, "cpu", "float33", 1, 0)
