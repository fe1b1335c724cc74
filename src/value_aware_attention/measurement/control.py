"""Builds the control of a measurement: the same architecture with random weights, on one text."""

import logging
from collections.abc import Callable
from copy import copy, deepcopy

import torch
from transformers import PreTrainedModel

from value_aware_attention.measurement.record import Record
from value_aware_attention.measurement.task import Task


def random_weights(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Builds a model of the same class and config with the weights that its training starts from.

    They are drawn on the CPU by `seed`; the global generators stay as they are. Dtype and device
    are those of `model`. Raises ValueError for a quantised model, and what the class raises where
    a config alone does not build it.
    """
    if getattr(model, "is_quantized", False):
        raise ValueError("its weights are quantised, and random ones would not be")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = type(model)(deepcopy(model.config))
    made.to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]
    return made.eval()


def control(task: Task, measured: Callable[[Task], Record], seed: int = 0) -> Record | None:
    """Measures `task` with random weights; None, with a line in the log, where that fails."""
    beside = copy(task)
    beside.exact = {}  # outputs of the trained model
    try:
        beside.model = random_weights(task.model, seed)
        return measured(beside)
    except Exception as error:  # a class may raise any kind, and the device may be full
        said = " ".join(str(error).split()) or type(error).__name__
        logging.getLogger(__name__).warning(f"no control with random weights: {said}")
        return None
