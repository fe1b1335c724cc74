"""The library mixes no devices: on the pretend one it gives the CPU's results.

The first tests show that the pretend device refuses what CUDA refuses.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods import HEAD_DIM, KERNELS, KEYS, METHODS
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.caches.methods import METHODS as CACHE_METHODS
from tests.hugging_face.models import batch, sharp
from tests.pretend_device import DEVICE, PretendDevice, PretendTensor
from tests.refusals import assert_refused
from tests.tasks.test_tasks import small_causal, small_masked
from tests.training.tiny import causal_batch, causal_module, masked_batch, masked_module
from value_aware_attention import attention, error, measurement
from value_aware_attention.approximations import (
    LSH,
    Exact,
    LeaveOneOutKeys,
    LinearAttention,
    Linformer,
    Nystrom,
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
    SparseApproximation,
    Strided,
    ValueAwareKeysAttentionWeights,
    chunked,
)
from value_aware_attention.approximations.closest_combination import SEARCHES, compiled
from value_aware_attention.attention import attention_weights
from value_aware_attention.caches import AfterPrefix
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.measurement.layers import layer_errors, skewness, skewness_gap
from value_aware_attention.measurement.measure import weights_hash
from value_aware_attention.measurement.task import Task, jsonable
from value_aware_attention.models.mixing import FourierMixing, LinearMixing, RandomMixing
from value_aware_study.evaluation.budgets import effective_weights
from value_aware_study.training.plan import one_step

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
exact = import_module("value_aware_attention.attention")  # the package has a function of this name
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(autouse=True)
def _what_both_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects the torch solver on both devices."""
    monkeypatch.setattr(compiled, "library", lambda: None)


@pytest.fixture
def device() -> Iterator[PretendDevice]:
    with PretendDevice() as entered:
        yield entered


def moved(arguments: Any) -> Any:
    """Copies the tensors and modules in `arguments` to the device."""
    return tree_map(
        lambda x: deepcopy(x).to(DEVICE) if isinstance(x, Tensor | nn.Module) else x, arguments
    )


def same_on_both(work: Callable[..., Any], *arguments: Any) -> PretendDevice:
    """Runs work(*given) on the CPU and on the device, and compares the results."""
    expected = work(*arguments)
    with PretendDevice() as device:
        result = work(*moved(arguments))
        waits = device.waits.copy()
        assert all(
            isinstance(x, PretendTensor) for x in tree_leaves(result) if isinstance(x, Tensor)
        )
        result = tree_map_only(Tensor, Tensor.cpu, result)
    torch.testing.assert_close(result, expected, **CLOSE)
    device.waits = waits
    return device


MIXED = (RuntimeError, "same device")
TO_HOST = (TypeError, "copy the tensor to host memory first")
REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], object], type[Exception], str]] = {
    "sum": (lambda ours, cpu: ours + cpu, *MIXED),
    "a number on the CPU": (lambda ours, cpu: cpu.sum().add_(ours.sum()), *MIXED),
    "product": (lambda ours, cpu: cpu @ ours, *MIXED),
    "cat": (lambda ours, cpu: torch.cat([ours, cpu]), *MIXED),
    "where": (lambda ours, cpu: torch.where(cpu > 0, ours, 0.0), *MIXED),
    "gather": (lambda ours, cpu: ours.gather(1, cpu.long()), *MIXED),
    "index_select": (lambda ours, cpu: ours.index_select(0, cpu[0].long()), *MIXED),
    "embedding": (lambda ours, cpu: nn.functional.embedding(cpu.long(), ours), *MIXED),
    "scatter": (lambda ours, cpu: ours.scatter_add_(0, cpu.long(), ours), *MIXED),
    "put": (lambda ours, cpu: ours.index_put_((cpu[0].long(),), cpu), *MIXED),
    "module": (lambda ours, cpu: nn.Linear(3, 2)(ours), *MIXED),
    "numpy": (lambda ours, cpu: ours.numpy(), *TO_HOST),
    "asarray": (lambda ours, cpu: np.asarray(ours), *TO_HOST),
    "generator": (
        lambda ours, cpu: torch.rand(3, device=ours.device, generator=torch.Generator()),
        *(RuntimeError, "generator"),
    ),
    "index": (lambda ours, cpu: cpu[ours.long()], RuntimeError, "should be either on cpu"),
    "integers": (
        lambda ours, cpu: ours.long() @ ours.long(),
        *(RuntimeError, "not implemented for integers"),
    ),
    "address": (lambda ours, cpu: ours.data_ptr(), RuntimeError, "address"),
}


