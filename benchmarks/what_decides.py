"""Measures what decides a compressed cache: the order of keys in a head, or how many a head gets.

    python -m benchmarks.what_decides FILE smollm2 gemma3 qwen   # hours on one core
    python -m benchmarks.what_decides FILE smollm2 --quick       # a prompt a kind; writes nothing

FILE is a text for `pipelines.caches`, which makes the prompts: 512 tokens, 12 of each kind. No
choice sees their continuation. All caches keep equally many keys. A stopped run continues. Writes
results/benchmarks/what_decides.json and .md.
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
"""Order of the keys of a head; numbers of keys by head; whether the last is a mean slot"""
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
    return of(choice, key, value).with_mean(choice, key, value, visible=None)


@torch.no_grad()
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


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", choices=[*named_models()])
    arguments = parser.parse_args()
    texts = list(read_texts(arguments.text))
    record = header("what_decides") | {"text": arguments.text.name.partition(".")[0], "models": {}}
    store = RecordCache(".cache/benchmark/what_decides", {"source": record["source"]})
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
            finish("what_decides", record, page(record), keep=not arguments.quick)


def page(record: dict[str, Any]) -> str:
    """Renders a table for each model, and the smoothing that half of the prompts chooses."""
    lines = [
        "# What decides a compressed cache\n",
        f"{setting(record)}\n",
        f"Mean KL in nats on prompts of {LENGTH} tokens of {record['text']}, with a quarter and an "
        "eighth of the keys. In brackets is the geometric mean of its ratio to the default's "
        "(single losses for both), with the paired 95% interval over prompts. Then comes the share "
        "of the answer's tokens that are right. A score orders the keys of a head, and the pool of "
        "a score gives heads their numbers of keys; all caches keep equally many. With a slot, the "
        "last key of a head is the mean of those that it dropped, with their mean value and the "
        "log of their number.\n",
    ]
    for of in record["models"].values():
        count = len(of["prompts"])
        rows = [
            [f"{order}{' and a slot' * has_slot}", heads, *cells(of, (order, heads, has_slot))]
            for order, heads, has_slot in CACHES
        ]
        right = {kind: np.mean([p[kind]["all keys"][1] for p in of["prompts"]]) for kind in KINDS}
        lines += [
            f"## {of['model']}, {count} prompts of each kind\n",
            markdown(["order of keys", "keys of a head", *HEAD], rows, names=2) + "\n",
            f"All keys: {', '.join(f'{kind} {x:.0%} right' for kind, x in right.items())}.\n",
            chosen_on_half(of, count // 2) if count > 3 else "",
        ]
    return "\n".join(lines)


CELLS = list(product(KINDS, SHARES))
HEAD = [f"{kind}, {share:g}" for kind, share in CELLS]


def column(of: dict[str, Any], kind: str, name: str, rows: slice) -> Any:
    """Returns the KL of some prompts, at least 1e-12, and the share of tokens that are right."""
    return np.array([prompt[kind][name] for prompt in of["prompts"][rows]]).T.clip(1e-12)


def cells(of: dict[str, Any], cache: Cache, rows: slice = slice(None)) -> list[str]:
    """Writes the numbers of a cache for every kind and share."""
    texts = []
    for kind, share in CELLS:
        (kl, right), (base, _) = (
            column(of, kind, name_of(x, share), rows) for x in (cache, DEFAULT)
        )
        logs = np.log(kl) - np.log(base)
        ratio, low, high = np.exp(ratio_of_sums(logs, np.ones_like(logs)))
        over = f" ({ratio:.2f}; {low:.2f} to {high:.2f})" if low < high else ""
        texts.append(f"{kl.mean():.3g}{over}" + (f", {right.mean():.0%}" if kind != "text" else ""))
    return texts


def chosen_on_half(of: dict[str, Any], half: int) -> str:
    """Chooses a smoothing on half of the prompts, and measures it on the other half."""

    def loss(name: str) -> float:
        """Averages the log of the KL over prompts, kinds and shares."""
        names = [(kind, name_of((name, name, False), share)) for kind, share in CELLS]
        return float(np.mean([np.log(column(of, *x, slice(half))[0]) for x in names]))

    best = min((LOSSES, *SMOOTHED), key=loss)
    rows = [
        [name, *cells(of, (name, name, False), slice(half, None))]
        for name in dict.fromkeys((LOSSES, best, KVZIP))
    ]
    return markdown([f"{best} is best on {half} prompts; on the others", *HEAD], rows) + "\n"


if __name__ == "__main__":
    main()
