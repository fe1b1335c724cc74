"""Record of a model that decodes with compressed caches, kept as `record.Record` is."""

from dataclasses import dataclass
from typing import ClassVar

from value_aware_attention.measurement.record import Estimate, JsonRecord, RunOn

FULL = "full cache"


@dataclass(frozen=True, kw_only=True)
class DecodingCell:
    """One cache while a model decodes the tokens after a prompt, in all of its layers."""

    cache: str
    """Name of the cache method with its options; "full cache": nothing is dropped"""
    keep: float
    """Share of the prompt's keys that are kept"""
    r: int
    """Keys that a head keeps, on average"""
    kl: Estimate
    """KL(full cache || this), nats a token, with the text's tokens given"""
    nats: Estimate
    """Cross-entropy of the text's tokens, those that a task asks for"""
    right: Estimate
    """Share of freely decoded tokens that are the text's: a task's right answers"""
    same: Estimate
    """Share of freely decoded tokens that the full cache decodes too"""
    keys: tuple[tuple[float, ...], ...]
    """Mean number of keys kept, by layer and key-value head"""
    bytes: int
    """Lasting bytes of a text's prompt, in the layers that are compressed"""
    full_bytes: int
    milliseconds: float
    """Processor time of a decoded token, the median"""
    time: Estimate
    """That time in parts of the full cache's, by parts of the texts in turn"""
    prompt_seconds: float
    """Processor time of reading a text's prompt and of choosing"""
    choosing_seconds: float
    """Time of choosing keys and copying them, for a text"""


@dataclass(frozen=True, kw_only=True)
class DecodingRecord(JsonRecord):
    """Compressed caches measured while one model decodes; the first cell has the full cache."""

    version: ClassVar[int] = 1
    made_by: ClassVar[str] = "python -m pipelines.decode"
    model: str
    task: str
    description: str
    kernel: str
    prefix: int
    length: int
    units: int
    layers: int
    key_value_heads: int
    cells: tuple[DecodingCell, ...]
    run_on: RunOn

    def check(self) -> None:
        """Raises ValueError for content that no measurement writes."""
        if not self.cells or self.cells[0].cache != FULL:
            raise ValueError(f"its first cell is not of the {FULL}")
        for place, cell in enumerate(self.cells):
            if not 0 < cell.keep <= 1:
                raise ValueError(f"cells.{place}.keep is {cell.keep}; it must be in (0, 1]")
