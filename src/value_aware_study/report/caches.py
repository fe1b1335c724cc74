"""Cache methods in the report: which keys a cache should keep."""

from collections.abc import Sequence

from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_study.report.exhibit import Section
from value_aware_study.report.exhibits import cache_gain, cache_methods

__all__ = ["cache_section"]

LEAD = (
    "One set of keys for all later queries: what a compressed key-value cache keeps. Every method "
    "keeps as many keys and is judged on queries that it has not seen."
)


def cache_section(records: Sequence[CacheRecord]) -> Section:
    """The section of these records, one a model and its texts."""
    found = [
        *cache_methods.by_text(records),
        cache_methods.answers(records),
        cache_gain.gain(records),
        cache_methods.gaps(records),
        cache_gain.agreement(records),
        cache_methods.sharpness(records),
        cache_methods.every_cell(records),
    ]
    return Section(
        "caches",
        "Caches",
        LEAD,
        [exhibit for exhibit in found if exhibit is not None],
    )
