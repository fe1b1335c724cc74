"""Means over the trainings of a model, with the interval that the verdicts on claims have."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import pandas as pd

from value_aware_attention.measurement.estimate import Array, Estimate, ratio_of_sums
from value_aware_study.report.claim import Spread, margin, quantile
from value_aware_study.report.words import TRAINING


def mean_over_trainings(means: Sequence[float], errors: Sequence[float], units: int) -> Estimate:
    """Averages the trainings' means; the 95% interval covers text and training.

    Of one training it covers the text. `errors` are standard errors over the units of text, which
    the trainings share. This is the one place of the rule for all that is shown beside the claims
    (docs/reproduce.md).
    """
    error = math.sqrt(fmean(error**2 for error in errors))
    spread = Spread(stdev(means), len(means)) if len(means) > 1 else None
    mean, half = fmean(means), margin(error, units, spread, len(means))
    return Estimate(value=mean, low=mean - half, high=mean + half)


def mean_loss(trainings: Sequence[tuple[Array, Array]]) -> Estimate:
    """Averages losses a target, or their changes, from sums and counts by unit of each training."""
    ends = [map(float, ratio_of_sums(totals, counts)) for totals, counts in trainings]
    means, _, highs = zip(*ends, strict=True)
    units = len(trainings[0][1])
    errors = [(high - mean) / quantile(units) for mean, high in zip(means, highs, strict=True)]
    return mean_over_trainings(means, errors, units)


def averaged(
    frame: pd.DataFrame, same: Sequence[str], value: str, others: Sequence[str] = ()
) -> pd.DataFrame:
    """Averages rows of several trainings that agree in the `same` columns, to one row each.

    Means are arithmetic, of `value` and of `others`. The new `low` and `high` of `value` follow
    from those over the text of each training, whose name is in `training` and whose units are in
    `units`; these two columns go. Columns `training_<name>` hold the single values.
    """
    if frame["training"].nunique() > 1:
        groups = frame.groupby(list(same), sort=False, dropna=False)
        frame = pd.DataFrame(_mean(group, value, others) for _, group in groups)
    return frame.drop(columns=["training", "units"])


def _mean(group: pd.DataFrame, value: str, others: Sequence[str]) -> dict[str, object]:
    numbers, units = group[[value, "low", "high", *others]].astype(float), int(group["units"].max())
    errors = (numbers["high"] - numbers["low"]) / 2 / quantile(units)
    mean = mean_over_trainings(numbers[value].tolist(), errors.tolist(), units)
    return (
        group.iloc[0].to_dict()
        | numbers.mean(skipna=False).to_dict()
        | {"low": mean.low, "high": mean.high}
        | dict(zip(TRAINING + group["training"], numbers[value], strict=True))
    )
