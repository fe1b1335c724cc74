"""Measures what a model loses, and saves, where it decodes with compressed caches."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from value_aware_attention.decoding.compressed import CompressedCache, compressed_cache
from value_aware_attention.hugging_face import own_kernel
from value_aware_attention.measurement.cache_record import FULL, DecodingCell, DecodingRecord
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.measurement.record import Estimate, estimate
from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.measurement.task import Task, joined

Array = NDArray[np.float64]


@torch.inference_mode()
def measure_decoding(
    task: Task,
    caches: Mapping[str, Mapping[str, Any]],
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
    named = [(name, share) for share in keep for name in caches]
    if not named:
        raise ValueError("there is nothing to compare: caches or keep is empty")
    settings = [None, *({**caches[name], "keep": share} for name, share in named)]
    found: list[list[_Part]] = [[] for _ in settings]
    with tqdm(total=task.parts * len(settings), disable=None if progress else True) as bar:
        for part in range(task.parts):
            full = None
            for parts, setting in zip(found, settings, strict=True):
                decoded = _Decoded.of(task, part, prefix, setting)
                full = full or decoded
                parts.append(decoded.compared(full))
                bar.update()
    every = [joined(parts) for parts in found]
    cells = [
        part.cell(name, share, prefix, every[0])
        for part, (name, share) in zip(every, [(FULL, 1.0), *named], strict=True)
    ]
    keys = cells[-1].keys
    return DecodingRecord(
        model=model_name, task=task_name, description=description,
        kernel=type(own_kernel(task.model)).__name__.lower(), prefix=prefix, length=task.length,
        units=len(every[0].kl), layers=len(keys), key_value_heads=len(keys[0]),
        cells=tuple(cells), run_on=run_on(task.device.type),
    )  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """Holds the measurements of one cache on some units; arrays are by unit, or by part."""

    kl: Array
    nats: Array
    right: Array
    same: Array
    keys: Array
    """(parts, layers, heads)"""
    bytes: Array
    full_bytes: Array
    token: Array
    """Median processor seconds of a token (parts)"""
    prompt: Array
    choosing: Array

    def cell(self, name: str, keep: float, prefix: int, full: "_Part") -> DecodingCell:
        def share(x: Array, most: float = np.inf) -> Estimate:
            return estimate(x, np.ones_like(x), least=0.0, most=most)

        return DecodingCell(
            cache=name, keep=keep, r=round(keep * prefix),
            kl=share(self.kl), nats=share(self.nats), right=share(self.right, 1.0),
            same=share(self.same, 1.0),
            keys=tuple(map(tuple, self.keys.mean(axis=0).tolist())),
            bytes=int(self.bytes.mean()), full_bytes=int(self.full_bytes.mean()),
            milliseconds=1e3 * float(np.median(self.token)),
            time=estimate(self.token, full.token, least=0.0),
            prompt_seconds=float(np.median(self.prompt)),
            choosing_seconds=float(np.median(self.choosing)),
        )  # fmt: skip


@dataclass(frozen=True)
class _Read:
    logits: Float[Tensor, "B N E"]
    """Of the positions after the prompt"""
    own: Int[Tensor, "B N"]
    """The most likely next token at each"""
    report: CompressedCache | None
    bytes: int
    """Of the cache that the prompt filled"""
    prompt: float
    tokens: list[float]
    """Processor seconds of the prompt, and of each token"""


@dataclass(frozen=True)
class _Decoded:
    """Holds what one cache decoded of a part's texts, with tokens given and freely."""

    given: _Read
    free: _Read
    wanted: Int[Tensor, "B N"]
    """The labels after the prompt"""

    @classmethod
    def of(cls, task: Task, part: int, prefix: int, setting: dict[str, Any] | None) -> Self:
        text = task.texts[part]
        tokens, labels = (x.to(task.device) for x in text.take(range(len(text.inputs))))
        given = _read(task.model, tokens, None, prefix, setting)
        free = _read(task.model, tokens, labels, prefix, setting)
        return cls(given, free, labels[:, prefix:])

    def compared(self, full: "_Decoded") -> _Part:
        """Compares it with the full cache."""
        asked, rows = self.wanted != IGNORED, len(self.wanted)
        here, there = (x.given.logits.log_softmax(dim=-1) for x in (self, full))
        far = kl_div(here, there, reduction="none", log_target=True).sum(dim=-1)
        nats = cross_entropy(here.mT, self.wanted, ignore_index=IGNORED, reduction="none")
        report, held = self.given.report, self.given.bytes

        def of_asked(x: Tensor) -> Array:
            mean = (x * asked).sum(dim=1) / asked.sum(dim=1).clamp_min(1)
            return mean.double().cpu().numpy()

        return _Part(
            kl=far.mean(dim=1).double().cpu().numpy(),
            nats=of_asked(nats),
            right=of_asked(self.free.own == self.wanted),
            same=of_asked(self.free.own == full.free.own),
            keys=np.zeros((1, 0, 0)) if report is None else report.keys[None].double().numpy(),
            bytes=np.array([(report.bytes_after if report else held) / rows]),
            full_bytes=np.array([(report.bytes_before if report else held) / rows]),
            token=np.array([np.median([*self.given.tokens, *self.free.tokens])]),
            prompt=np.array([min(self.given.prompt, self.free.prompt) / rows]),
            choosing=np.array([report.seconds / rows if report else 0.0]),
        )


def _read(
    model: Any,
    tokens: Int[Tensor, "B L"],
    labels: Int[Tensor, "B L"] | None,
    prefix: int,
    setting: dict[str, Any] | None,
) -> _Read:
    """Reads a prompt, then token by token; where `labels` ask for one, the token just decoded."""
    options = dict(setting or {})
    method = options.pop("method", None)
    context = nullcontext() if setting is None else compressed_cache(model, method, **options)
    found: list[Tensor] = []
    seconds: list[float] = []
    with context as report:
        cache = DynamicCache(config=model.config)
        begun = _time(tokens)
        model(tokens[:, :prefix], past_key_values=cache, use_cache=True)
        prompt = _time(tokens) - begun
        full: list[Any] = [x for x in cache.layers if type(x) is DynamicLayer]
        held = sum(x.keys.nbytes + x.values.nbytes for x in full if x.keys is not None)
        for at in range(prefix, tokens.shape[1]):
            token = tokens[:, at]
            if labels is not None and found:
                token = torch.where(labels[:, at - 1] == IGNORED, token, found[-1].argmax(dim=-1))
            begun = _time(tokens)
            output = model(token[:, None], past_key_values=cache, use_cache=True)
            seconds.append(_time(tokens) - begun)
            found.append(output.logits[:, -1].float())
    logits = torch.stack(found, dim=1)
    if report is not None and not report.caches:
        raise ValueError("no layer with full attention fills a cache; there is nothing to compress")
    one = None if report is None else report.caches[0]
    return _Read(logits, logits.argmax(dim=-1), one, held, prompt, seconds)


def _time(x: Tensor) -> float:
    """Reads the process's clock; on a GPU, when its work is done, that of the wall."""
    if not x.is_cuda:
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()
