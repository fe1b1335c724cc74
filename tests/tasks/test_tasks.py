"""End metrics, cells and skewness agree with brute force."""

import json
import math
import platform
import socket
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recorded import recorded
from tests.refusals import assert_refused
from value_aware_attention import kernels
from value_aware_attention.approximations import (
    LSH,
    Exact,
    Fixed,
    Linformer,
    OptimalValueAware,
    OptimalValueOblivious,
    OrthogonalRandomFeatures,
    RandomKeys,
    SampledKeys,
    SlidingWindow,
    Strided,
    chunked,
    lsh,
    optimal_value_aware,
)
from value_aware_attention.attention import attention, attention_weights
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes, budget
from value_aware_attention.measurement import store
from value_aware_attention.measurement.layers import skewness, skewness_of
from value_aware_attention.measurement.measure import Setting, cell_error, measure, setting_key
from value_aware_attention.measurement.recorded import ExactRows, evenly_spaced
from value_aware_attention.measurement.run_on import cores_of, processor, run_on
from value_aware_attention.measurement.task import Task
from value_aware_attention.models import CausalLanguageModel, build_roberta
from value_aware_attention.records.estimate import ratio_of_sums
from value_aware_study.data.batches import MaskedSequences
from value_aware_study.evaluation.budgets import (
    closest_to_budget,
    cost_in_keys,
    effective_weights,
)
from value_aware_study.evaluation.grid import expand_axes
from value_aware_study.evaluation.texts import _check_fit as check_fit
from value_aware_study.evaluation.texts import causal_task, context_windows, masked_task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def causal(tmp_path: Path) -> Task:
    return small_causal(tmp_path, 90, 20, 12)


def small_causal(folder: Path, size: int, length: int, context: int, device: str = "cpu") -> Task:
    torch.manual_seed(0)
    model = CausalLanguageModel(
        vocabulary_size=50, layers=2, width=16, heads=2, feedforward=32,
        kernel=kernels.Elu(), dropout=0.0,
    )  # fmt: skip
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(50, size=size))
    return causal_task(
        model=model, tokens=folder / "tokens.npy", length=length, context=context, units=None,
        batch_size=3, recorded_units=2, device=device,
    )  # fmt: skip


def one_loss(model: CausalLanguageModel, tokens: torch.Tensor, target: int, first: int) -> float:
    """Returns -log p of the token after position `target`, given the inputs from `first` on."""
    logits = model(tokens[None, max(0, first) : target + 1]).logits[0, -1]
    return -float(logits.log_softmax(-1)[tokens[target + 1]])


@settings(max_examples=20, deadline=None)
@given(size=st.integers(3, 40), length=st.integers(1, 12), data=st.data())
def test_every_target_is_scored_once_from_what_its_window_may_read(
    size: int, length: int, data: st.DataObject
) -> None:
    """Each window's sum is that of single losses, for any length of stream, window and context."""
    length = min(length, size - 1)
    context = data.draw(st.integers(0, length - 1))
    with TemporaryDirectory() as folder, torch.inference_mode():
        task = small_causal(Path(folder), size, length, context)
        tokens = torch.from_numpy(np.load(Path(folder) / "tokens.npy"))
        sums = task.run(lambda layer: Exact())
        scored = length - context
        expected = [
            one_loss(task.model, tokens, target, target // scored * scored - context)
            for target in range(size - 1)
        ]
    windows = [expected[first : first + scored] for first in range(0, size - 1, scored)]
    assert sums.counts.tolist() == list(map(len, windows))
    np.testing.assert_allclose(sums.totals, list(map(sum, windows)), rtol=1e-4)


def small_masked(
    tmp_path: Path, units: int | None, device: str = "cpu", piece: int | None = None
) -> Task:
    torch.manual_seed(0)
    model = build_roberta(
        vocabulary_size=60, layers=2, width=16, heads=2, feedforward=32, length=12, block=12,
        dropout=0.0,
    )  # fmt: skip
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(5, 60, size=(9, 12)))
    sequences = MaskedSequences(
        [tmp_path / "rows.npy"], length=12, mask_token=4, special_tokens=[0, 1, 2, 3, 4],
        vocabulary_size=60, fraction=0.3,
    )  # fmt: skip
    return masked_task(
        model=model, sequences=sequences, seed=1, units=units, batch_size=4, recorded_units=2,
        device=device, piece=piece,
    )  # fmt: skip


