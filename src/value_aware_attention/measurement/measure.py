"""Measures approximations inside a model: one cell of a record per setting."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from value_aware_attention.approximations import (
    OptimalValueAware,
    SparseApproximation,
    SparseWeights,
)
from value_aware_attention.approximations.closest_combination import engine
from value_aware_attention.call import Call
from value_aware_attention.distributed import is_first, shared_map
from value_aware_attention.files import to_json
from value_aware_attention.hugging_face import attention_layers, own_kernel
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.layers import (
    MATCHED,
    LayerErrors,
    layer_errors,
    output_error,
    skewness,
    skewness_gap,
)
from value_aware_attention.measurement.recorded import ExactRows, evenly_spaced
from value_aware_attention.measurement.run_on import Progress, run_on
from value_aware_attention.measurement.store import RecordCache, source_hash
from value_aware_attention.measurement.task import (
    Layerwise,
    Task,
    UnitSums,
    arrays,
    exactly,
    joined,
    jsonable,
)
from value_aware_attention.records.estimate import estimate, ratio_of_sums
from value_aware_attention.records.record import (
    TASK_OF_METRIC,
    Attention,
    Cell,
    CellError,
    Parameters,
    Prediction,
    Record,
    Skewness,
    TextRead,
    read,
)

RECORDED = 8
"""Most parts of a task for measuring output errors of whole methods"""
MOST_NATS = 700.0
"""Largest logarithm of a reported perplexity: a float holds no more than exp(709)"""


JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Names a method: `build` makes a layer's method; reports sort and plot by `parameters`."""

    approximation: str
    parameters: Parameters
    build: Layerwise

    def __str__(self) -> str:
        return " ".join([self.approximation, *(f"{k}={v}" for k, v in self.parameters.items())])


def cell_error(build: Layerwise, layers: Sequence[ExactRows]) -> CellError:
    """Measures a method's relative output error over all `layers` and in each of them."""
    results = shared_map(
        lambda layer: _layer_errors(build(layer), layers[layer]), range(len(layers))
    )
    errors = np.array([layer.pop("squared_error") for layer in results])
    norms = np.array([layer.squared_norm().tolist() for layer in layers])
    relative, low, high = ratio_of_sums(errors.sum(axis=0), norms.sum(axis=0))
    return CellError(
        relative=_known(relative),
        low=_known(np.maximum(low, 0.0)),
        high=_known(high),
        by_layer=tuple(map(_known, ratio_of_sums(errors.T, norms.T)[0])),
        unit_squared_errors=tuple(tuple(map(_known, layer)) for layer in errors),
        unit_squared_norms=tuple(tuple(map(_known, layer)) for layer in norms),
        queries=layers[0].rows.rows.numel(),
        cosine_by_layer=tuple(_known(layer.pop("cosine")) for layer in results),
        length_by_layer=tuple(_known(layer.pop("length")) for layer in results),
        **{name: max(layer[name] for layer in results) for name in results[0]},
    )


@torch.inference_mode()
def _layer_errors(method: nn.Module, layer: ExactRows) -> JsonObject:
    """Measures ||o - o~||^2 by unit, and direction and length of a layer's outputs.

    A solver returns its own error, which is used; the keys that it returns are checked.
    """
    if not (isinstance(method, SparseApproximation) and method.solves_for_weights):
        output = layer.approximated(method)
        return {
            "squared_error": layer.squared_error(output).tolist(),
            **layer.direction(output),
        }
    chosen: SparseWeights = method.select(**layer.rows.arguments())
    longest = layer.rows.value.float().norm(dim=-1).max()
    largest = chosen.error.max().sqrt() / longest.where(longest > 0, 1.0)  # 0 for zero values
    return {
        "squared_error": chosen.error.double().sum(dim=(1, 2)).tolist(),
        **layer.direction(chosen.output(layer.rows.value)),
        "largest_support": int(chosen.support().max()),
        "largest_error": largest.item(),
    }


def _known(number: SupportsFloat) -> float | None:
    """Returns a number for JSON: None if it is not finite."""
    return float(number) if math.isfinite(float(number)) else None


