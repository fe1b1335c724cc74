"""Measures baselines of a trained model: random weights, attention switched off, and chance."""

import logging
import math
from collections.abc import Callable
from copy import copy, deepcopy

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from value_aware_attention.measurement.measure import end_metric
from value_aware_attention.measurement.task import Task, UnitSums
from value_aware_attention.measurement.windows import vocabulary_size
from value_aware_attention.records.record import Baseline, EndMetric, Record


def random_weights(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Builds a model of the same class and config, with the weights at the start of training.

    The weights are drawn on the CPU from `seed`; global generators stay unchanged. Dtype and device
    are those of `model`. Raises ValueError for a quantised model, and what the class raises if a
    config alone cannot build it.
    """
    if getattr(model, "is_quantized", False):
        raise ValueError("its weights are quantised, and random ones would not be")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = type(model)(deepcopy(model.config))
    return made.to(device=model.device, dtype=model.dtype).eval()  # type: ignore[call-arg]


def control(task: Task, measured: Callable[[Task], Record], seed: int = 0) -> Record | None:
    """Measures `task` with random weights. If that fails, logs a line and returns None."""
    beside = copy(task)
    beside.exact = {}  # drops outputs of the trained model
    try:
        beside.model = random_weights(task.model, seed)
        return measured(beside)
    except Exception as error:  # a class may raise anything, and the device may be full
        reason = " ".join(str(error).split()) or type(error).__name__
        logging.getLogger(__name__).warning(f"no control with random weights: {reason}")
        return None


class ZeroOutput(nn.Module):
    """Replaces every attention output by 0: attention switched off."""

    def forward(
        self,
        query: Float[Tensor, "*#batch N D"],
        key: Float[Tensor, "*#batch M D"],
        value: Float[Tensor, "*#batch M V"],
        **options: object,
    ) -> Float[Tensor, "*batch N V"]:
        """Returns zeros in the shape of attention's output."""
        return value.new_zeros(*query.shape[:-1], value.shape[-1])


def chance(task: Task, exact: EndMetric) -> dict[str, Baseline]:
    """Scores a guess on the targets of `exact`, paired with it; {} for a cosine, without a guess.

    For a perplexity it is a uniformly drawn token, for an error the most frequent target.
    """
    if task.metric == "cosine":
        return {}
    targets = [row[row >= 0] for text in task.texts for row in text.labels]
    if task.metric == "perplexity":
        losses = [len(row) * math.log(vocabulary_size(task.model)) for row in targets]
    else:
        likeliest = torch.cat(targets).mode().values
        losses = [float((row != likeliest).sum()) for row in targets]
    sums = UnitSums(np.array(losses), np.array(exact.unit_counts))
    measured = UnitSums(np.array(exact.unit_totals), sums.counts)
    return {"chance": Baseline(**end_metric(sums, measured, task.metric))}
