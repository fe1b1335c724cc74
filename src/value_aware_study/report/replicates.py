"""The range over seeds: causal models trained again (conf/replicate), beside the first training."""

from collections.abc import Sequence

import pandas as pd

from value_aware_attention.measurement.record import Record

RANGE = ("trained_low", "trained_high")
"""The columns of the smallest and the largest value over the trainings of a model."""


def is_replicate(record: Record, first: Record) -> bool:
    """Whether a causal model is another training of the first: causal_elu_second of causal_elu."""
    return (
        record.task == "causal"
        and record.kernel == first.kernel
        and record.model.startswith(f"{first.model}_")
    )


def ranged(frame: pd.DataFrame) -> list[str]:
    """The columns of the range, where some row has one."""
    return [name for name in RANGE if name in frame and frame[name].notna().any()]


def with_range(frame: pd.DataFrame, same: Sequence[str], value: str) -> pd.DataFrame:
    """The first of the rows that are the `same`, with `RANGE` of their values.

    NaN where there is one row of a kind; without the columns where that is so of all.
    """
    found = frame.groupby(list(same), dropna=False)[value]
    several = found.transform("size") > 1
    if not several.any():
        return frame
    ends = {name: found.transform(end) for name, end in zip(RANGE, ("min", "max"), strict=True)}
    of_several = {name: values.where(several) for name, values in ends.items()}
    return frame.assign(**of_several).drop_duplicates(list(same), ignore_index=True)