def end_metric(sums: UnitSums, exact: UnitSums, metric: str) -> dict[str, Any]:
    """Computes the fields of `record.EndMetric`; a single unit's interval has None as ends."""
    ends = [float(end) for end in ratio_of_sums(sums.totals - exact.totals, sums.counts)]
    if metric == "perplexity":
        nats = min(exact.mean(), MOST_NATS)
        beyond, baseline, most = exact.mean() - nats, math.exp(nats), MOST_NATS - nats
        value, low, high = (
            baseline * math.exp(min(max(end + beyond, -MOST_NATS), most)) for end in ends
        )
    else:
        scale = 100.0 if metric == "error" else 1.0  # also the largest value
        baseline = scale * exact.mean()
        least = -1.0 if metric == "cosine" else 0.0
        value, low, high = (min(max(baseline + scale * end, least), scale) for end in ends)
    measured: dict[str, Any] = {
        "value": value,
        "low": low,
        "high": high,
        "difference": value - baseline,
        "difference_low": low - baseline,
        "difference_high": high - baseline,
    }
    if len(sums.counts) < 2:
        measured |= dict.fromkeys(("low", "high", "difference_low", "difference_high"))
    return measured | {
        "count": int(sums.counts.sum()),
        "unit_totals": tuple(sums.totals.tolist()),
        "unit_counts": tuple(sums.counts.tolist()),
    }


Method = Callable[[int, int], nn.Module]
"""(number of keys r, layer index) -> the approximation"""


@dataclass(frozen=True)
class LayerOptions:
    """Options for measuring layers, on `rows` queries of each head and unit.

    `kernels` replace the model's own post hoc, on the same queries, keys and values. `between` and
    `slots` (`layer_errors`), and `skewness_gap`, are measured in addition to the two optimal
    choices; `seed` is that of `skewness_gap`.
    """

    rows: int = 16
    search: str = "default"
    between: bool = True
    skewness_gap: bool = True
    kernels: Sequence[Kernel] = ()
    seed: int = 0
    slots: bool = False


def measure(
    task: Task,
    methods: Mapping[str, Method] | Sequence[Setting],
    *,
    sizes: Sequence[int] | None = None,
    cache: Path | str | None = None,
    weights: str | None = None,
    layers: LayerOptions | None = LayerOptions(),
    cell_errors: bool = True,
    name: str | None = None,
    description: str = "",
    progress: bool = True,
) -> Record:
    """Measures exact attention and every method on the task, with 95% intervals over its units.

    Raises ValueError for sizes that do not fit.

    Args:
        task: A model, its texts and its end metric.
        methods: Functions (r, layer) -> approximation by name, each measured at all `sizes`; or
            `Setting`s, which have their own sizes.
        sizes: Numbers of keys r. None: powers of two up to head size + 1, and that.
        cache: Folder that keeps numbers for later runs with equal weights, text, code and search
            engine. None: nothing is kept.
        weights: The sha256 of the model's weights, for `cache`. None: it is computed.
        layers: How to measure single layers. None: they are not measured.
        cell_errors: True: a cell has the output error of its method, as well as the end metric with
            the method in all layers.
        name: The model's name in the record. None: the name of its class.
        description: The record's description of the text.
        progress: True: shows a progress bar, or lines without a terminal.
    """
    chosen = sizes_of(sizes, task.head_dim, task.length)
    if isinstance(methods, Mapping):
        methods = [
            Setting(method, {"r": r}, partial(build, r))
            for r in chosen
            for method, build in methods.items()
        ]
    kept_in = None if cache is None else RecordCache(cache, _identity(task, weights))
    work = _Measurement(task, kept_in)
    with work.progress(methods, layers, draws=progress and is_first()):
        attention = tuple(work.attention(layers, chosen)) if layers else ()
        cells = tuple(work.cells(methods, cell_errors))
    kernel = type(task.kernel).__name__.lower()
    return _record(task, cells, name, description, kernel=kernel, attention=attention)


def measure_own(task: Task, *, name: str, description: str = "") -> Record:
    """Measures the end metric of a model with the attention that it was trained with.

    It is that model's cell "exact": nothing is approximated, so there is no output error.
    """
    sums = task.run(None)
    cell = Cell(approximation="exact", parameters={}, **end_metric(sums, sums, task.metric))
    return _record(task, (cell,), name, description)