def test_evaluation_masks_do_not_depend_on_how_many_sequences_are_read(tmp_path: Path) -> None:
    (all_rows,), (some,) = (small_masked(tmp_path, units).texts for units in (None, 3))
    for row, index in enumerate(evenly_spaced(9, 3)):
        assert torch.equal(all_rows.inputs[index], some.inputs[row])
        assert torch.equal(all_rows.labels[index], some.labels[row])


@pytest.mark.parametrize("piece", [None, 4])
def test_masked_errors_are_those_of_the_full_output_layer_which_may_read_pieces(
    tmp_path: Path, piece: int | None
) -> None:
    (text,), task = small_masked(tmp_path, None).texts, small_masked(tmp_path, None, piece=piece)
    assert torch.equal(task.texts[0].inputs.view(9, 12), text.inputs)
    assert torch.equal(task.texts[0].labels.view(9, 12), text.labels)
    sums = task.run(lambda layer: Exact())
    with torch.no_grad():
        parts = text.inputs.reshape(-1, piece or 12)
        predicted = task.model(parts).logits.argmax(-1).view(9, 12)
    asked = text.labels >= 0
    assert sums.totals.tolist() == ((predicted != text.labels) & asked).sum(1).tolist()
    assert sums.counts.tolist() == asked.sum(1).tolist()
    assert task.length == (piece or 12)


def test_what_does_not_fit_a_task_is_refused(tmp_path: Path) -> None:
    model = small_masked(tmp_path, None).model
    assert_refused("context is 8", list, context_windows(10, 8, 8))
    assert_refused("piece is 5; it must divide", small_masked, tmp_path, None, piece=5)
    assert_refused("vocabulary of 60, the tokens of 61", check_fit, model, 61, 12)
    assert_refused("13 tokens; the model has 12 positions", check_fit, model, 60, 13)


def test_a_cell_is_measured_against_exact_on_the_same_units(causal: Task) -> None:
    setting = Setting("optimal_v_oblivious", {"r": 1}, lambda layer: OptimalValueOblivious(1))
    record = measure(causal, [setting], layers=None)
    exact, cell = record.cells
    sums, whole = causal.run(setting.build), causal.run(lambda layer: Exact())
    assert exact.unit_totals == tuple(whole.totals) and exact.difference == 0
    nats = (sums.totals - whole.totals).sum() / sums.counts.sum()
    assert cell.value == pytest.approx(math.exp(whole.mean() + nats))
    assert cell.count == record.text.targets == 89 and len(cell.unit_totals) == len(whole.totals)
    assert cell.error is not None and cell.error.queries == 2 * 2 * 8
    assert record.text.recorded_units == 2 and record.text.units == len(whole.totals)


BUILD = {
    "oblivious": lambda: OptimalValueOblivious(2),
    "aware": lambda: OptimalValueAware(2),
    "window": lambda: SlidingWindow(3),
    "drawn": lambda: SampledKeys(3, 0),
    "features": lambda: OrthogonalRandomFeatures(16, 0),
}


@pytest.mark.parametrize("name", BUILD)
def test_the_output_error_is_a_ratio_of_sums_with_an_interval_over_units(
    causal: Task, name: str
) -> None:
    """The sums run over every scored query, head and layer; no mean of ratios is taken."""
    calls = causal.layer_calls()
    if name == "features":  # it approximates another kernel
        calls = [replace(call, kernel=kernels.Exponential()) for call in calls]
    error = cell_error(lambda layer: BUILD[name](), [ExactRows.of(call) for call in calls])
    errors, norms, cosines, lengths = [], [], [], []
    with torch.no_grad():
        for call in calls:
            options = {"kernel": call.kernel, "is_causal": True}
            exact = attention(call.query, call.key, call.value, **options)
            output = BUILD[name]()(call.query, call.key, call.value, **options)
            errors.append((exact - output)[:, :, 12:].square().sum(dim=(1, 2, 3)).numpy())
            norms.append(exact[:, :, 12:].square().sum(dim=(1, 2, 3)).numpy())
            scored = output[:, :, 12:].flatten(0, 2), exact[:, :, 12:].flatten(0, 2)
            ours, theirs = (rows.norm(dim=-1) for rows in scored)
            cosines.append(float(((scored[0] * scored[1]).sum(dim=-1) / ours / theirs).mean()))
            lengths.append(float((ours.square().sum() / theirs.square().sum()).sqrt()))
    errors, norms = np.array(errors), np.array(norms)
    np.testing.assert_allclose(error.unit_squared_errors, errors, rtol=1e-3)
    np.testing.assert_allclose(error.unit_squared_norms, norms, rtol=1e-4)
    _, low, high = ratio_of_sums(errors.sum(axis=0), norms.sum(axis=0))
    assert error.relative == pytest.approx(errors.sum() / norms.sum(), rel=1e-3)
    assert error.low == pytest.approx(max(low, 0), rel=1e-2, abs=1e-4)
    assert error.high == pytest.approx(high, rel=1e-2)
    assert error.by_layer == pytest.approx(errors.sum(axis=1) / norms.sum(axis=1), rel=1e-3)
    assert error.cosine_by_layer == pytest.approx(cosines, abs=1e-4)
    assert error.length_by_layer == pytest.approx(lengths, rel=1e-4)
    assert error.cosine == pytest.approx(np.mean(cosines), abs=1e-4)


