"""Defines the record of an evaluation: strict JSON with estimates and the machine it ran on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from statistics import fmean
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from value_aware_attention.files import from_json, reading, to_json, without_checksum
from value_aware_attention.records.estimate import Estimate, counted

TASK_OF_METRIC = {"perplexity": "causal", "error": "masked", "cosine": "encoder"}
"""End metric -> the task of the models that it measures"""
OBLIVIOUS, AWARE = "optimal_v_oblivious", "optimal_v_aware"
"""Names of the two optimal choices in records"""
WITH_MEAN = "optimal_v_aware_mean"
"""The value-aware optimum that may use the mean of the visible values"""
SLOTS = {"mean_key": "mean_value_slot_mean_key", "exact": "mean_value_slot_exact"}
"""Mass of a `MeanValueSlot`'s slot -> its name among a layer's curves"""
SHARES = (0.01, 0.05, 0.1)
"""Relative output errors for which `KeysNeeded` are counted"""
Numbers = tuple[float, ...]
Parameters = Mapping[str, Any]
"""Arguments of a method by name"""


class JsonRecord:
    """A frozen dataclass stored as one JSON file, with the version of its schema.

    Attributes:
        version: Version of the schema; it increases when older records can no longer be read.
        made_by: The command that creates it again.
    """

    version: ClassVar[int]
    made_by: ClassVar[str]

    def to_json(self) -> str:
        """Returns JSON with sorted keys. Raises ValueError for NaN and infinity."""
        content = asdict(self, dict_factory=_written)  # type: ignore[call-overload]
        return to_json(content | {"version": self.version}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "the record") -> Self:
        """Reads the text that `to_json` wrote; errors call it `name`.

        Raises ValueError for another schema version, and for anything that is not such a record.
        """
        with reading(name, "make it again"):
            content = from_json(text)
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}, not a record")
            version = content.get("version", "none")
            if version != cls.version:
                raise ValueError(
                    f"{name} has schema version {version!r}; this program reads version "
                    f"{cls.version}: make it again ({cls.made_by})"
                )
            content = without_checksum(content)
            del content["version"]
            record: Self = read(cls, content, name)
            record.check()
        return record

    def check(self) -> None:
        """Raises ValueError for content that no measurement writes."""


def _written(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    # leaves out values without information, so that records equal those of older versions
    return dict(x for x in items if x not in [("begins_with_bos", False), ("bits_a_weight", None)])


@dataclass(frozen=True, kw_only=True)
class EndMetric(Estimate):
    """A model's end metric with its paired 95% interval around exact attention's.

    `value` is the reported mean per target: exp(nats) for "perplexity", 100 times the share of
    wrong ones for "error", the mean itself for "cosine". value = exact + difference.

    Attributes:
        count: Targets.
        unit_totals: The summed loss (nats, or wrong predictions) of each unit of text.
        unit_counts: Targets of each unit.
    """

    value: float
    count: int
    difference: float
    difference_low: float | None
    difference_high: float | None
    unit_totals: Numbers
    unit_counts: Numbers


@dataclass(frozen=True, kw_only=True)
class CellError:
    """A method's relative output error, sum ||o - o~||^2 / sum ||o||^2.

    The sums cover the queries and heads of all layers, with the 95% interval over units (Student's
    t), and those of each layer alone.

    Attributes:
        unit_squared_errors: ||o - o~||^2 by layer and recorded unit.
        unit_squared_norms: ||o||^2 by layer and recorded unit.
        queries: Queries per layer.
        cosine_by_layer: Mean cosine of o~ and o over the queries and heads of each layer.
        length_by_layer: sqrt(sum ||o~||^2 / sum ||o||^2) over the queries and heads of each layer.
        largest_support: Most keys of a query, for a method that solves for its weights.
        largest_error: Largest error of solved weights, relative to the longest value: max ||o -
            o~|| / max ||v||.
    """

    relative: float | None
    low: float | None
    high: float | None
    by_layer: tuple[float | None, ...]
    unit_squared_errors: tuple[tuple[float | None, ...], ...]
    unit_squared_norms: tuple[tuple[float | None, ...], ...]
    queries: int
    cosine_by_layer: tuple[float | None, ...] = ()
    length_by_layer: tuple[float | None, ...] = ()
    largest_support: int | None = None
    largest_error: float | None = None

    @property
    def cosine(self) -> float | None:
        """The mean of `cosine_by_layer`; None if a layer has none."""
        return _mean(self.cosine_by_layer)

    @property
    def relative_length(self) -> float | None:
        """The mean of `length_by_layer`; None if a layer has none."""
        return _mean(self.length_by_layer)


def _mean(layers: Sequence[float | None]) -> float | None:
    numbers = [layer for layer in layers if layer is not None]
    return fmean(numbers) if numbers and len(numbers) == len(layers) else None


@dataclass(frozen=True, kw_only=True)
class Prediction(Estimate):
    """Compares predictions with the exact model's: the mean per target, by `task.PREDICTIONS`.

    Attributes:
        unit_totals: Sums over the targets of each unit of text.
    """

    unit_totals: Numbers


@dataclass(frozen=True, kw_only=True)
class Cell(EndMetric):
    """One approximation with one setting of its parameters, in all layers of the model.

    Attributes:
        budget: Keys per query that the setting was chosen to cost; `cost` is the actual number
            (`error.budget`).
        predictions: "kl" (nats) and "same_top_token", if the task compares predictions.
    """

    approximation: str
    parameters: Parameters
    error: CellError | None = None
    budget: float | None = None
    cost: float | None = None
    predictions: Mapping[str, Prediction] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Baseline(EndMetric):
    """Scores another model on the same targets: counts of tokens, or the model on longer text.

    `tokens` is the number of counted tokens; `length` is that of the text.
    """

    tokens: int | None = None
    length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Mean ||o - o~||^2 of a method against the number of kept keys, by layer and size."""

    sizes: tuple[int, ...]
    layers: tuple[Numbers, ...]