def _record(
    task: Task, cells: tuple[Cell, ...], name: str | None, description: str, *,
    kernel: str | None = None, attention: tuple[Attention, ...] = (),
) -> Record:  # fmt: skip
    model, exact = type(task.model).__name__, cells[0]
    recorded = len(exact.error.unit_squared_norms[0]) if exact.error else None
    return Record(
        model=name or model,
        architecture=model,
        task=TASK_OF_METRIC[task.metric],
        kernel=kernel,
        metric=task.metric,
        unit=task.unit,
        length=task.length,
        head_dim=task.head_dim,
        cells=cells,
        text=TextRead(
            description=description,
            targets=exact.count,
            units=len(exact.unit_counts),
            recorded_units=attention[0].output_error.units if attention else recorded,
        ),
        run_on=run_on(task.device.type),
        attention=attention,
    )


def sizes_of(sizes: Sequence[int] | None, head_dim: int, length: int) -> list[int]:
    """Lists the numbers of keys to measure, in order; the default keeps those up to the length."""
    if sizes is None:
        powers = {1 << power for power in range((head_dim + 1).bit_length())}
        return sorted(size for size in powers | {head_dim + 1} if size <= length)
    for size in sizes:
        if not 1 <= size <= length:
            raise ValueError(f"sizes has {size}; it must lie between 1 and the length, {length}")
    return sorted(set(sizes))


