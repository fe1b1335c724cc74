"""Records of cache methods on a model, kept as `record.Record` is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from value_aware_attention.records.estimate import Estimate
from value_aware_attention.records.record import JsonRecord, RunOn

FULL = "full cache"
DISTANCES = ("kl", "cosine_distance")
"""Distances of the model's output from the exact one; every cell has one among its ends"""


@dataclass(frozen=True, kw_only=True)
class CacheCell:
    """One cache method with r keys, in all layers of the model, on queries it has not observed."""

    method: str
    observed: str
    """The queries that it saw (`AfterPrefix`); "hindsight" is an oracle."""
    rows: int
    """Observed queries of each head, at most; 0 where the method looks at none"""
    r: int
    """Keys that a head keeps, on average"""
    pool: str
    """The heads that share their keys, such as "layer" or "model"; empty: every head keeps r"""
    joint: bool
    """True: chosen by the error that the whole set leaves; False: by scores of single keys."""
    refits: bool
    """True: kept keys get biases and values of their own."""
    error: Estimate
    """Mean over layers of sum ||o - o~||^2 / sum ||o||^2, over units, heads and served queries of
    the exact model"""
    by_layer: tuple[float, ...]
    keys: tuple[tuple[float, ...], ...]
    """Mean number of keys kept, by layer and key-value head; empty where every head keeps r"""
    ends: Mapping[str, Estimate]
    """End metrics with the method in all layers, by name"""
    by_unit: Mapping[str, tuple[float, ...]]
    """"error" and each end metric of every unit, for paired comparisons"""
    multiply_adds: float
    """Multiply-adds of one choice for a key-value head, counted"""
    seconds: float
    """Time of one choice for a key-value head, measured"""


@dataclass(frozen=True, kw_only=True)
class CacheGaps:
    """Splits the error of a method on served queries, over the best found, into four factors.

    Each is a ratio of sums, a layer's errors in parts of its ||o||^2: 1 = nothing is lost. The best
    sets are found by the method's own search, or the default one, on as many rows as it observes.
    """

    method: str
    observed: str
    rows: int
    r: int
    layer: int | None
    head: int | None
    """Key-value head; None: pooled"""
    criterion: Estimate
    """Error of the method / of the best set found on the same observed queries; may be below 1"""
    information: Estimate
    """Error of the best set found on the observed queries / on the served queries themselves"""
    sharing: Estimate
    """Error of the best set on the served queries / of a set for each served query alone"""
    weights: Estimate
    """Error of the best set on the served queries / of that set with refitted biases and values"""


@dataclass(frozen=True, kw_only=True)
class CacheRecord(JsonRecord):
    """Cache methods measured on one model and task."""

    version: ClassVar[int] = 4
    made_by: ClassVar[str] = "python -m pipelines.probe ... caches=true"
    model: str
    task: str
    description: str
    kernel: str
    prefix: int | None
    """Keys that are chosen from; None: all keys of an encoder"""
    length: int
    layers: int
    key_value_heads: int
    run_on: RunOn
    seeds: tuple[int, ...]
    """The seed that each unit was drawn by"""
    query_heads: int
    head_dim: int
    exact: Mapping[str, Estimate]
    """End metrics of the exact model"""
    cells: tuple[CacheCell, ...]
    prefill_seconds: float
    """Time of exact attention over the keys that are chosen from, for the queries of a key-value
    head that read them; what `CacheCell.seconds` is compared with"""
    gaps: tuple[CacheGaps, ...] = ()
    scale: str = ""
    hashes: Mapping[str, str] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Counts the texts."""
        return len(self.seeds)

    def check(self) -> None:
        """Raises ValueError for content that no measurement writes."""
        if not self.cells:
            raise ValueError("it has no cells")
        for place, cell in enumerate(self.cells):
            if cell.r < 1:
                raise ValueError(f"cells.{place}.r is {cell.r}; it must be at least 1")
            if not cell.ends.keys() & set(DISTANCES):
                raise ValueError(f"cells.{place}.ends has none of {', '.join(DISTANCES)}")
            for name in ("error", *cell.ends):
                if len(cell.by_unit.get(name, ())) != self.units:
                    raise ValueError(f"cells.{place}.by_unit has not {self.units} units of {name}")
