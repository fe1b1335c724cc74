"""Measures whether a compressed cache of the same bytes should keep fewer keys, or fewer bits.

    python -m benchmarks.fewer_bits FILE smollm2 gemma3 qwen   # about an hour on one core
    python -m benchmarks.fewer_bits FILE smollm2 --quick       # a prompt a kind; writes nothing

FILE is a text of `pipelines.caches`, whose prompts these are: 512 tokens, 12 of each kind, whose
continuation no choice sees. The default choice of `compressed_cache` keeps as many keys as fit into
the bytes with each format. Later keys keep all their bits. It goes on where it was stopped. Writes
results/benchmarks/fewer_bits.json and .md.
"""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.record import finish, header, markdown, options, setting
from benchmarks.what_decides import ALWAYS, CONTINUATION, KINDS, LENGTH, PROMPTS, SKIPPED
from value_aware_attention.caches import AfterPrefix, KeptKeys, LeaveOneOut
from value_aware_attention.decoding.pages import Slots
from value_aware_attention.decoding.reading import SharedReading
from value_aware_attention.measurement.caches import Prompt
from value_aware_attention.measurement.store import RecordCache
from value_aware_attention.measurement.task import kl_from_exact
from value_aware_attention.named_models import named_models
from value_aware_attention.probe import loaded
from value_aware_attention.records.estimate import ratio_of_sums
from value_aware_attention.texts import read_texts
from value_aware_study.evaluation import prompts

SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""Bytes of a cache, over those of all keys and values in 16 bits"""
SCALE_BITS = 32  # of a scale in fp32


def rounded(x: Tensor, largest: float, group: int | None = None, dtype: Any = None) -> Tensor:
    """Rounds to multiples of a scale for each slot, or for each `group` of its numbers.

    The largest magnitude becomes `largest`. With `dtype` numbers are rounded to that float format.
    """
    groups = x.unflatten(-1, (-1, group or x.shape[-1])).float()
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / largest
    scaled = groups / scale
    whole = scaled.round() if dtype is None else scaled.to(dtype).float()
    return (whole * scale).flatten(-2).to(x.dtype)


BASE, WITH_MEAN = "bfloat16", "int8, the last slot a mean"  # `mean_slot=True`
FORMATS: dict[str, tuple[int, int | None, Callable[[Tensor], Tensor]]] = {
    BASE: (16, 0, lambda x: x.bfloat16().to(x.dtype)),
    "int8, a scale a slot": (8, None, partial(rounded, largest=127)),
    WITH_MEAN: (8, None, partial(rounded, largest=127)),
    "fp8 (e4m3), a scale a slot": (
        8, None, partial(rounded, largest=448, dtype=torch.float8_e4m3fn)
    ),
    "int4, a scale for 32 numbers": (4, 32, partial(rounded, largest=7, group=32)),
}  # fmt: skip
"""Bits of a number; numbers that share a scale (None: a slot, 0: there is none); the rounding"""


def bits_a_slot(name: str, width: int) -> float:
    """Counts the bits of a key or value of this width, with its scales."""
    bits, group, _ = FORMATS[name]
    return bits * width + (0 if group == 0 else SCALE_BITS * width / (group or width))


def keys_for(name: str, share: float, width: int) -> int:
    """Returns the number of keys a head whose bytes are a share of all in 16 bits; at most all."""
    return min(LENGTH, int(share * LENGTH * 16 * width / bits_a_slot(name, width)))


def with_fewer_bits(of: Callable[..., Slots], name: str, choice: KeptKeys, *held: Tensor) -> Slots:
    slots, rounding = of(choice, *held), FORMATS[name][2]
    if name == WITH_MEAN:
        slots = slots.with_mean(choice, *held, visible=None)
    return Slots(rounding(slots.key), rounding(slots.value), slots.bias, slots.sizes)


@torch.no_grad()
def measured(model: Any, prompt: Prompt) -> dict[str, list[float]]:
    """Returns the KL and the share of right tokens of every format at every share of bytes."""
    shared = SharedReading(model, prompt.tokens[None], LENGTH)
    rows, labels = slice(prompt.answer - LENGTH - 1, -1), prompt.tokens[prompt.answer :]
    exact = shared.logits[0, rows].float()
    numbers = {"all keys": [0.0, (exact.argmax(-1) == labels).float().mean().item(), LENGTH]}
    width = shared.calls[0].key.shape[-1]
    for share, name in product((None, *SHARES), FORMATS):
        r = LENGTH if share is None else keys_for(name, share, width)
        kept = r - (name == WITH_MEAN and r < LENGTH)
        after = AfterPrefix(
            LeaveOneOut(max(kept, ALWAYS)), prefix=LENGTH, observed="continued", pool="model",
            sinks=2, recent=4,
        )  # fmt: skip
        of = partial(with_fewer_bits, Slots.of, name)
        with patch.object(Slots, "of", of):
            logits = shared.continued(shared.choose(after))[0, rows].float()
        right = (logits.argmax(-1) == labels).float().mean().item()
        numbers[name_of(name, share)] = [kl_from_exact(logits, exact).mean().item(), right, r]
    return numbers


def name_of(name: str, share: float | None) -> str:
    return f"{name}; {'all keys' if share is None else f'{share:g} of the bytes'}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", choices=[*named_models()])
    arguments = parser.parse_args()
    texts = list(read_texts(arguments.text))
    record = header("fewer_bits") | {"text": arguments.text.name.partition(".")[0], "models": {}}
    store = RecordCache(".cache/benchmark/fewer_bits", {"source": record["source"]})
    for name in arguments.models:
        of_prompts: list[dict[str, Any]] = []
        record["models"][name] = {"model": named_models()[name]["model"], "prompts": of_prompts}
        model, tokenizer = loaded(name)
        passages = prompts.passages(tokenizer, texts, LENGTH + CONTINUATION)
        last = SKIPPED + (1 if arguments.quick else PROMPTS)
        for number, passage in enumerate(islice(passages, SKIPPED, last)):
            of_kinds = {}
            for kind, build in KINDS.items():
                prompt = build(tokenizer, passage, LENGTH, number)
                digest = sha256(prompt.tokens.numpy().tobytes()).hexdigest()
                key = {"model": name, "prompt": digest}
                of_kinds[kind] = store.get(key, partial(measured, model, prompt))
            of_prompts.append(of_kinds)
            finish("fewer_bits", record, page(record), keep=not arguments.quick)


def page(record: dict[str, Any]) -> str:
    """Renders a table for each model."""
    lines = [
        "# Fewer keys or fewer bits\n",
        f"{setting(record)}\n",
        f"Mean KL in nats on prompts of {LENGTH} tokens of {record['text']}, from the model with "
        "all keys in fp32. Each row keeps as many keys as fit into a share of the bytes that all "
        "keys and values take in 16 bits; their number a head is in the second column. Scales, in "
        "fp32, are counted. In brackets is the geometric mean of the KL's ratio to bfloat16's with "
        "the same bytes, with the paired 95% interval over prompts. Then comes the share of the "
        "answer's tokens that are right. The keys are the default choice of `compressed_cache`. "
        "Where the last slot is a mean, one key fewer is kept.\n",
    ]
    for of in record["models"].values():
        rows = [
            [name_of(*cell), *cells(of, *cell)]
            for cell in ((name, share) for share, name in product((None, *SHARES), FORMATS))
        ]
        right = {kind: np.mean([x[kind]["all keys"][1] for x in of["prompts"]]) for kind in KINDS}
        exact = ", ".join(f"{kind} {x:.0%} right" for kind, x in right.items())
        lines += [
            f"## {of['model']}, {len(of['prompts'])} prompts of each kind\n",
            markdown(["format, bytes", "keys a head", *KINDS], rows) + "\n",
            f"All keys in fp32: {exact}.\n",
        ]
    return "\n".join(lines)


def cells(of: dict[str, Any], name: str, share: float | None) -> list[str]:
    """Writes the number of keys, then the numbers of every kind of prompt."""
    texts: list[str] = []
    for kind in KINDS:
        (kl, right, keys), (base, *_) = (
            np.array([prompt[kind][name_of(x, share)] for prompt in of["prompts"]]).T.clip(1e-12)
            for x in (name, BASE)
        )
        logs = np.log(kl) - np.log(base)
        ratio, low, high = np.exp(ratio_of_sums(logs, np.ones_like(logs)))
        over = f" ({ratio:.2f}; {low:.2f} to {high:.2f})" if low < high else ""
        texts = texts or [f"{keys[0]:.0f}"]
        texts.append(f"{kl.mean():.3g}{over}" + (f", {right.mean():.0%}" if kind != "text" else ""))
    return texts


if __name__ == "__main__":
    main()
