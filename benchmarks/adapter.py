"""What the adapter costs: a forward pass with `Exact` through it, beside eager attention.

    python -m benchmarks.adapter            # about two minutes on two cores
    python -m benchmarks.adapter --quick    # fewer rounds; writes nothing

Writes results/benchmarks/adapter.json and .md. Models have the shapes of roberta-base and of a
llama with grouped-query attention, but few layers and random weights, in fp32. Each round times
eager, Exact through the adapter, eager again, and takes the ratio of the second to the mean of the
other two, so that a machine that slows down slows both; the median of the rounds is shown with its
quartiles. "Text" is one sequence of 512 tokens; "padded" are two, the second of 384; "next token"
is one query after 512 cached keys.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
)

from pipelines.provenance import run_on
from value_aware_attention.approximations import Exact
from value_aware_attention.hugging_face import replace_attention

TOKENS, LAYERS, VOCABULARY = 512, 2, 1000
ROUNDS, QUICK_ROUNDS = 31, 5
FOLDER = Path("results/benchmarks")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One model and input; times are medians in milliseconds, the ratio is through / eager."""

    model: str
    input: str
    eager: float
    through: float
    ratio: float
    ratio_low: float
    ratio_high: float
    largest_difference: float


def main() -> None:
    """Measures, prints the table, and writes it unless asked for --quick."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args().quick
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with torch.inference_mode():
        rows = [
            measure(name, what, model, call, rounds)
            for name, model in (("roberta-base", roberta()), ("llama, 4 queries a key", llama()))
            for what, call in tqdm(calls(model).items(), desc=name)
        ]
    record = {"run_on": run_on(), "layers": LAYERS, "rounds": rounds}
    record |= {"rows": [asdict(row) for row in rows]}
    print(page(record))
    if not quick:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "adapter.json").write_text(json.dumps(record, indent=1) + "\n")
        (FOLDER / "adapter.md").write_text(page(record))


def roberta() -> PreTrainedModel:
    """roberta-base with few layers."""
    config = RobertaConfig(vocab_size=VOCABULARY, num_hidden_layers=LAYERS)
    config.max_position_embeddings = TOKENS + 2
    return RobertaModel(config, add_pooling_layer=False).eval()


def llama() -> PreTrainedModel:
    """A llama of width 1024 with 16 heads of 64, whose 4 key heads serve 4 queries each."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    return LlamaModel(config).eval()


def calls(model: PreTrainedModel) -> dict[str, Call]:
    """What is timed: forward passes that return the last hidden states of visible tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCABULARY, (2, TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 128]])).long()
    found: dict[str, Call] = {
        "text": partial(_forward, model, tokens[:1]),
        "padded": partial(_forward, model, tokens, mask),
    }
    if isinstance(model, LlamaModel):
        found["next token"] = _next_token(model, tokens[:1])
    return found


def _forward(model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return hidden[slice(None) if mask is None else mask.bool()]


def _next_token(model: PreTrainedModel, tokens: Tensor) -> Call:
    cache = model(input_ids=tokens, past_key_values=DynamicCache()).past_key_values

    def call() -> Tensor:
        output = model(input_ids=tokens[:, :1], past_key_values=cache).last_hidden_state
        cache.crop(-1)  # so that every call finds the same past
        return output

    return call


def measure(name: str, what: str, model: PreTrainedModel, call: Call, rounds: int) -> Row:
    """Eager and through the adapter, in turn."""
    model.set_attn_implementation("eager")
    through = partial(replace_attention, model, Exact())
    outputs = []
    for context in (nullcontext, through):
        with context():
            outputs.append(call())
    times = [
        (seconds(call, nullcontext()), seconds(call, through()), seconds(call, nullcontext()))
        for _ in range(rounds)
    ]
    ratios = [2 * second / (first + third) for first, second, third in times]
    low, _, high = quantiles(ratios, n=4)
    return Row(
        model=name,
        input=what,
        eager=1e3 * median(first for first, _, _ in times),
        through=1e3 * median(second for _, second, _ in times),
        ratio=median(ratios),
        ratio_low=low,
        ratio_high=high,
        largest_difference=float((outputs[0] - outputs[1]).abs().max()),
    )


def seconds(call: Call, context: AbstractContextManager[Any]) -> float:
    """Of one call, without what entering the context takes."""
    with context:
        start = perf_counter()
        call()
        return perf_counter() - start


def page(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    on = record["run_on"]
    lines = [
        "# The adapter: `Exact` through it, beside eager attention",
        "",
        f"{record['layers']} layers, {TOKENS} tokens, fp32, forward, {record['rounds']} paired "
        f"rounds; {on['hardware']}, {on['threads']} threads; "
        f"versions: {json.dumps(on['versions'])}.",
        "",
        "| model | input | eager ms | through the adapter ms | ratio | quartiles "
        "| largest difference |",
        "|:--|:--|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['model']} | {row['input']} | {row['eager']:.1f} | {row['through']:.1f} "
        f"| {row['ratio']:.2f} | {row['ratio_low']:.2f}-{row['ratio_high']:.2f} "
        f"| {row['largest_difference']:.0e} |"
        for row in record["rows"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