@dataclass
class _Measurement:
    """Runs one `measure`: each number comes from the cache, or is computed and stored."""

    task: Task
    cache: RecordCache | None

    @cached_property
    def first(self) -> list[Call]:
        """The layers' calls on the first part."""
        return self.task.layer_calls(0)

    @cached_property
    def recorded(self) -> list[int]:
        """Parts whose calls are held together; all parts of a long text would not fit in memory."""
        return evenly_spaced(self.task.parts, RECORDED)

    @cached_property
    def calls(self) -> list[Call]:
        """The layers' calls on the recorded parts."""
        others = (self.task.layer_calls(number) for number in self.recorded[1:])
        return [Call.joined(layer) for layer in zip(self.first, *others, strict=True)]

    @cached_property
    def exact_rows(self) -> list[ExactRows]:
        return [ExactRows.of(call) for call in self.calls]

    def attention(self, options: LayerOptions, sizes: Sequence[int]) -> Iterator[Attention]:
        """Measures the layers with the task's kernel, then with the post hoc kernels."""
        trained = type(own_kernel(self.task.model))
        for kernel in (None, *options.kernels):
            weighed = kernel or self.task.kernel
            texts = self._layers(options, kernel, sizes)
            layers = [
                joined([LayerErrors(**arrays(errors)) for errors in of_layer])
                for of_layer in zip(*(text["errors"] for text in texts), strict=True)
            ]
            shapes = zip(*(text["skewness"] for text in texts), strict=True)
            gap = partial(skewness_gap, rows=options.rows, search=options.search, seed=options.seed)
            yield Attention(
                kernel=type(weighed).__name__.lower(),
                post_hoc=type(weighed) is not trained,
                output_error=output_error(
                    layers, self.first, search=options.search, unit=self.task.unit, sizes=sizes
                ),
                skewness=tuple(
                    Skewness(
                        layer=layer,
                        **{n: float(np.mean([of[n] for of in of_texts])) for n in of_texts[0]},
                    )
                    for layer, of_texts in enumerate(shapes)
                ),
                skewness_gap=gap(self.calls) if options.skewness_gap and kernel is None else None,
            )

    def _layers(
        self, options: LayerOptions, kernel: Kernel | None, sizes: Sequence[int]
    ) -> list[JsonObject]:
        """Measures output errors and skewness of every layer, text by text."""
        how: JsonObject = {
            "rows": options.rows, "search": options.search, "between": options.between,
            "matched": sorted({*MATCHED, *sizes}), "slots": options.slots,
        }  # fmt: skip

        def compute(number: int) -> JsonObject:
            calls = self.first if number == 0 else self.task.layer_calls(number)
            weighed = [replace(call, kernel=kernel or call.kernel) for call in calls]
            errors = shared_map(partial(layer_errors, **how), weighed)
            return {
                "errors": [jsonable(layer) for layer in errors],
                "skewness": shared_map(skewness, weighed),
            }

        with self._named("layers"):
            return self._by_text(
                {"layers": how | {"kernel": repr(kernel)}},
                compute,
                work=_layer_work(options.rows, self.first),
            )

    def cells(self, settings: Sequence[Setting], errors: bool) -> Iterator[Cell]:
        """Measures exact attention, then every setting."""
        exact = Setting("exact", {}, exactly)
        baseline = self._sums(exact)
        for setting in (exact, *settings):
            with self._named(str(setting)):
                sums = baseline if setting is exact else self._sums(setting)
                cell = Cell(
                    approximation=setting.approximation,
                    parameters=dict(setting.parameters),
                    error=self._error(setting) if errors else None,
                    predictions={
                        name: Prediction(
                            **asdict(estimate(totals, sums.counts, least=0.0)),
                            unit_totals=tuple(totals.tolist()),
                        )
                        for name, totals in sums.predictions.items()
                    },
                    **end_metric(sums, baseline, self.task.metric),
                )
                to_json(asdict(cell))  # rejects NaN and infinity, with the cell's name
            yield cell

    def _sums(self, setting: Setting) -> UnitSums:
        sums = self._by_text(
            self._key(setting) | {"measured": "end metric"},
            lambda number: jsonable(self.task.run(setting.build, number)),
            work=_work_of(setting.build(0)),
        )
        return joined([UnitSums(**arrays(of_text)) for of_text in sums])

    def _error(self, setting: Setting) -> CellError:
        key = self._key(setting) | {
            "measured": "output error",
            "parts": [self.task.digest(number) for number in self.recorded],
        }
        return read(
            CellError, self._get(key, lambda: asdict(cell_error(setting.build, self.exact_rows)))
        )

    def _key(self, setting: Setting) -> dict[str, object]:
        return setting_key(setting, len(attention_layers(self.task.model)))

    def _by_text(
        self, key: Mapping[str, object], compute: Callable[[int], JsonObject], work: float
    ) -> list[JsonObject]:
        """Reads or computes the result of every text."""
        results = []
        for number in range(self.task.parts):
            results.append(
                self._get({**key, "part": self.task.digest(number)}, partial(compute, number))
            )
            self.bar.update(work)
        return results

    def _get(self, key: Mapping[str, object], compute: Callable[[], JsonObject]) -> JsonObject:
        return compute() if self.cache is None else self.cache.get(key, compute)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Shows the setting on the bar, and adds it to a ValueError."""
        self.bar.set_postfix_str(what)
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error

    @contextmanager
    def progress(
        self, settings: Sequence[Setting], layers: LayerOptions | None, *, draws: bool
    ) -> Iterator[None]:
        """Shows the share of all work that is done, in passes over the text by a cheap method."""
        each = 1 + sum(_work_of(setting.build(0)) for setting in settings)
        if layers:
            each += _layer_work(layers.rows, self.first) * (1 + len(layers.kernels))
        with Progress(
            total=each * self.task.parts, unit="", disable=not draws, leave=False,
            bar_format="{l_bar}{bar}| {elapsed}, {remaining} left {postfix}",
        ) as self.bar:  # fmt: skip
            yield


def setting_key(setting: Setting, layers: int) -> dict[str, object]:
    """Lists a cell's inputs besides its task: the methods of all layers, and their source."""
    built = [setting.build(layer) for layer in range(layers)]
    modules = {type(module).__module__ for method in built for module in method.modules()}
    sources = sorted({source_hash(module, __name__) for module in modules})
    return {"methods": [repr(method) for method in built], "source": sources}


def _work_of(method: nn.Module) -> float:
    """Estimates the relative cost of a method, for the progress bar."""
    return 1.0 + method.r if isinstance(method, OptimalValueAware) else 1.0


def _layer_work(rows: int, calls: Sequence[Call]) -> float:
    return 1 + min(1.0, rows / calls[0].query.shape[-2]) * (calls[0].value.shape[-1] + 2)


def _identity(task: Task, weights: str | None) -> dict[str, object]:
    """Lists the inputs of all numbers: weights, kernel, device, engine, source."""
    return {
        "weights": weights or weights_hash(task.model),
        "kernel": repr(task.kernel),
        "device": task.device.type,
        "engine": engine(task.device.type),
        "source": source_hash(type(task).__module__, __name__),
    }


def weights_hash(model: PreTrainedModel) -> str:
    """Hashes a model's configuration, parameters and buffers."""
    digest = sha256(model.config.to_json_string().encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()
