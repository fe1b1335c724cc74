"""Records of what compressed caches lose, kept as `record.Record` is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from value_aware_attention.records.estimate import Estimate, estimate, mean
from value_aware_attention.records.record import JsonRecord, Numbers, RunOn

FULL = "full cache"
MOST = {"kl": np.inf, "cosine_distance": 2.0, "nats": np.inf, "right": 1.0}
"""Losses of a model with a cache -> their largest values; every cell has one of the first two"""
BY_TEXT = (*MOST, "agreed", "seconds")
"""Fields of a cell that have a number for every text"""


@dataclass(frozen=True, kw_only=True)
class CacheCell:
    """Holds the losses of one cache, in all layers of the model; tuples are by text.

    Errors of layers are those on served queries, which no method but an oracle observed. Fields
    that were not measured are empty.

    Attributes:
        cache: Its name.
        keep: Share of the keys that heads keep on average.
        kl: KL(exact || compressed) in nats a predicted token, at least 1e-12.
        nats: -log probability of a predicted token.
        right: Share of the predicted tokens that are the model's likeliest ones; 1: the whole
            answer is right.
        cosine_distance: 1 - cosine of the last hidden states, of a model without a head.
        agreed: Share of freely decoded tokens before the first that the full cache does not decode.
        seconds: Time of a decoded token.
        observed: The queries that it saw (`AfterPrefix`); "hindsight" is an oracle.
        rows: Observed queries of each head, at most; 0 where the method looks at none.
        r: Keys that a head keeps, on average.
        pool: The heads that share their keys, such as "layer" or "model"; empty: every head keeps
            r.
        error: Mean over layers of sum ||o - o~||^2 / sum ||o||^2, over texts, heads and served
            queries of the exact model.
        by_layer: The same of each layer.
        errors: The same of each text.
        keys: Mean number of keys kept, by layer and key-value head, where they share them.
    """

    cache: str
    keep: float
    kl: Numbers = ()
    nats: Numbers = ()
    right: Numbers = ()
    cosine_distance: Numbers = ()
    agreed: Numbers = ()
    seconds: Numbers = ()
    observed: str = ""
    rows: int = 0
    r: int = 0
    pool: str = ""
    error: Estimate | None = None
    by_layer: Numbers = ()
    errors: Numbers = ()
    keys: tuple[Numbers, ...] = ()

    @property
    def ends(self) -> Mapping[str, Estimate]:
        """Means over texts of the losses that were measured, by name."""
        return {
            name: mean(np.array(units), most)
            for name, most in MOST.items()
            if (units := getattr(self, name))
        }


@dataclass(frozen=True, kw_only=True)
class CacheGaps:
    """Splits the error of a method on served queries, over the best found, into four factors.

    Each is a ratio of sums of errors relative to a layer's ||o||^2: 1 = nothing is lost. The best
    sets are found by the method's own search, or the default one, on as many rows as it observes.

    Attributes:
        layer: None: pooled over all layers.
        head: Key-value head. None: pooled.
        criterion: Error of the method / of the best set found on the same observed queries; may be
            below 1.
        information: Error of the best set found on the observed queries / on the served queries
            themselves.
        sharing: Error of the best set on the served queries / of a set for each served query alone.
        weights: Error of the best set on the served queries / of that set with refitted biases and
            values.
    """

    cache: str
    observed: str
    rows: int
    r: int
    layer: int | None
    head: int | None
    criterion: Estimate
    information: Estimate
    sharing: Estimate
    weights: Estimate


@dataclass(frozen=True, kw_only=True)
class CacheRecord(JsonRecord):
    """Compressed caches of one model on texts of one kind; the first cell has the full cache.

    Attributes:
        task: Kind of the texts, such as "needles".
        text: Name of the text that they are cut from; `description` has its title and licence.
        prefix: Tokens of a prompt, whose keys are chosen from. None: all keys of an encoder.
        length: Tokens of a window, where there are no prompts.
        begins_with_bos: True: each prompt begins with BOS, a key that may be kept or dropped.
        gaps: Gaps of caches that keep equally many keys in every head, if requested.
    """

    version: ClassVar[int] = 1
    made_by: ClassVar[str] = "python -m pipelines.caches"
    model: str
    task: str
    text: str
    description: str
    prefix: int | None
    length: int | None = None
    run_on: RunOn
    cells: tuple[CacheCell, ...]
    gaps: tuple[CacheGaps, ...] = ()
    begins_with_bos: bool = False

    def check(self) -> None:
        """Raises ValueError for content that no measurement writes."""
        if not self.cells or self.cells[0].cache != FULL:
            raise ValueError(f"its first cell is not of the {FULL}")
        sizes = {len(cell.kl or cell.cosine_distance) for cell in self.cells}
        if len(sizes) > 1 or not min(sizes):
            raise ValueError(f"cells have {sorted(sizes)} prompts; they must have one number")

    def ratio(self, cell: CacheCell, other: CacheCell) -> Estimate:
        """Computes the geometric mean of KL over another cache's KL, paired over texts."""
        logs = np.log(np.array(cell.kl)) - np.log(np.array(other.kl))
        log = vars(estimate(logs, np.ones_like(logs)))
        return Estimate(**{end: None if x is None else float(np.exp(x)) for end, x in log.items()})
