"""Times decoding with compressed caches beside the full one, and measures their memory.

    python -m benchmarks.decoding            # some minutes on one core
    python -m benchmarks.decoding --quick    # 64 tokens; writes nothing

A Llama of 4 layers, 8 heads on 4 key-value heads of 64 numbers and width 512, random weights, fp32,
one thread, one text of random tokens, an eighth of the keys kept. Every cache decodes `TOKENS`
tokens in turn, in paired rounds, processor seconds; each contender has a copy of the model. With
"one budget" all heads of the model share the keys, so they keep different numbers. The attention
over pages is then also timed beside a call of scaled_dot_product_attention for each head. Peak
memory is of fresh processes that read the prompt and, for a compressed cache, choose keys. Writes
results/benchmarks/decoding.json and .md.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from time import process_time
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.memory import in_fresh_process, resident_peak
from benchmarks.record import HOW, finish, header, markdown, options, setting
from benchmarks.rounds import cells, in_rounds, ratio, seconds
from value_aware_attention import caches
from value_aware_attention.hugging_face import compressed_cache
from value_aware_attention.kernels import Exponential

KEEP, ROWS, TOKENS = 1 / 8, 128, 4
RAGGED = "ValueAware, one budget"
PAGES, CALLS = "pages", "a call for each head"
PROMPTS = (2048, 8192, 16384)
FULL = "full cache"
CONTENDERS: dict[str, dict[str, Any]] = {
    "SnapKV": {
        "method": lambda r: caches.ObservedAttention(r, pool=7),
        "observed": "last",
        "pool": None,
    },
    "ValueAware": {"method": caches.ValueAware, "observed": "continued", "pool": None},
    "ValueAware, refit": {
        "method": lambda r: caches.ValueAware(r, refit=True),
        "observed": "continued",
        "pool": None,
    },
    RAGGED: {
        "method": caches.ValueAware,
        "observed": "continued",
        "pool": "model",
    },
}
MIB = 2**20


def main() -> None:
    """Measures, prints the tables, and writes them unless asked for --quick."""
    arguments = options(__doc__, limit=60.0).parse_args()
    torch.set_num_threads(1)
    prompts = (64,) if arguments.quick else PROMPTS
    rows = [measured(tokens, arguments.seconds) for tokens in tqdm(prompts)]
    record = header("decoding") | {"keep": KEEP, "rows_observed": ROWS, "rows": rows}
    finish("decoding", record, page(record), keep=not arguments.quick)


def llama(tokens: int) -> LlamaForCausalLM:
    """Builds the model, with room for a prompt and the tokens that are decoded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1000, max_position_embeddings=2 * tokens,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@contextmanager
def filled(model: LlamaForCausalLM, name: str, tokens: int) -> Iterator[tuple[Any, float, Any]]:
    """Reads a prompt; yields the model's cache, the seconds that it took, and the report."""
    prompt = torch.randint(1000, (1, tokens))
    with ExitStack() as opened:
        report = None
        if name != FULL:
            context = compressed_cache(model, keep=KEEP, rows=ROWS, **CONTENDERS[name])
            report = opened.enter_context(context)
        cache = DynamicCache(config=model.config)
        begun = process_time()
        with torch.inference_mode():
            model.model(prompt, past_key_values=cache)
        yield cache, process_time() - begun, report


