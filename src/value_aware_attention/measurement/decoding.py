"""Measures what a model loses, and saves, where it decodes with compressed caches."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import process_time
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from value_aware_attention.decoding.compressed import CompressedCache, compressed_cache
from value_aware_attention.hugging_face import own_kernel
from value_aware_attention.measurement.cache_record import FULL, DecodingCell, DecodingRecord
from value_aware_attention.measurement.estimate import Array, estimate, mean
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.measurement.run_on import run_on, seconds_now
from value_aware_attention.measurement.task import Task, Text, measured_by_text

Arguments = Mapping[str, Any]
"""Those of `compressed_cache`, by name"""
Setting = tuple[str, float, Arguments | None]
"""Name of a cache, the share that it keeps, and `compressed_cache`'s arguments; None: full"""


@torch.inference_mode()
def measure_decoding(
    task: Task,
    caches: Mapping[str, Arguments],
    *,
    keep: Sequence[float],
    prefix: int,
    model_name: str,
    task_name: str,
    description: str = "",
    progress: bool = True,
) -> DecodingRecord:
    """Lets a causal model decode after the first `prefix` tokens of its texts, with every cache.

    `caches` has by name the arguments of `compressed_cache`, `method` among them; each is measured
    at every share of `keep`. The tokens after the prompt are read twice, one at a time: given as
    the text has them, and decoded freely, each the most likely one, wherever a label asks for it.
    A prompt's last query attends exactly; counted are the tokens after that. Raises ValueError for
    a prefix that leaves nothing to decode, and as `compressed_cache` does.
    """
    if task.metric != "perplexity":
        raise ValueError(f"the task's metric is {task.metric!r}; only causal models decode")
    if not 1 <= prefix < task.length - 1:
        raise ValueError(
            f"prefix is {prefix}; with {task.length} tokens it must be 1 to {task.length - 2}"
        )
    settings: list[Setting] = [(FULL, 1.0, None)]
    for share, (name, arguments) in product(keep, caches.items()):
        settings.append((name, share, {**arguments, "keep": share}))
    if len(settings) == 1:
        raise ValueError("there is nothing to compare: caches or keep is empty")
    full, *others = measured_by_text(task, settings, partial(_begin, task, prefix), progress)
    pairs = zip([full, *others], settings, strict=True)
    keys = others[-1].keys
    return DecodingRecord(
        model=model_name, task=task_name, description=description,
        kernel=type(own_kernel(task.model)).__name__.lower(), prefix=prefix, length=task.length,
        units=len(full.kl), layers=keys.shape[1], key_value_heads=keys.shape[2],
        cells=tuple(result.cell(setting, prefix, full) for result, setting in pairs),
        run_on=run_on(task.device.type),
    )  # fmt: skip


def _begin(task: Task, prefix: int, text: Text) -> "Callable[[Setting], _Result]":
    """Lets the full cache decode a text; returns the function that measures another on it."""
    full = _Decoded.of(task, text, prefix, None)

    def measured(setting: Setting) -> _Result:
        _, _, arguments = setting
        decoded = _Decoded.of(task, text, prefix, arguments) if arguments else full
        return decoded.compared(full)

    return measured


@dataclass(frozen=True)
class _Result:
    """Holds the measurements of one cache on some units; arrays are by unit, or by text."""

    kl: Array
    nats: Array
    right: Array
    same: Array
    keys: Array  # (texts, layers, heads)
    bytes: Array
    full_bytes: Array
    token: Array  # median processor seconds
    prompt: Array
    choosing: Array

    def cell(self, setting: Setting, prefix: int, full: "_Result") -> DecodingCell:
        name, share, _ = setting
        return DecodingCell(
            cache=name, keep=share, r=round(share * prefix),
            kl=mean(self.kl), nats=mean(self.nats), right=mean(self.right, 1.0),
            same=mean(self.same, 1.0),
            keys=tuple(map(tuple, self.keys.mean(axis=0).tolist())),
            bytes=int(self.bytes.mean()), full_bytes=int(self.full_bytes.mean()),
            milliseconds=1e3 * float(np.median(self.token)),
            time=estimate(self.token, full.token, least=0.0),
            prompt_seconds=float(np.median(self.prompt)),
            choosing_seconds=float(np.median(self.choosing)),
        )  # fmt: skip


