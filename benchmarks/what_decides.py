"""Measures what decides a compressed cache: the order of keys in a head, or how many a head gets.

    python -m benchmarks.what_decides FILE smollm2 gemma3 qwen   # hours on one core
    python -m benchmarks.what_decides FILE smollm2 --quick       # a prompt a kind; writes nothing

FILE is a text of `pipelines.caches`, whose prompts these are: 512 tokens, 12 of each kind, whose
continuation no choice sees. All caches keep equally many keys. It goes on where it was stopped.
Writes results/benchmarks/what_decides.json and .md.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from value_aware_attention.caches import AfterPrefix, CacheMethod, KeptKeys, LeaveOneOut, Observed
from value_aware_attention.caches.baselines import Random
from value_aware_attention.caches.budgets import Ranking, pooled_counts
from value_aware_attention.caches.method import first_kept
from value_aware_attention.caches.observed_attention import pooled
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

LENGTH, CONTINUATION, PROMPTS, SKIPPED, ALWAYS, SHARES = 512, 48, 12, 10, 6, (1 / 4, 1 / 8)
KINDS = {"text": prompts.running_text, "needles": prompts.needles, "list": prompts.recalled_list}
EQUAL, MEAN, LOSSES = "equal", "mean attention", "single losses"
LARGEST, KVZIP = "largest attention", "KVzip: largest attention, a second reading"
Score = Callable[[Observed], Tensor]


def attention(observed: Observed, norms: Callable[[Observed], Tensor] | None = None) -> Tensor:
    """Averages a key's weight over queries, then, times the norm of its value, over the group."""
    mean = observed.weights.mean(dim=-2)
    return (mean if norms is None else mean * norms(observed)).mean(dim=-2)


def largest_attention(observed: Observed) -> Tensor:
    return observed.weights.amax(dim=(-3, -2))


def value_norms(observed: Observed) -> Tensor:
    return observed.value[..., None, :, :].norm(dim=-1)


def projected_norms(observed: Observed) -> Tensor:
    assert observed.projection is not None
    return (observed.value[..., None, :, :] @ observed.projection).norm(dim=-1)


ORDERS: dict[str, Score] = {
    "random": Random(ALWAYS, seed=0).scores,
    MEAN: attention,
    "attention times norm of the value": partial(attention, norms=value_norms),
    "attention times norm after W_o": partial(attention, norms=projected_norms),
    LOSSES: LeaveOneOut(ALWAYS).losses,
}
SMOOTHED: dict[str, Callable[[Tensor], Tensor]] = {
    f"losses, {pooling} of {neighbours}": partial(pooled, pool=neighbours, pooling=pooling)
    for pooling, neighbours in product(("max", "mean"), (3, 5, 9))
}
SCORES = ORDERS | {LARGEST: largest_attention}
Cache = tuple[str, str, bool]
"""Orders the keys of a head; gives heads their numbers of keys; whether the last is a mean slot"""
CACHES: list[Cache] = [
    *((*pair, False) for pair in product(ORDERS, (EQUAL, MEAN, LOSSES))),
    *((order, heads, True) for order in (MEAN, LOSSES) for heads in (EQUAL, order)),
    *((name, name, False) for name in (*SMOOTHED, LARGEST, KVZIP)),
]
DEFAULT: Cache = (LOSSES, LOSSES, False)


class Scored(CacheMethod):
    """Ranks keys by scores that were computed before."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__(1)
        self.computed = scores

    def scores(self, observed: Observed) -> Tensor:
        return self.computed

    def check(self, observed: Observed) -> None:
        """Takes any number of protected keys: it only ranks."""


def ranked(shared: SharedReading) -> tuple[list[Observed], dict[str, list[Ranking]]]:
    """Ranks the keys of all layers by every score; KVzip's sees a second reading."""
    layers: list[Observed] = []
    rankings: dict[str, list[Ranking]] = {name: [] for name in (*SCORES, *SMOOTHED, KVZIP)}
    method = LeaveOneOut(ALWAYS)
    once = AfterPrefix(method, prefix=LENGTH, observed="continued")
    again = once.like(method, observed="repeat", sinks=4, recent=0)
    for call in shared.calls:
        arguments = call.arguments() | {"layer": call.layer}
        observed, repeated = once.observe(**arguments), again.observe(**arguments)
        scores = {name: score(observed) for name, score in SCORES.items()}
        scores |= {name: smooth(scores[LOSSES]) for name, smooth in SMOOTHED.items()}
        for name, of_keys in scores.items():
            rankings[name].append(Scored(of_keys).rank(observed))
        rankings[KVZIP].append(Scored(largest_attention(repeated)).rank(repeated))
        layers.append(replace(observed))  # a copy without derived tensors
    return layers, rankings