def measured(tokens: int, limit: float) -> dict[str, Any]:
    """Measures every cache of one length of the prompt."""
    names = [FULL, *CONTENDERS]
    works: dict[str, Callable[[], float]] = {}
    row: dict[str, Any] = {"tokens": tokens, "seconds_of_prompt": {}, "bytes": {}}
    with ExitStack() as opened:
        for name in names:
            model = llama(tokens)
            cache, spent, report = opened.enter_context(filled(model, name, tokens))
            row["seconds_of_prompt"][name] = spent
            whole = sum(x.nbytes for y in cache.layers for x in (y.keys, y.values))
            row["bytes"][name] = whole if report is None else report.caches[0].bytes_after
            works[name] = lambda model=model, cache=cache: decoded(model, cache)  # type: ignore[misc]
            if name == RAGGED:
                ways = {PAGES: partial(over_pages, cache), CALLS: by_head(cache)}
                clocks = {way: partial(seconds, work, process_time) for way, work in ways.items()}
                row["ragged"] = asdict(ratio(in_rounds(clocks, [(PAGES, CALLS)], limit), *ways))
        pairs = [(name, FULL) for name in CONTENDERS]
        spent = in_rounds(works, pairs, limit)
    row["ratios"] = {name: asdict(ratio(spent, name, FULL)) for name in CONTENDERS}
    row["ms"] = {name: 1e3 * sorted(x)[len(x) // 2] / TOKENS for name, x in spent.items()}
    row["peak"] = {name: in_fresh_process(peak, name, tokens) for name in names}
    return row


def decoded(model: LlamaForCausalLM, cache: Any) -> float:
    """Decodes tokens and removes them again; returns the processor seconds."""
    begun = process_time()
    with torch.inference_mode():
        for token in range(TOKENS):
            model.model(torch.tensor([[token]]), past_key_values=cache)
    spent = process_time() - begun
    cache.crop(-TOKENS)
    return spent


def paged(cache: Any) -> list[Any]:
    """Returns the layers whose heads keep different numbers of keys."""
    return [layer for layer in cache.layers if layer.pages is not None]


def over_pages(cache: Any) -> None:
    """Attends once in every layer over the pages of heads."""
    query = torch.ones(4, 2, 64)
    for layer in paged(cache):
        layer.pages.state(query, Exponential()).output()


def by_head(cache: Any) -> Callable[[], None]:
    """Copies the keys of each head; returns a function that attends with one call for each head."""
    heads, query = [], torch.ones(1, 2, 1, 64)
    for pages in (layer.pages for layer in paged(cache)):
        for head in range(pages.caches):
            slots = pages.cache == head
            heads.append([x[slots].flatten(0, 1)[None, None] for x in (pages.key, pages.value)])

    def attend() -> None:
        for key, value in heads:
            scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return attend


def peak(name: str, tokens: int) -> float:
    """Returns the MiB by which reading a prompt raises a process's memory at its peak."""
    torch.set_num_threads(1)
    model = llama(tokens)

    def read(length: int) -> None:
        with filled(model, name, length):
            pass

    read(64)  # imports and allocations that every process makes once
    return resident_peak(partial(read, tokens))


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    rows, names = record["rows"], [FULL, *CONTENDERS]
    times = [
        [row["tokens"], f"{row['ms'][FULL]:.1f}", name, f"{row['ms'][name]:.1f}", *cells(timing)]
        for row in rows
        for name, timing in row["ratios"].items()
    ]
    ragged = [[row["tokens"], *cells(row["ragged"])] for row in rows]
    bytes_held = [
        [row["tokens"], *(f"{row['bytes'][name] / MIB:.2f}" for name in names)]
        + [f"{row['bytes'][name] / row['bytes'][FULL]:.1%}" for name in names[1:]]
        for row in rows
    ]
    prompts = [
        [row["tokens"], *(f"{row['seconds_of_prompt'][name]:.1f}" for name in names)]
        for row in rows
    ]
    peaks = [
        [row["tokens"], *(f"{row['peak'][name]:,.0f}" for name in names)]
        + [f"{row['peak'][name] / row['peak'][FULL]:.2f}" for name in names[1:]]
        for row in rows
    ]
    ratios = [f"{name}, of the full cache" for name in names[1:]]
    head = ["tokens", "full cache, ms a token", "cache", "ms a token", "ratio", "", "rounds"]
    return (
        "# Decoding with a compressed cache\n\n"
        f"A Llama of 4 layers, 8 heads on 4 key-value heads of 64 numbers, random weights, fp32, "
        f"one thread; {KEEP:.1%} of a prompt's keys are kept. {setting(record)}\n\n"
        f"## Processor time of a token\n\n{HOW}\n\n{markdown(head, times)}\n\n"
        f"## Heads of different sizes\n\nProcessor time of attention in all layers over the keys "
        f"of {RAGGED!r}, whose heads lie in pages, beside a call of "
        f"scaled_dot_product_attention for each head over the same slots.\n\n"
        f"{markdown(['tokens', 'pages, of a call for each head', '', 'rounds'], ragged)}\n\n"
        f"## MiB of the prompt's keys and values\n\n"
        f"{markdown(['tokens', *names, *ratios], bytes_held)}\n\n"
        f"## Processor seconds of reading the prompt and choosing\n\n"
        f"{markdown(['tokens', *names], prompts)}\n\n"
        f"## Peak MiB of reading the prompt and choosing\n\n"
        f"{markdown(['tokens', *names, *ratios], peaks)}\n"
    )


if __name__ == "__main__":
    main()
