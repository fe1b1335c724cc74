"""Scores a guess that reads no text, below which an end metric says nothing of the keys."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from value_aware_attention.measurement.measure import end_metric
from value_aware_attention.measurement.record import Baseline, EndMetric
from value_aware_attention.measurement.task import Task, UnitSums
from value_aware_attention.measurement.windows import vocabulary_size

CHANCE = "chance"


def chance(task: Task, exact: EndMetric) -> dict[str, Baseline]:
    """Scores the guess on the targets of `exact`, paired with it; {} for a cosine, which has none.

    It is a token drawn uniformly for a perplexity, for an error the most frequent of the targets.
    """
    if task.metric == "cosine":
        return {}
    targets = [row[row >= 0] for text in task.texts for row in text.labels]
    sums = UnitSums(_losses(targets, task), np.array(exact.unit_counts))
    measured = UnitSums(np.array(exact.unit_totals), sums.counts)
    return {CHANCE: Baseline(**end_metric(sums, measured, task.metric))}


def _losses(targets: Sequence[torch.Tensor], task: Task) -> np.ndarray:
    if task.metric == "perplexity":
        return np.array([len(row) * math.log(vocabulary_size(task.model)) for row in targets])
    likeliest = torch.cat(list(targets)).mode().values
    return np.array([float((row != likeliest).sum()) for row in targets])