def chosen(
    layers: Sequence[Observed], rankings: dict[str, list[Ranking]], cache: Cache, r: int
) -> list[KeptKeys]:
    """Keeps r keys a head on average; with a slot one key fewer in every head."""
    order, heads, has_slot = cache
    counts = [torch.full(ranking.keys.shape[:2], r) for ranking in rankings[order]]
    if heads != EQUAL:
        total = sum(int(count.sum()) for count in counts)
        counts = pooled_counts(rankings[heads], total, (ALWAYS + 1) * has_slot)
    return [
        first_kept(observed, ranking.keys, number[..., None], number.flatten().tolist())
        for observed, ranking, number in zip(
            layers, rankings[order], (count - int(has_slot) for count in counts), strict=True
        )
    ]


def with_slot(of: Callable[..., Slots], choice: KeptKeys, key: Tensor, value: Tensor) -> Slots:
    """Adds the mean key and value of what each head dropped, with the log of their number."""
    held = of(choice, key, value)
    dropped = torch.ones_like(key[..., 0]).scatter(2, choice.indices, 1.0 - held.used.float())
    count = dropped.sum(dim=-1, keepdim=True)
    slots = [
        torch.cat([kept, (x * dropped[..., None]).sum(2, keepdim=True) / count[..., None]], dim=2)
        for kept, x in ((held.key, key), (held.value, value))
    ]
    return Slots(*(x.nan_to_num() for x in slots), torch.cat([held.bias, count.log()], dim=-1))


def measured(model: Any, prompt: Prompt) -> dict[str, list[float]]:
    """Returns the KL and the share of right tokens of every cache at every share."""
    shared = SharedReading(model, prompt.tokens[None], LENGTH, repeated=True)
    layers, rankings = ranked(shared)
    rows, labels = slice(prompt.answer - LENGTH - 1, -1), prompt.tokens[prompt.answer :]
    exact = shared.logits[0, rows].float()
    numbers = {"all keys": [0.0, (exact.argmax(-1) == labels).float().mean().item()]}
    for share, cache in product(SHARES, CACHES):
        choices = chosen(layers, rankings, cache, round(share * LENGTH))
        with patch.object(Slots, "of", partial(with_slot, Slots.of) if cache[2] else Slots.of):
            logits = shared.continued(choices)[0, rows].float()
        right = (logits.argmax(-1) == labels).float().mean().item()
        numbers[name_of(cache, share)] = [kl_from_exact(logits, exact).mean().item(), right]
    return numbers


def name_of(cache: Cache, share: float) -> str:
    return f"{cache[0]}; {cache[1]}; {'slot; ' * cache[2]}{share:g}"


def of_kind(name: str, kind: str, texts: list[str], count: int, source: str) -> dict[str, Any]:
    """Measures the prompts of a kind; reads from the disk what was measured before."""
    model, tokenizer = loaded(name)
    passages = prompts.passages(tokenizer, texts, LENGTH + CONTINUATION)
    store = RecordCache(".cache/benchmark/what_decides", {"source": source, "model": name})
    by_prompt = []
    for number, passage in enumerate(islice(passages, SKIPPED, SKIPPED + count)):
        prompt = KINDS[kind](tokenizer, passage, LENGTH, number)
        key = {"prompt": sha256(prompt.tokens.numpy().tobytes()).hexdigest()}
        with torch.no_grad():
            by_prompt.append(store.get(key, partial(measured, model, prompt)))
        print(name, kind, number + 1, flush=True)
    return {cache: [numbers[cache] for numbers in by_prompt] for cache in by_prompt[0]}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", choices=[*named_models()])
    arguments = parser.parse_args()
    texts = list(read_texts(arguments.text))
    record = header("what_decides") | {"text": arguments.text.name.partition(".")[0], "models": {}}
    for name in arguments.models:
        count = 1 if arguments.quick else PROMPTS
        kinds = {kind: of_kind(name, kind, texts, count, record["source"]) for kind in KINDS}
        record["models"][name] = {"model": named_models()[name]["model"], "kinds": kinds}
        finish("what_decides", record, page(record), keep=not arguments.quick)


