"""The survey's benchmark runs a pre-norm layer, and leaves out what would take too much."""

from pathlib import Path

import pytest
import torch

from benchmarks import survey
from benchmarks.memory import tensor_peak
from benchmarks.survey import DENSE, METHODS, TRAINING, WIDTH
from tests.refusals import assert_refused
from value_aware_attention import attention
from value_aware_attention.kernels import Elu

LIKE = torch.empty(0)


def test_dense_attention_is_exact_attention(generator: torch.Generator) -> None:
    query, key, value = torch.randn(3, 2, 9, 4, generator=generator)
    method = survey.EagerAttention()
    torch.testing.assert_close(method(query, key, value), attention(query, key, value))
    assert_refused("Elu", method, query, key, value, kernel=Elu())


def test_the_layer_is_pytorchs_pre_norm_encoder_layer() -> None:
    ours = survey.layer_of(METHODS[DENSE], 7)
    theirs = torch.nn.TransformerEncoderLayer(
        WIDTH, survey.HEADS, survey.FEEDFORWARD, dropout=0.0, activation="gelu", batch_first=True,
        norm_first=True,
    )  # fmt: skip
    theirs.self_attn.in_proj_weight = ours.mixer.inward.weight
    theirs.self_attn.in_proj_bias = ours.mixer.inward.bias
    theirs.self_attn.out_proj.load_state_dict(ours.mixer.outward.state_dict())
    theirs.linear1.load_state_dict(ours.feedforward[0].state_dict())
    theirs.linear2.load_state_dict(ours.feedforward[2].state_dict())
    hidden = torch.randn(1, 7, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(hidden), theirs(hidden))


def test_a_forward_pass_keeps_no_graph_and_a_backward_pass_reaches_every_parameter() -> None:
    assert not survey.work_of("forward", METHODS[DENSE], 8, LIKE)().requires_grad
    gradients = survey.work_of(TRAINING, METHODS[DENSE], 8, LIKE)()
    parameters = survey.layer_of(METHODS[DENSE], 8).parameters()
    assert [g.shape for g in gradients] == [(1, 8, WIDTH), *(p.shape for p in parameters)]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_peak_memory_is_the_most_that_tensors_hold_at_once() -> None:
    mib = torch.ones(2**18)

    def work() -> torch.Tensor:
        first = torch.cat([mib, mib])
        second = torch.cat([first, first])
        del first
        return second.add_(1) + second

    assert tensor_peak(work, "cpu") == pytest.approx(8, rel=1e-3)  # 2 + 4, then 4 + 4
    assert tensor_peak(lambda: mib.add_(1), "cpu") < 1e-3


def test_a_method_that_takes_too_much_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = {"length": 10, "peak_mib": 1.0, "time": {"milliseconds": 4000.0}}
    assert survey.too_much(METHODS[DENSE], 20, cell, LIKE) == "expected to take 16 s, more than 15"
    assert survey.too_much(METHODS["nystrom"], 20, cell, LIKE) == ""
    monkeypatch.setattr(survey, "free_gib", lambda like: 0.001)
    assert survey.too_much(METHODS["nystrom"], 20, cell, LIKE) == "expected to need 0 GiB"

    def fails(work: object, device: str) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate")

    monkeypatch.setattr(survey, "tensor_peak", fails)
    cells = list(survey.cells({"attention": (8, 16)}, 0.0))
    assert {cell["left_out"] for cell in cells} == {"CUDA out of memory. Tried to"}
    record = {"cells": cells, "methods": {key: {"multiply_adds": {}} for key in METHODS}}
    assert survey.growth(record)["fused"] == {"counted": None, "time": None, "memory": None}


def test_exponents_are_the_powers_of_costs_and_multiply_adds_of_all_heads_and_queries() -> None:
    assert METHODS["fused"].multiply_adds(10) == 2 * 10 * 10 * WIDTH
    assert METHODS["fourier_mixing"].multiply_adds(10) is None
    assert survey.slope({n: 3 * n**1.5 for n in (2048, 4096, 8192)}) == pytest.approx(1.5)
    assert survey.slope({2048: 1.0, 4096: None}) is None


def test_the_manual_has_the_table_of_the_record() -> None:
    """docs/survey.md repeats the costs of results/benchmarks/survey.md, and their machine."""
    manual, page = (Path(f).read_text() for f in ("docs/survey.md", "results/benchmarks/survey.md"))
    costs = page[page.index("| method") :].partition("\n\n")[0]
    (machine,) = [line for line in page.splitlines() if line.startswith("One pre-norm")]
    hardware = machine.partition("`: ")[2].partition(";")[0]
    assert costs.count("\n") == len(METHODS) + 1 and costs in manual and hardware in manual