def test_an_output_that_is_no_number_is_not_an_error_of_zero(causal: Task) -> None:
    layers = [ExactRows.of(call) for call in causal.layer_calls()]
    error = cell_error(lambda layer: NotANumber(), layers)
    assert error.relative is None and error.by_layer == (None, None)
    assert error.cosine is error.relative_length is None
    assert json.dumps(asdict(error), allow_nan=False)


class NotANumber(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: object, value: object, **options: object):
        return torch.full_like(query, torch.nan)


def test_what_a_solver_keeps_is_checked_on_the_recorded_queries(causal: Task) -> None:
    layers = [ExactRows.of(call) for call in causal.layer_calls()]
    error = cell_error(lambda layer: OptimalValueAware(2), layers)
    assert error.largest_support == 2 and 0 < error.largest_error < 1
    assert cell_error(lambda layer: SlidingWindow(2), layers).largest_support is None


def test_recorded_windows_are_spread_over_the_evaluated_ones(causal: Task) -> None:
    causal.recorded_units = 3
    rows = causal.texts[0].inputs
    full = [number for number, row in enumerate(rows) if len(row) == 20]
    recorded = causal.recorded_rows()
    assert recorded == [full[i] for i in evenly_spaced(len(full), 3)] and len(full) < len(rows)
    assert recorded[-1] > full[len(full) // 2]
    assert len(causal.layer_calls()[0].query) == 3
    assert causal.first_tokens(4) == rows[recorded[0]][:4].tolist()


def test_a_batch_in_which_nothing_is_scored_is_read_all_the_same(tmp_path: Path) -> None:
    task = small_masked(tmp_path, None)
    task.texts[0].labels[:4] = -100  # the first batch
    asked: list[int] = []

    class Counted(OptimalValueOblivious):
        def choose(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append(call.query.shape[-2])
            return super().choose(call)

    sums = task.run(lambda layer: Counted(2))
    assert sums.totals[:4].tolist() == sums.counts[:4].tolist() == [0.0] * 4
    assert sums.counts[4:].min() > 0 and min(asked) == 1


@pytest.mark.parametrize("build", [OptimalValueOblivious, OptimalValueAware])
@pytest.mark.parametrize("model", ["causal", "masked"])
def test_the_last_layer_answers_only_for_scored_positions_and_no_score_changes(
    tmp_path: Path, model: str, build: type
) -> None:
    task = small_causal(tmp_path, 90, 20, 12) if model == "causal" else small_masked(tmp_path, None)
    rows = [0, 0]

    class Counted(build):
        def choose(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
            rows[self.layer] += call.query.shape[-2]
            return super().choose(call)

    def method(layer: int) -> torch.nn.Module:
        made = Counted(2)
        made.layer = layer
        return made

    sums = task.run(method)
    assert rows[1] < 0.75 * rows[0]
    # A method that says it cannot answer a query alone gets the whole call.
    whole = task.run(lambda layer: type("Whole", (build,), {"queries_alone": False})(2))
    np.testing.assert_allclose(sums.totals, whole.totals, rtol=1e-4)
    np.testing.assert_array_equal(sums.counts, whole.counts)


def test_axes_expand_to_budgets_that_fit() -> None:
    cells = list(expand_axes({"r": [1, 4, 300, "all"], "seed": [0, 1]}, 64))
    assert cells == [{"r": r, "seed": s} for r in (1, 4, 64) for s in (0, 1)]
    assert list(expand_axes({}, 64)) == [{}]


def source_hash(method: torch.nn.Module) -> list[str]:
    """Returns the source in the key of a method's cell."""
    return setting_key(Setting("", {}, lambda layer: method), 1)["source"]


def test_the_source_hash_is_the_same_after_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_hash(LSH(4, 1, 0))
    left = f"__import_{optimal_value_aware.__name__.replace('.', '_dot_')}"  # as torch.compile does
    monkeypatch.setitem(vars(lsh), left, optimal_value_aware)
    store.source_hash.cache_clear()
    assert source_hash(LSH(4, 1, 0)) == before


def test_a_cached_cell_is_computed_again_when_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting("exact", {}, lambda layer: Exact())
    cache = store.RecordCache(tmp_path, {"checkpoint": "a"})
    key = setting_key(setting, 2)
    assert cache.get(key, lambda: {"n": 1}) == cache.get(key, lambda: {"n": 2}) == {"n": 1}
    assert store.RecordCache(tmp_path, {"checkpoint": "b"}).get(key, lambda: {"n": 3}) == {"n": 3}
    measuring = import_module("value_aware_attention.measurement.measure")
    monkeypatch.setattr(measuring, "source_hash", lambda *modules: "new")
    assert cache.get(setting_key(setting, 2), lambda: {"n": 4}) == {"n": 4}


def test_a_number_is_kept_under_everything_that_decides_it(tmp_path: Path) -> None:
    """Another text, other weights or another setting of one layer give another key."""
    folder = tmp_path / "cache"

    def cells(task: Task, window: int = 2) -> tuple:
        setting = Setting("window", {}, lambda layer: SlidingWindow(2 if layer == 0 else window))
        cache, plain = (
            measure(task, [setting], layers=None, cache=where).cells for where in (folder, None)
        )
        assert cache == plain
        return plain

    first = cells(small_causal(tmp_path, 90, 20, 12))
    longer = small_causal(tmp_path, 99, 20, 12)
    longer.recorded_units = 1
    other = small_causal(tmp_path, 90, 20, 12)
    other.model.layers[0].attention.output.weight.data.mul_(2)
    measured = [first, cells(longer), cells(other), cells(small_causal(tmp_path, 90, 20, 12), 3)]
    assert len({cell[1].value for cell in measured}) == 4


@pytest.mark.parametrize("causal", [False, True])
def test_skewness_does_not_depend_on_the_blocks_it_is_taken_in(causal: bool) -> None:
    tensors = torch.randn(3, 2, 2, 11, 4, generator=torch.Generator().manual_seed(0))
    call = recorded(*tensors, kernels.Elu(), causal, 4)
    weights = attention_weights(*tensors[:2], kernel=kernels.Elu(), is_causal=causal)
    for numbers in (2**24, 3 * 4 * 11, 1):  # all rows, three at a time, one
        with chunked(numbers):
            assert skewness(call) == pytest.approx(skewness_of(weights[:, :, 4:]), rel=1e-5)


def test_skewness_of_known_distributions() -> None:
    key = torch.eye(4)[None, None]
    uniform = recorded(torch.zeros(1, 1, 3, 4), key, key, kernels.Exponential(), False, 0)
    assert skewness(uniform) == pytest.approx(
        {"largest_weight": 0.25, "rows_over_half": 0, "effective_keys": 4, "keys_for_90_percent": 4}
    )
    peaked = recorded(100 * key[:, :, :3], key, key, kernels.Exponential(), False, 1)
    assert skewness(peaked) == pytest.approx(
        {"largest_weight": 1, "rows_over_half": 1, "effective_keys": 1, "keys_for_90_percent": 1}
    )


LENGTH, WIDTH = 32, 8
SIZED = {
    "oblivious": OptimalValueOblivious,
    "window": SlidingWindow,
    "strided": Strided,
    "fixed": lambda stride: Fixed(stride, 1),
    "lsh": lambda r: LSH(r, 1, 0),
    "linformer": lambda rank: Linformer(rank, 0),
    "orf": lambda features: OrthogonalRandomFeatures(features, 0),
}


def cost(method: torch.nn.Module, *, is_causal: bool = False) -> float:
    return cost_in_keys(method, length=LENGTH, head_dim=WIDTH, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", [name for name in SIZED if name not in ("lsh", "linformer")])
@settings(max_examples=6)
@given(keys=st.integers(1, LENGTH))
def test_the_closest_setting_is_the_best_of_all(name: str, is_causal: bool, keys: int) -> None:
    closest = closest_to_budget(
        SIZED[name], keys, length=LENGTH, head_dim=WIDTH, is_causal=is_causal, within=1e9
    )
    costs = [cost(SIZED[name](value), is_causal=is_causal) for value in range(1, LENGTH + 1)]
    assert closest.cost == cost(SIZED[name](closest.parameter), is_causal=is_causal)
    best = min(abs(price - keys) for price in costs)
    # Costs that fall and rise again have two places to look: coarse to fine may miss the better.
    assert abs(closest.cost - keys) <= (
        best if name in ("oblivious", "window", "orf") else best + 4
    )


def test_what_no_setting_reaches_is_none_and_refused_parameters_are_passed_over() -> None:
    options = {"length": LENGTH, "head_dim": WIDTH, "is_causal": False}
    assert closest_to_budget(SIZED["strided"], 4, within=0.1, **options) is None
    even = closest_to_budget(SIZED["lsh"], 20, within=1e9, **options)
    assert even is not None and even.parameter % 2 == 0


def test_a_causal_query_is_charged_for_the_past_alone() -> None:
    sizes = Sizes(queries=4, keys=6, head_dim=2, value_dim=3, is_causal=True)
    assert sizes.kept(100) == (3 + 4 + 5 + 6) / 4 and sizes.kept(4) == (3 + 4 + 4 + 4) / 4
    assert cost(Exact(), is_causal=True) == (LENGTH + 1) / 2 and cost(Exact()) == LENGTH
    square = {"queries": LENGTH, "keys": LENGTH, "head_dim": WIDTH, "value_dim": WIDTH}
    assert budget(Strided(8), **square, is_causal=True) < budget(Strided(8), **square)
    for method in (Strided(8), RandomKeys(8, 0), SlidingWindow(8)):
        for is_causal in (False, True):
            mask = method.pattern(LENGTH, is_causal=is_causal).mask(LENGTH, LENGTH)
            assert cost(method, is_causal=is_causal) == mask.sum().item() / LENGTH


def call(*, is_causal: bool) -> Call:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 20, WIDTH, generator=generator) for _ in range(3))
    return recorded(query, key, value, kernels.Exponential(), is_causal, 5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "method", [Exact(), SlidingWindow(4), OptimalValueAware(3), OrthogonalRandomFeatures(16, 0)]
)
def test_the_weights_read_off_give_the_output(method: torch.nn.Module, is_causal: bool) -> None:
    head = call(is_causal=is_causal).unit(0, heads=slice(1), positions=12)
    assert head.query.shape == head.key.shape == (1, 1, 12, WIDTH)
    weights = effective_weights(method, head)
    options = {"kernel": head.kernel, "is_causal": is_causal}
    output = method(head.query, head.key, head.value, **options)
    torch.testing.assert_close(weights @ head.value[0, 0], output[0, 0], atol=1e-5, rtol=1e-4)
    if is_causal:
        assert weights.triu(1).abs().max() <= 1e-6
    if isinstance(method, Exact):
        exact = attention_weights(head.query, head.key, is_causal=is_causal)
        torch.testing.assert_close(weights, exact[0, 0])


CORE = "processor\t: {}\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\n"


def test_processors_of_one_name_are_told_apart_where_the_system_tells_more(tmp_path: Path) -> None:
    told = []
    for model in (1, 17):
        info = tmp_path / str(model)
        info.write_text("".join(CORE.format(core, model) for core in range(2)))
        told.append(processor(info))
    vectors = torch.backends.cpu.get_cpu_capability()
    assert told[0] == {"name": "AMD EPYC", "family": "25", "model": "1", "vectors": vectors}
    assert cores_of(told[0]).endswith(f"of AMD EPYC (family 25, model 1, {vectors})")
    assert cores_of(told[0]) != cores_of(told[1])
    less = processor(tmp_path / "missing")
    assert less["family"] is None
    assert "family" not in cores_of(less) and "None" not in cores_of(less)


def test_what_numbers_were_made_on_names_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "a-host-name")
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-name")
    where = asdict(run_on())
    assert where["processor"] == processor() and where["threads"] == torch.get_num_threads()
    assert "a-host-name" not in json.dumps(where)
