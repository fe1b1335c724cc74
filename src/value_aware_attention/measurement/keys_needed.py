"""Numbers of keys: those that an output error takes, and those that match value-aware ones."""

import numpy as np
from numpy.typing import NDArray

from value_aware_attention.measurement.intervals import ratio_of_sums

__all__ = ["keys_needed", "matching_keys", "matching_keys_of_queries"]

Array = NDArray[np.float64]


def keys_needed(curve: Array, share: float) -> int | None:
    """Finds the smallest size with a relative error of at most `share`, else the last size.

    The last size is all keys, or value_dim + 1 value-aware ones: both are exact. None where the
    curve is not known (the interval of one unit, errors of a head whose outputs are all 0).
    """
    if np.isnan(curve).any():
        return None
    enough = curve <= share
    return int(enough.argmax()) + 1 if enough.any() else len(curve)


def matching_keys(oblivious: Array, aware: Array, squared_norm: Array) -> dict[str, int | None]:
    """Finds `keys`, the fewest keys by weight with at most the error of r value-aware ones.

    Errors are pooled: ||o - o~||^2 summed over the queries of a unit, (units, M) for 1 to M keys by
    weight, (units,) for the r value-aware keys, as ||o||^2. All M keys suffice by definition.

    `low` and `high` end the 95% interval over units: the numbers of keys at which the paired
    difference of the two relative errors, with the interval of `ratio_of_sums`, may be 0 (a test
    inverted, as in Fieller's theorem). None for a single unit.
    """
    ends = ratio_of_sums(oblivious - aware[:, None], squared_norm[:, None])
    return {
        name: keys_needed(curve, 0.0)
        for name, curve in zip(("keys", "low", "high"), ends, strict=True)
    }


def matching_keys_of_queries(
    oblivious: Array, aware: Array, seen: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Finds, for each query, the fewest keys by weight with at most its value-aware error.

    `oblivious` (queries, M) and `aware` (queries,) are ||o - o~||^2; the keys that a query sees,
    `seen` in number, suffice by definition.
    """
    enough = oblivious <= aware[:, None]
    enough[np.arange(len(enough)), seen - 1] = True
    return enough.argmax(axis=1) + 1