@pytest.mark.parametrize(("work", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cuda_refuses(
    device: PretendDevice, work: Callable[..., object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        work(torch.zeros(3, 3, device="cuda"), torch.zeros(3, 3))


def test_waits_are_counted(device: PretendDevice) -> None:
    ours = torch.ones(3, device="cuda")
    for waits in (
        ours.sum().item,
        ours.cpu,
        ours.tolist,
        ours.nonzero,
        lambda: bool(ours.any()),
        lambda: ours[ours > 0],
        lambda: torch.equal(ours, ours),
    ):
        before = device.waits.total()
        waits()
        assert device.waits.total() == before + 1


def inputs(length: int = KEYS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, HEAD_DIM, generator=generator) for _ in range(3)]


def masks(any_mask: bool = True, causal: bool = True) -> list[dict[str, Any]]:
    padding = torch.ones(2, 1, 1, KEYS, dtype=torch.bool)
    padding[0, ..., KEYS - 6 :] = False
    padding[1] = False
    options: list[dict[str, Any]] = [{}, {"attn_mask": padding}]
    if any_mask:
        options.append({"attn_mask": torch.eye(KEYS, dtype=torch.bool).logical_not()})
    if causal:
        options.append({"is_causal": True})
    if any_mask and causal:
        options.append({"is_causal": True, "attn_mask": padding})
    return options


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_exact_attention(kernel: Any) -> None:
    def both(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> list[Tensor]:
        leaf = query.detach().clone().requires_grad_()
        output = attention(leaf, key, value, kernel=kernel, **options)
        output.square().sum().backward()
        return [output.detach(), leaf.grad, attention_weights(query, key, kernel=kernel, **options)]

    for options in masks():
        same_on_both(both, *inputs(), options)


def test_a_mask_on_cuda_is_not_for_cudnn(
    device: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    def record(*tensors: Tensor, **options: Any) -> Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return tensors[-1]

    monkeypatch.setitem(vars(exact), "scaled_dot_product_attention", record)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for options in masks():
        attention(*moved(inputs()), **moved(options))
    assert before and allowed == [True, False, False, True, False]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize(
    "name", [name for name in METHODS if not name.endswith(("_default", "_best"))]
)
def test_every_approximation(name: str) -> None:
    method = METHODS[name]
    kernel = KERNELS[method.kernel or "elu"]

    def outputs(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        leaf = value.detach().clone().requires_grad_()
        output = module(query, key, leaf, kernel=kernel, **options)
        output.square().sum().backward()
        results = [output.detach(), leaf.grad]
        if isinstance(module, SparseApproximation):
            with torch.inference_mode(), chunked(16 * 6 * KEYS):
                chosen = module.select(query, key, value, kernel=kernel, **options)
            results += [chosen.dense(KEYS), chosen.error, chosen.support(), chosen.optimal]
        else:
            with torch.inference_mode(), chunked(7 * 6 * KEYS):
                results.append(module(query, key, value, kernel=kernel, **options))
        return results

    cases = masks(method.any_mask, method.causal)
    for options in cases[-1:] if name.startswith("optimal_value_aware") else cases:
        same_on_both(outputs, method.build(), *inputs(), options)
    empty = [x[:0] for x in inputs()]
    same_on_both(lambda module, *qkv: module(*qkv, kernel=kernel).detach(), method.build(), *empty)


@pytest.mark.parametrize(
    "method",
    [SlidingWindow(5), Strided(4), Linformer(6, 0), Nystrom(5, 6), LSH(8, 2, 0), LinearAttention()],
    ids=str,
)
def test_looking_for_nan_makes_nobody_wait(method: nn.Module) -> None:
    """On the device NaN is not looked for, which would be a wait; the output is NaN."""
    query, key, value = inputs()
    value[0, 0, 3] = torch.nan
    with PretendDevice() as device, torch.inference_mode():
        inputs_moved = moved([query, key, value])
        device.waits.clear()
        output = method(*inputs_moved, kernel=KERNELS["elu"])
        assert not device.waits
        assert output[0, 0].cpu().isnan().any() and output[0, 1].cpu().isfinite().all()


@pytest.mark.parametrize("name", CACHE_METHODS)
def test_every_cache_method(name: str) -> None:
    def outputs(module: nn.Module, *tensors: Tensor) -> Tensor:
        with torch.inference_mode():
            return module(*tensors, kernel=KERNELS["exponential"], is_causal=True)

    for observed in ("last", "causal", "noncausal", "hindsight"):
        method = AfterPrefix(
            CACHE_METHODS[name](6), prefix=KEYS // 2, observed=observed, rows=8, sinks=1, recent=2
        )
        same_on_both(outputs, method, *inputs())


@pytest.mark.parametrize("search", SEARCHES)
def test_optimal_paths(search: str) -> None:
    few = [x[:1, :1] for x in inputs()]
    same_on_both(OptimalValueAware(HEAD_DIM + 1, search).path, *few)
    same_on_both(ValueAwareKeysAttentionWeights(4).path, *few)


def test_the_compiled_search_is_only_for_the_cpu(device: PretendDevice) -> None:
    assert_refused(
        r"'compiled' on cuda:0; it needs the CPU",
        OptimalValueAware(3, engine="compiled"),
        *moved(inputs()),
    )


def test_errors() -> None:
    output, exact = inputs()[:2]
    same_on_both(error.relative_output_error, output, exact)
    same_on_both(error.squared_output_error, output, exact)


MIXINGS = {"fourier": FourierMixing, "linear": LinearMixing, "random": RandomMixing}


@pytest.mark.parametrize("made", MIXINGS.values(), ids=MIXINGS)
def test_mixings(made: Any) -> None:
    mixing = made() if made is FourierMixing else made(16, 8, 0)
    same_on_both(lambda module, x: module(x).detach(), mixing, torch.randn(2, 12, 8))


def trained(module: Any, rows: Any) -> list[Tensor]:
    """Returns loss, parameters and totals after two steps of the module's own optimizer."""
    optimizer = module.configure_optimizers()["optimizer"]
    for _ in range(2):
        optimizer.zero_grad()
        loss = module.loss(rows)
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        totals = module.totals(rows)
    return [loss.detach(), *(p.detach() for p in module.parameters()), *totals.values()]


@pytest.mark.parametrize("name", [*KERNELS, "masked"])
def test_training(name: str) -> None:
    if name == "masked":
        same_on_both(trained, masked_module(dropout=0.0), masked_batch(0))
    else:
        same_on_both(trained, causal_module(kernel=KERNELS[name], dropout=0.0), causal_batch(0))


def test_training_with_an_approximation_and_recomputed_layers() -> None:
    module = causal_module(dropout=0.0)
    module.checkpoint_activations()

    def work(module: Any, rows: Tensor) -> list[Tensor]:
        with replace_attention(module.model, SlidingWindow(3)):
            return trained(module, rows)

    same_on_both(work, module, causal_batch(0))


@pytest.mark.parametrize("made", [causal_module, masked_module])
def test_one_step_measures_the_device(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    rows = causal_batch(0) if made is causal_module else masked_batch(0)
    expected = one_step(made(dropout=0.0), rows)["loss"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: asked.append("waited"))
    with PretendDevice():
        step = one_step(made(dropout=0.0).to(DEVICE), moved(rows))
        assert asked == [DEVICE, "waited", "waited"] and step["peak_memory_gib"] == 1
    assert step["loss"] == pytest.approx(expected, rel=1e-4)


TASKS: dict[str, Callable[[Path, str], Task]] = {
    "causal": lambda folder, where: small_causal(folder, 36, 20, 12, where),
    "masked": lambda folder, where: small_masked(folder, 3, where),
}
CELLS = [
    measurement.Setting("optimal_v_oblivious", {"r": 2}, lambda layer: OptimalValueOblivious(2)),
    measurement.Setting("optimal_v_aware", {"r": 1}, lambda layer: OptimalValueAware(1)),
    measurement.Setting("sliding_window", {"r": 3}, lambda layer: SlidingWindow(3)),
]


@pytest.mark.parametrize("name", TASKS)
def test_evaluation(name: str, tmp_path: Path) -> None:
    def record(where: str) -> Any:
        task = TASKS[name](tmp_path, where)
        layers = measurement.LayerOptions(rows=2, search="fast")
        measured = measurement.measure(
            task, CELLS, cache=tmp_path / where, layers=layers, sizes=[1, 4]
        )
        outcome = task.run(None)
        return [
            measured,
            task.layer_calls(),
            outcome.totals.tolist(),
            task.first_tokens(4),
            weights_hash(task.model),
        ]

    measured, calls, *rest = record("cpu")
    with PretendDevice() as device:
        measured_on_device, found_calls, *found_rest = record("cuda:0")
        assert all(call.value.device == DEVICE for call in found_calls)
        layers = layer_numbers(found_calls)
        assert device.waits
    for cell, other in zip(measured_on_device.cells, measured.cells, strict=True):
        assert numbers(asdict(cell)) == pytest.approx(numbers(asdict(other)), rel=1e-3, abs=1e-4)
    assert numbers(found_rest[0]) == pytest.approx(numbers(rest[0]), rel=1e-4)
    assert found_rest[1:] == rest[1:]
    assert layers == pytest.approx(layer_numbers(calls), rel=1e-3, abs=1e-4)


def layer_numbers(calls: Any) -> list[float]:
    """Returns every number that is measured on a layer's own inputs."""
    picture = effective_weights(LeaveOneOutKeys(3), calls[0].unit(0, heads=slice(1), positions=12))
    measured = (
        skewness(calls[0]),
        asdict(skewness_gap(calls[:1], rows=1, search="fast")),
        jsonable(layer_errors(calls[0], rows=1, search="fast")),
    )
    return numbers([*measured, picture.tolist()])


def numbers(record: Any) -> list[float]:
    return [x for x in tree_leaves(record) if isinstance(x, int | float)]


@pytest.mark.parametrize("kind", ["roberta", "llama"])
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_models(kind: str) -> None:
    def work(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        logits = []
        for method in (Exact(), OptimalValueOblivious(3), OptimalValueAware(1)):
            with torch.inference_mode(), replace_attention(model, method):
                logits.append(model(**inputs).logits[inputs["attention_mask"].bool()])
            with torch.inference_mode(), replace_attention(model, method, heads=[0, 2]):
                logits.append(model(**inputs).logits[inputs["attention_mask"].bool()])
        return logits

    same_on_both(work, sharp(kind), batch())


def test_the_search_waits_a_few_times_for_every_key() -> None:
    """Every key that a set grows by costs about 12 waits; masks in place of positions cost 22."""
    few = [x[:1, :1] for x in inputs()]
    for r in (3, 6):
        with PretendDevice() as device, torch.inference_mode():
            inputs_moved = moved(few)
            device.waits.clear()
            OptimalValueAware(r, "fast")(*inputs_moved)
            assert 0 < device.waits.total() <= 12 * r + 12