def page(record: dict[str, Any]) -> str:
    """Renders a table for each model, and the smoothing that half of the prompts chooses."""
    lines = [
        "# What decides a compressed cache\n",
        f"{setting(record)}\n",
        f"KL in nats on prompts of {LENGTH} tokens of {record['text']}, {PROMPTS} of each kind, "
        "with a quarter and an eighth of the keys. In brackets is its ratio to the default's "
        "(single losses for both) with the paired 95% interval over prompts. The last number is "
        "the share of the tokens that are right. A score orders the keys of a head, and the pool "
        "of a score gives heads their numbers of keys; all caches keep equally many. With a slot, "
        "the last key of a head is the mean of those that it dropped, with their mean value and "
        "the log of their number.\n",
    ]
    cells = list(product(KINDS, SHARES))
    for of in record["models"].values():
        kinds = of["kinds"]
        rows = [
            [f"{order}{' and a slot' * slot}", heads]
            + [cell(kinds[kind], (order, heads, slot), share) for kind, share in cells]
            for order, heads, slot in CACHES
        ]
        right = {kind: np.mean(kinds[kind]["all keys"], axis=0)[1] for kind in KINDS}
        lines += [
            markdown(
                [f"{of['model']}: order", "keys of a head", *(f"{k}, {s:g}" for k, s in cells)],
                rows, names=2,
            ),
            f"\nAll keys are right in {', '.join(f'{k} {x:.0%}' for k, x in right.items())}.\n",
            *([chosen_on_half(kinds)] if len(kinds["text"]["all keys"]) == PROMPTS else []),
        ]  # fmt: skip
    return "\n".join(lines)


def column(numbers: dict[str, Any], cache: Cache, share: float, rows: slice) -> Any:
    """Returns the KL of some prompts, and the share of their tokens that are right."""
    return np.array(numbers[name_of(cache, share)])[rows].T


def cell(numbers: dict[str, Any], cache: Cache, share: float, rows: slice = slice(None)) -> str:
    (kl, right), (base, _) = (column(numbers, c, share, rows) for c in (cache, DEFAULT))
    ratio, low, high = ratio_of_sums(kl, base)
    over = f" ({ratio:.2f}; {low:.2f} to {high:.2f})" if low < high else ""
    return f"{kl.mean():.3g}{over}, {right.mean():.0%}"


def chosen_on_half(kinds: dict[str, Any]) -> str:
    """Chooses a smoothing on half of the prompts, and tells what it leaves on the other half."""
    first, rest = slice(PROMPTS // 2), slice(PROMPTS // 2, None)
    cells, names = list(product(kinds, SHARES)), (LOSSES, *SMOOTHED)

    def loss(name: str) -> float:
        """Averages the log of the mean KL over kinds and shares."""
        columns = [column(kinds[kind], (name, name, False), s, first)[0] for kind, s in cells]
        return float(np.log([kl.mean() for kl in columns]).mean())

    best = min(names, key=loss)
    rows = [
        [name, *(cell(kinds[kind], (name, name, False), share, rest) for kind, share in cells)]
        for name in dict.fromkeys((LOSSES, best, KVZIP))
    ]
    head = [f"chosen on {PROMPTS // 2} prompts, on the others", *(f"{k}, {s:g}" for k, s in cells)]
    return f"{markdown(head, rows)}\n"


if __name__ == "__main__":
    main()
