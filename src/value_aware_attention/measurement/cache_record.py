"""The record of what cache methods cost a model: kept, shown and compared as `record.Record` is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from value_aware_attention.measurement.intervals import Estimate, estimate
from value_aware_attention.measurement.record import JsonRecord, RunOn

__all__ = ["VERSION", "CacheCell", "CacheGaps", "CacheRecord", "Estimate", "estimate"]

VERSION = 2
"""Of the schema: raised whenever a record of before cannot be read as one of now."""
DISTANCES = ("kl", "cosine_distance")
"""Of the model's output from the exact one's: one of them is among the ends of every cell"""


@dataclass(frozen=True, kw_only=True)
class CacheCell:
    """One cache method with r keys, in all layers of the model, on queries it has not observed."""

    method: str
    observed: str
    """Whose queries it saw; "hindsight" is an oracle."""
    r: int
    joint: bool
    """True: chosen by the error that the whole set leaves; False: by scores of single keys."""
    refits: bool
    """True: kept keys get biases and values of their own."""
    error: Estimate
    """Mean over layers of sum ||o - o~||^2 / sum ||o||^2, over units, heads and served queries of
    the exact model"""
    by_layer: tuple[float, ...]
    ends: Mapping[str, Estimate]
    """End metrics with the method in all layers, by name"""
    by_unit: Mapping[str, tuple[float, ...]]
    """"error" and each end metric of every unit, for paired comparisons"""
    multiply_adds: float
    """Of one choice for a key-value head, counted"""
    seconds: float
    """Of one choice for a key-value head, measured"""


@dataclass(frozen=True, kw_only=True)
class CacheGaps:
    """What a method loses to the best found, in four factors of its error, on served queries.

    Each is a ratio of sums, a layer's errors in parts of its ||o||^2: 1 = nothing is lost.
    """

    method: str
    observed: str
    r: int
    layer: int | None
    head: int | None
    """Of key-value heads; None: pooled"""
    criterion: Estimate
    """Its error / that of the best set found on the same observed queries; may lie below 1"""
    information: Estimate
    """That / the error of the best set found on the served queries themselves"""
    sharing: Estimate
    """That / the error where each served query keeps a set of its own"""
    weights: Estimate
    """Best set on the served queries / the same with refitted biases and values"""


@dataclass(frozen=True, kw_only=True)
class CacheRecord(JsonRecord):
    """Cache methods measured on one model and task."""

    version: ClassVar[int] = VERSION
    made_by: ClassVar[str] = "make caches"
    model: str
    task: str
    description: str
    kernel: str
    prefix: int | None
    """Keys that are chosen from; None: all keys of an encoder"""
    length: int
    rows: int
    """Observed queries of each head, at most"""
    seeds: tuple[int, ...]
    """Of every unit: the seed it was drawn by"""
    layers: int
    key_value_heads: int
    query_heads: int
    head_dim: int
    sharpest: tuple[tuple[float, ...], ...]
    """Mean largest attention weight of served queries, by layer and query head"""
    exact: Mapping[str, Estimate]
    """End metrics of the exact model"""
    cells: tuple[CacheCell, ...]
    run_on: RunOn
    gaps: tuple[CacheGaps, ...] = ()
    scale: str = ""
    hashes: Mapping[str, str] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Counts the texts."""
        return len(self.seeds)

    def check(self) -> None:
        """Raises ValueError for what no measurement writes."""
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