@dataclass(frozen=True)
class _Decoded:
    """Holds what one cache decoded of a text, with tokens given and freely, and its costs."""

    forced: Float[Tensor, "B N E"]  # logits
    likeliest: Int[Tensor, "B N"]  # next tokens, decoded freely
    labels: Int[Tensor, "B N"]  # after the prompt
    report: CompressedCache | None
    bytes: int  # of the cache that the prompt filled
    prompt: float  # processor seconds
    tokens: list[float]  # likewise, of each

    @classmethod
    def of(cls, task: Task, text: Text, prefix: int, arguments: Arguments | None) -> "_Decoded":
        """Reads the prompt once, and the tokens after it over two copies of its cache."""
        model = task.model
        tokens, labels = (x.to(task.device) for x in text.take(range(len(text.inputs))))
        with compressed_cache(model, **arguments) if arguments else nullcontext() as report:
            cache = DynamicCache(config=model.config)
            begun = _time(tokens)
            model(tokens[:, :prefix], past_key_values=cache, use_cache=True)
            prompt = _time(tokens) - begun
            full: list[Any] = [layer for layer in cache.layers if type(layer) is DynamicLayer]
            held = sum(x.keys.nbytes + x.values.nbytes for x in full if x.keys is not None)
            forced, seconds = _decode(model, tokens, None, prefix, deepcopy(cache))
            # before its later choices are made, and timed, once more
            first = copy(report.caches[0]) if report and report.caches else None
            free, more = _decode(model, tokens, labels, prefix, cache)
        if report is not None and not report.caches:
            raise ValueError(
                "no layer with full attention fills a cache; there is nothing to compress"
            )
        likeliest = free.argmax(dim=-1)
        spent = [*seconds, *more]
        return cls(forced, likeliest, labels[:, prefix:], first, held, prompt, spent)

    def compared(self, full: "_Decoded") -> _Result:
        """Compares it with the full cache."""
        asked, rows = self.labels != IGNORED, len(self.labels)
        here, there = (x.forced.log_softmax(dim=-1) for x in (self, full))
        far = kl_div(here, there, reduction="none", log_target=True).sum(dim=-1)
        nats = cross_entropy(here.mT, self.labels, ignore_index=IGNORED, reduction="none")
        report, held = self.report, self.bytes

        def of_asked(x: Tensor) -> Array:
            average = (x * asked).sum(dim=1) / asked.sum(dim=1).clamp_min(1)
            return average.double().cpu().numpy()

        return _Result(
            kl=far.mean(dim=1).double().cpu().numpy(),
            nats=of_asked(nats),
            right=of_asked(self.likeliest == self.labels),
            same=of_asked(self.likeliest == full.likeliest),
            keys=np.zeros((1, 0, 0)) if report is None else report.keys[None].double().numpy(),
            bytes=np.array([(report.bytes_after if report else held) / rows]),
            full_bytes=np.array([(report.bytes_before if report else held) / rows]),
            token=np.array([np.median(self.tokens)]),
            prompt=np.array([self.prompt / rows]),
            choosing=np.array([report.seconds / rows if report else 0.0]),
        )


def _decode(
    model: PreTrainedModel,
    tokens: Int[Tensor, "B L"],
    labels: Int[Tensor, "B L"] | None,
    prefix: int,
    cache: DynamicCache,
) -> tuple[Float[Tensor, "B N E"], list[float]]:
    """Reads token by token; where `labels` ask for one, the token just decoded. Times each."""
    logits: list[Tensor] = []
    seconds: list[float] = []
    for at in range(prefix, tokens.shape[1]):
        token = tokens[:, at]
        if labels is not None and logits:
            asks = labels[:, at - 1] != IGNORED
            token = torch.where(asks, logits[-1].argmax(dim=-1), token)
        begun = _time(tokens)
        output = model(token[:, None], past_key_values=cache, use_cache=True)
        seconds.append(_time(tokens) - begun)
        logits.append(output.logits[:, -1].float())
    return torch.stack(logits, dim=1), seconds


def _time(x: Tensor) -> float:
    """Reads the process's clock; on a GPU, when its work is done, that of the wall."""
    return seconds_now() if x.is_cuda else process_time()
