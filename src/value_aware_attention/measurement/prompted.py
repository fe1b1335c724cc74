"""Measures compressed caches by the continuations of prompts that are read once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import product

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from value_aware_attention.decoding.after_prefix import AfterPrefix
from value_aware_attention.decoding.reading import SharedReading
from value_aware_attention.measurement.progress import Progress
from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.measurement.store import RecordCache
from value_aware_attention.records.cache_record import FULL
from value_aware_attention.records.prompt_record import PromptCell, PromptRecord

LEAST = 1e-12
"""KL divergence, in nats, below which caches are not told apart"""


@dataclass(frozen=True)
class Prompt:
    """Holds a prompt and its continuation, of which the last tokens are predicted.

    Attributes:
        tokens: Of both.
        prefix: Tokens of the prompt.
        answer: Place of the first token that is predicted, above `prefix`.
    """

    tokens: Int[Tensor, " N"]
    prefix: int
    answer: int


Build = Callable[[int, int], AfterPrefix]
"""(r, prefix) -> how r keys of a prompt are chosen"""


def measure_prompts(
    model: PreTrainedModel, prompts: Sequence[Prompt], caches: Mapping[str, Build], *,
    keep: Sequence[float], store: RecordCache, name: str, task: str, text: str = "",
    description: str = "",
) -> PromptRecord:  # fmt: skip
    """Measures every cache at every share on the continuation of each prompt.

    A prompt is read once with its continuation; then each cache is chosen, and the continuation
    read again over the kept keys. Prompts that `store` holds are not read again. Raises ValueError
    for prompts of different lengths.
    """
    if len(lengths := {prompt.prefix for prompt in prompts}) != 1:
        raise ValueError(f"prompts have {sorted(lengths)} tokens; they must have one length")
    (prefix,) = lengths
    chosen = {}
    for share, (cache, build) in product(keep, caches.items()):
        try:
            chosen[cache, share] = build(max(1, round(share * prefix)), prefix)
        except ValueError as error:
            raise ValueError(f"{cache}, keep {share:g} of {prefix} tokens: {error}") from None
    by_prompt = []
    for prompt in Progress(prompts, postfix=f"{task}, {prefix} tokens"):
        key = {
            "prompt": sha256(prompt.tokens.numpy().tobytes()).hexdigest(),
            "prefix": prefix,
            "answer": prompt.answer,
            "caches": [repr(after) for after in chosen.values()],
        }
        by_prompt.append(store.get(key, partial(_losses, model, prompt, list(chosen.values()))))
    names = [(FULL, 1.0), *chosen]
    return PromptRecord(
        prefix=prefix,
        run_on=run_on(model.device.type),
        cells=tuple(
            PromptCell(cache=cache, keep=share, **{
                key: tuple(losses[number][key] for losses in by_prompt)
                for key in by_prompt[0][number]
            })
            for number, (cache, share) in enumerate(names)
        ),
        model=name,
        task=task,
        text=text,
        description=description,
    )  # fmt: skip


@torch.no_grad()
def _losses(
    model: PreTrainedModel, prompt: Prompt, chosen: Sequence[AfterPrefix]
) -> list[dict[str, float]]:
    """Measures the full cache and the others on one prompt."""
    repeated = any(after.observed == "repeat" for after in chosen)
    tokens = prompt.tokens[None].to(model.device)
    reading = SharedReading(model, tokens, prompt.prefix, repeated=repeated)
    rows = slice(prompt.answer - prompt.prefix - 1, -1)
    answer = tokens[0, prompt.answer :]
    exact = reading.logits[0, rows].float().log_softmax(dim=-1)

    def losses(logits: Tensor) -> dict[str, float]:
        logs = logits[0, rows].float().log_softmax(dim=-1)
        kl = kl_div(logs, exact, reduction="none", log_target=True).sum(dim=-1)
        return {
            "kl": float(kl.mean().clamp_min(LEAST)),
            "nats": float(-logs.gather(1, answer[:, None]).mean()),
            "right": float((logs.argmax(dim=-1) == answer).float().mean()),
        }

    chosen_losses = (losses(reading.continued(reading.choose(after))) for after in chosen)
    return [losses(reading.logits), *chosen_losses]