@dataclass(frozen=True, kw_only=True)
class KeyCount:
    """A count of keys, and the counts at the ends of the 95% interval of its error over units.

    Attributes:
        layer: None = pooled over all layers.
        keys: None = all outputs are 0, so no error is relative to them.
    """

    layer: int | None
    keys: int | None
    low: int | None
    high: int | None

    def __str__(self) -> str:
        """Writes "46 (43 to 50)"."""
        return counted(self.keys, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class MatchingKeys(KeyCount):
    """The fewest keys by weight with at most the error of `r` value-aware ones.

    Errors are pooled over queries, with the 95% interval over units. The quartiles are over single
    queries, each matched alone.
    """

    r: int
    lower_quartile: int
    median: int
    upper_quartile: int


@dataclass(frozen=True, kw_only=True)
class MatchingSlots(KeyCount):
    """The fewest slots of a `MeanValueSlot` with at most the error of `r` value-aware keys.

    `keys` slots are `keys` - 1 of the largest weights and, as the last slot, the mean of the other
    values. Errors are pooled as in `MatchingKeys`.

    Attributes:
        mass: The slot's mass, from `SLOTS`.
    """

    r: int
    mass: str


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """Describes a layer's attention to the first token, and errors if it has the largest weight.

    Means are over the sampled queries of all heads and units. A query that attends most to the
    first token attends to the sink.

    Attributes:
        mass: Mean weight on the first token.
        top: Share of queries whose largest weight is on the first token.
        value_norm: ||v_0|| over the mean ||v_i|| of all keys; None if all values are 0.
        errors: By method and number of keys: the relative output error of queries that attend most
            to the first token, and of the others.
    """

    layer: int
    mass: float
    top: float
    value_norm: float | None
    errors: Mapping[str, Mapping[str, tuple[float | None, ...]]]


@dataclass(frozen=True, kw_only=True)
class KeysNeeded(KeyCount):
    """The fewest keys of a method with at most a relative output error of `share`.

    `head` None pools the heads, `layer` None the layers too.
    """

    head: int | None
    method: str
    share: float


@dataclass(frozen=True, kw_only=True)
class ErrorAtSize:
    """The relative output error of a method with `r` keys, and its 95% interval over units.

    Attributes:
        error: None = all outputs are 0.
    """

    layer: int | None
    head: int | None
    method: str
    r: int
    error: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class SearchGap:
    """Compares a search for `r` value-aware keys with the best one, on sampled rows of all layers.

    The best search is optimal at r = 2 with up to 512 keys, otherwise the best known.

    Attributes:
        excess: Pooled error over that of the best search, minus 1.
        off: Share of rows with an error more than 0.1% above the best.
        worst: Largest ratio of a row's errors.
        proved: Share of rows where the best search is proved optimal.
    """

    r: int
    search: str
    excess: float
    off: float
    worst: float
    proved: float


@dataclass(frozen=True, kw_only=True)
class OutputError:
    """Output errors against the number of keys, on sampled queries of every head and unit.

    Attributes:
        search: Search for the value-aware optimum.
        rows: Queries per layer, over units and heads.
        squared_norm: Mean ||o||^2 by layer.
    """

    search: str
    rows: int
    units: int
    unit: str
    keys: int
    heads: int
    head_dim: int
    causal: bool
    squared_norm: Numbers
    methods: Mapping[str, Curve]
    matching_keys: tuple[MatchingKeys, ...]
    keys_needed: tuple[KeysNeeded, ...]
    errors: tuple[ErrorAtSize, ...]
    matching_slots: tuple[MatchingSlots, ...] = ()
    first_token: tuple[FirstToken, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.squared_norm)


@dataclass(frozen=True, kw_only=True)
class Skewness:
    """How skewed a layer's attention weights alpha are: means over its queries (section 3).

    Attributes:
        rows_over_half: Share of queries with a weight above 0.5, where values should matter least.
        effective_keys: exp(entropy of alpha).
        keys_for_90_percent: The fewest keys that hold 90% of the mass.
    """

    layer: int
    largest_weight: float
    rows_over_half: float
    effective_keys: float
    keys_for_90_percent: float


@dataclass(frozen=True, kw_only=True)
class GapCell:
    """A layer under one kernel: its skewness, and the gain of choosing by the output.

    Attributes:
        own: False = replaces the model's kernel (post hoc).
        oblivious: Relative output error of attention's top keys, by their number; empty if all
            outputs are 0.
        same_first_key: Share of queries where both choices keep the same key at r = 1.
    """

    layer: int
    kernel: str
    degree: int | None
    own: bool
    largest_weight: float
    effective_keys: float
    rows_over_half: float
    oblivious: Mapping[str, float]
    aware: Mapping[str, float]
    same_first_key: float
    smallest_norm_key: float | None = None
    closest_to_mean_key: float | None = None


@dataclass(frozen=True, kw_only=True)
class SkewnessGap:
    """Section 3's argument, measured on `rows` queries of every layer."""

    rows: int
    cells: tuple[GapCell, ...]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Measurements in the layers under one kernel; post hoc = not the model's own."""

    kernel: str
    post_hoc: bool
    output_error: OutputError
    skewness: tuple[Skewness, ...]
    skewness_gap: SkewnessGap | None = None


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The weights, queries by keys, that one method uses in place of attention's."""

    approximation: str
    parameters: Parameters
    cost: float | None
    weights: tuple[Numbers, ...]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The weights of every method on a text's first tokens, in the first layer and head."""

    tokens: tuple[str, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class RunOn:
    """Hardware and versions, without anything that names a machine or a time.

    Attributes:
        engine: Engine of the solver: "compiled" or "torch".
    """

    hardware: str
    threads: int
    versions: Mapping[str, str]
    engine: str = ""
    processor: Mapping[str, str | None] = field(default_factory=dict)
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class TextRead:
    """The text that a model read: its amount and its origin.

    Attributes:
        recorded_units: Units for measuring output errors.
        tokens: Tokens of the whole text; the units contain the share `share_read`.
        begins_with_bos: True: each window begins with BOS, a visible key that is never predicted.
    """

    description: str
    targets: int
    units: int
    recorded_units: int | None = None
    available_units: int | None = None
    tokens: int | None = None
    share_read: float | None = None
    begins_with_bos: bool = False


@dataclass(frozen=True, kw_only=True)
class Record(JsonRecord):
    """One model measured on one text. `cells` begin with exact attention.

    Attributes:
        task: "causal", "masked" or "encoder".
        metric: "perplexity", "error" (percent) or "cosine".
        unit: Unit of the intervals: "window" or "sequence".
        attention: Kernels measured in the layers, starting with that of the cells.
        hashes: sha256 of the checkpoint and of the data.
        trained_with: Name of the method that replaced attention in training; see `arguments`.
        control: The same architecture with random weights, measured on the same text.
        controls: The same with weights of other seeds.
        budgets: Cells with a separate number of keys per head (`head_budgets.budget_settings`).
        bits_a_weight: Counted from the GGUF file of the weights. None: they have another format.
    """

    version: ClassVar[int] = 1
    made_by: ClassVar[str] = "dvc repro, or the app that wrote it"
    model: str
    task: str
    kernel: str | None
    metric: str
    unit: str
    length: int
    head_dim: int
    cells: tuple[Cell, ...]
    text: TextRead
    run_on: RunOn
    attention: tuple[Attention, ...] = ()
    scale: str = ""
    architecture: str = ""
    hashes: Mapping[str, str] = field(default_factory=dict)
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    picture: Picture | None = None
    trained_with: str = ""
    arguments: Parameters = field(default_factory=dict)
    control: "Record | None" = None
    controls: tuple["Record", ...] = ()
    search_gaps: tuple[SearchGap, ...] = ()
    budgets: tuple[Cell, ...] = ()
    bits_a_weight: float | None = None

    def check(self) -> None:
        """Raises ValueError for numbers and words that no measurement writes."""
        for what, word, words in (
            ("task", self.task, TASK_OF_METRIC.values()), ("metric", self.metric, TASK_OF_METRIC),
        ):  # fmt: skip
            if word not in words:
                raise ValueError(f"{what} is {word!r}; it must be one of {', '.join(words)}")
        for what, size in (("length", self.length), ("head_dim", self.head_dim)):
            if size < 1:
                raise ValueError(f"{what} is {size}; it must be at least 1")
        if not self.cells or self.cells[0].approximation != "exact":
            raise ValueError("its cells do not begin with exact attention")
        self._check_cells("cells", self.cells)
        self._check_cells("budgets", self.budgets)
        for control in (*filter(None, [self.control]), *self.controls):
            self._check_control(control)

    def _check_control(self, control: "Record") -> None:
        for name in ("metric", "unit", "length", "head_dim"):
            if vars(control)[name] != vars(self)[name]:
                raise ValueError(f"control has another {name} than the model that it stands beside")
        control.check()

    def _check_cells(self, name: str, cells: Sequence[Cell]) -> None:
        units = len(self.cells[0].unit_totals)
        for place, cell in enumerate(cells):
            if {len(cell.unit_totals), len(cell.unit_counts)} != {units}:
                raise ValueError(f"{name}.{place} has other units than exact attention")
            least = min(end for end in (cell.value, cell.low, cell.high) if end is not None)
            if self.metric == "perplexity" and least <= 0:
                raise ValueError(f"{name}.{place} has a perplexity of {least}")


def read(kind: Any, content: Any, name: str = "it") -> Any:
    """Reads JSON's content as an object of a dataclass, as a tuple, a mapping, or unchanged.

    Raises ValueError, with the place in `name`, for content that does not fit the dataclass.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        names, hints = sorted(field.name for field in fields(kind)), get_type_hints(kind)
        if not isinstance(content, dict) or (unknown := sorted(set(content) - set(names))):
            got = f"unknown {', '.join(unknown)}" if isinstance(content, dict) else repr(content)
            raise ValueError(f"{name} has {got}; a {kind.__name__} has {', '.join(names)}")
        values = {key: read(hints[key], item, f"{name}.{key}") for key, item in content.items()}
        try:
            return kind(**values)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if content is None else read(kinds[0], content, name)
    if origin is tuple and isinstance(content, (list, tuple)):
        return tuple(read(kinds[0], item, f"{name}.{i}") for i, item in enumerate(content))
    if origin is Mapping and isinstance(content, dict):
        return {key: read(kinds[1], item, f"{name}.{key}") for key, item in content.items()}
    if kind is not Any and not isinstance(
        content, (float, int) if kind is float else origin or kind
    ):
        allowed = "list" if origin is tuple else getattr(origin or kind, "__name__", kind)
        raise ValueError(f"{name} is {content!r:.80}; it must be a {allowed}")
    return content
