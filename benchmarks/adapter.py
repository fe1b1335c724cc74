"""Times a forward pass with `Exact` through the adapter, beside the model's own attention.

    python -m benchmarks.adapter                # at most six minutes
    python -m benchmarks.adapter --seconds 5    # at most 5 seconds a row, but three rounds
    python -m benchmarks.adapter --quick        # 16 tokens; writes nothing

Writes results/benchmarks/adapter.json and .md. Models have the shapes of roberta-base and of a
llama with grouped-query attention, but few layers and random weights, in fp32. In paired rounds:
`Exact` through the adapter, transformers' eager attention, which holds all weights, and "fused",
its sdpa, which `Exact` uses too. "Text" is one sequence of 512 tokens; "padded" is two sequences,
the second with 384 tokens; "next token" is one query after 512 cached keys.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from statistics import median
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

from benchmarks.record import HOW, finish, header, markdown, options, setting
from benchmarks.rounds import cells, in_rounds, ratio, seconds
from value_aware_attention.approximations import Exact
from value_aware_attention.hugging_face import replace_attention

TOKENS, LAYERS, VOCABULARY = 512, 2, 1000
SECONDS = 60.0
OWN = {"eager": "eager", "fused": "sdpa"}
"""Names of the model's own attention, here and in transformers."""
Call = Callable[[], Any]


def main() -> None:
    """Measures, prints the table, and writes it unless asked for --quick."""
    arguments = options(__doc__, SECONDS).parse_args()
    limit, tokens = (0.0, 16) if arguments.quick else (arguments.seconds, TOKENS)
    with torch.inference_mode():
        rows = [
            measure(name, read, model, call, limit)
            for name, model in (("roberta-base", roberta()), ("llama, 4 queries a key", llama()))
            for read, call in tqdm(calls(model, tokens).items(), desc=name)
        ]
    record = header("adapter") | {"layers": LAYERS, "tokens": tokens, "rows": rows}
    finish("adapter", record, page(record), keep=not arguments.quick)


def roberta() -> PreTrainedModel:
    """Builds a roberta-base with few layers."""
    config = RobertaConfig(vocab_size=VOCABULARY, num_hidden_layers=LAYERS)
    config.max_position_embeddings = TOKENS + 2
    return RobertaModel(config, add_pooling_layer=False).eval()


def llama() -> PreTrainedModel:
    """Builds a llama of width 1024 with 16 heads of 64, whose 4 key heads serve 4 queries each."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    return LlamaModel(config).eval()


def calls(model: PreTrainedModel, length: int = TOKENS) -> dict[str, Call]:
    """Returns forward passes to time, which give the last hidden states of visible tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCABULARY, (2, length), generator=generator)
    mask = (torch.arange(length) < torch.tensor([[length], [3 * length // 4]])).long()
    passes: dict[str, Call] = {
        "text": partial(_forward, model, tokens[:1]),
        "padded": partial(_forward, model, tokens, mask),
    }
    if isinstance(model, LlamaModel):
        passes["next token"] = _next_token(model, tokens[:1])
    return passes


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


def measure(
    name: str, read: str, model: PreTrainedModel, call: Call, limit: float
) -> dict[str, Any]:
    """Times a call through the adapter and with the model's own attention, in paired rounds."""
    model.set_attn_implementation(OWN["eager"])
    contexts = {"adapter": partial(replace_attention, model, Exact())}
    contexts |= {attention: partial(with_own, model, called) for attention, called in OWN.items()}
    outputs = []
    for context in contexts.values():
        with context():
            outputs.append(call())
    clocks = {key: partial(within, context, call) for key, context in contexts.items()}
    spent = in_rounds(clocks, [("adapter", attention) for attention in OWN], limit)
    return {
        "model": name,
        "input": read,
        "milliseconds": {key: 1e3 * median(spent[key]) for key in clocks},
        **{attention: asdict(ratio(spent, "adapter", attention)) for attention in OWN},
        "largest_difference": max(float((outputs[0] - other).abs().max()) for other in outputs),
    }


@contextmanager
def with_own(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Switches the model to one of transformers' attention functions, and back to eager on exit."""
    model.set_attn_implementation(implementation)
    yield
    model.set_attn_implementation(OWN["eager"])


def within(context: Callable[[], AbstractContextManager[Any]], call: Call) -> float:
    """Returns the seconds of one call, without entering the context."""
    with context():
        return seconds(call)


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    headers = ["model", "input", "adapter ms", "eager ms", "fused ms", "adapter / eager",
               "verdict", "adapter / fused", "verdict", "rounds", "largest difference"]  # fmt: skip
    table = markdown(headers, [_cells(row) for row in record["rows"]], names=2)
    return (
        "# The adapter: `Exact` through it, beside the model's own attention\n\n"
        f"{record['layers']} layers, {record['tokens']} tokens, fp32, forward. {setting(record)} "
        f"{HOW} Eager holds all weights; fused is transformers' sdpa, PyTorch's kernel, which "
        f"`Exact` uses too: what the adapter gains on eager is the kernel's, not the adapter's."
        f"\n\n{table}\n"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    times = [f"{row['milliseconds'][key]:.1f}" for key in ("adapter", *OWN)]
    difference = f"{row['largest_difference']:.0e}"
    return [
        row["model"],
        row["input"],
        *times,
        *cells(*(row[attention] for attention in OWN)),
        difference,
    ]


if __name__ == "__main__":
    main()
