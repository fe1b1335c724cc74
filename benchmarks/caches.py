"""Times the choice of a cache's keys: seconds per key-value head, beside exact prefill.

    python -m benchmarks.caches            # some minutes on one core
    python -m benchmarks.caches --quick    # 64 keys; writes nothing

One head of 64 numbers, 128 observed queries, 512 to 8,192 keys of which an eighth is kept, fp32,
one thread: random queries (twice as long as keys), keys and values. Times are medians of `CALLS`
calls with their quartiles. Beside each method stands the error of its set on the observed queries,
and on as many others, over that of the joint search; refits also have one strength for both sets.
"Prefill" is exact causal attention of as many tokens by the fused kernel, for one query head. A
second table has the choice of all keys of a Llama of 4 layers, 8 heads on 4 key-value heads and
width 512, with random weights and 128 queries a head observed as "continued", in CPU seconds,
beside its prefill. Writes results/benchmarks/caches.json and .md.
"""

from collections.abc import Callable
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.decoding import llama
from benchmarks.record import finish, header, markdown, options, setting
from benchmarks.rounds import seconds
from value_aware_attention import attention, caches
from value_aware_attention.caches import refit
from value_aware_attention.hugging_face.recording import recording
from value_aware_attention.kernels import Exponential

HEAD_DIM, ROWS, PART = 64, 128, 8
KEYS = (512, 1024, 2048, 4096, 8192)
FEWER_ROWS = 32
MODEL_KEYS = (2048, 8192)
"""Lengths of the prefix of a whole model"""
CHOICES = {
    "ObservedAttention": lambda r: caches.ObservedAttention(r),
    "ValueAware": lambda r: caches.ValueAware(r),
}
CALLS = 9
"""Timed calls of each method, after one that is not counted"""
METHODS: dict[str, Callable[[int], caches.CacheMethod]] = {
    "ObservedAttention": caches.ObservedAttention,
    "LeaveOneOut": caches.LeaveOneOut,
    "ValueAware": caches.ValueAware,
    "ValueAware, exhaustive": lambda r: caches.ValueAware(r, search="exhaustive"),
    "ValueAware, refit": lambda r: caches.ValueAware(r, refit=True),
    "AttentionMatching": caches.AttentionMatching,
}
FEWER = f"ValueAware, {FEWER_ROWS} rows"
REFITS = ("ValueAware, refit", "AttentionMatching")
STRENGTH = (True, 0.1)
"""Biases and the ridge of values at which the refits of two sets are compared; a refit itself
chooses one of `refit.CHOICES` on held-out queries"""
WHY = (
    "AttentionMatching leaves less on the observed queries than the refitted joint set because "
    "each refit chooses its strength on every fourth observed query: the joint set was searched on "
    "these too, so that its values look best nearly unchanged there. With one strength for both "
    "(fixed) most of the difference goes. These tensors have no structure that a set could use.\n"
)


def main() -> None:
    """Measures, prints the table, and writes it unless asked for --quick."""
    arguments = options(__doc__).parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [measured(keys) for keys in tqdm((64,) if arguments.quick else KEYS)]
        models = [of_model(keys) for keys in tqdm((64,) if arguments.quick else MODEL_KEYS)]
    record = header("caches") | {"head_dim": HEAD_DIM, "rows_observed": ROWS, "rows": rows}
    record["models"] = models
    finish("caches", record, page(record), keep=not arguments.quick)


def measured(keys: int) -> dict[str, Any]:
    """Measures every method on the same head: seconds, and errors over the joint search's."""
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(1, keys, HEAD_DIM, generator=generator) for _ in range(3))
    r = keys // PART

    new = torch.randn(1, ROWS, HEAD_DIM, generator=generator)

    def seen(rows: int, others: bool = False) -> caches.Observed:
        observed = new if others else query[:, -rows:]
        return caches.Observed(2 * observed[:, None], key, value, Exponential())

    spent, chosen = {}, {}
    for name, build in METHODS.items():
        method = build(r)
        spent[name] = timed(lambda method=method: method.keep(seen(ROWS)))  # type: ignore[misc]
        chosen[name] = method.keep(seen(ROWS))
    joint = caches.ValueAware(r)
    spent[FEWER] = timed(lambda: joint.keep(seen(FEWER_ROWS)))
    chosen[FEWER] = joint.keep(seen(FEWER_ROWS))
    with patch.object(refit, "CHOICES", (STRENGTH,)):
        chosen |= {f"{name}, fixed": METHODS[name](r).keep(seen(ROWS)) for name in REFITS}
    row: dict[str, Any] = {"keys": keys, "r": r, "seconds": spent}
    row["prefill"] = timed(lambda: attention(query, key, value, is_causal=True))
    for field, others in (("errors", False), ("new_errors", True)):
        left = {name: float(seen(ROWS, others).error(keys)) for name, keys in chosen.items()}
        row[field] = {name: error / left["ValueAware"] for name, error in left.items()}
    return row


def of_model(keys: int) -> dict[str, Any]:
    """Measures the processor seconds of a model's prefill and of choices of its keys."""
    model = llama(keys)
    tokens = torch.randint(1000, (1, keys))
    begun = process_time()
    model.model(tokens)
    row: dict[str, Any] = {"keys": keys, "prefill": process_time() - begun}
    with recording(model, shares_keys=True) as calls:
        model.model(tokens, use_cache=False)
    observations = [call.arguments() | {"layer": call.layer} for call in calls]
    for name, build in CHOICES.items():
        for pool in (None, "model"):
            after = caches.AfterPrefix(
                build(keys // PART), prefix=keys, observed="continued", rows=ROWS, pool=pool
            )
            begun = process_time()
            after.choose(observations)
            row[name if pool is None else f"{name}, one budget"] = process_time() - begun
    return row


def timed(call: Callable[[], object]) -> list[float]:
    """Returns the quartiles of the seconds of `CALLS` calls."""
    call()
    spent = [seconds(call) for _ in range(CALLS)]
    return [float(x) for x in np.quantile(spent, (0.25, 0.5, 0.75))]


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    rows = record["rows"]
    names = list(rows[0]["seconds"])
    times, parts = [], []
    for row in rows:
        spent = [row["prefill"], *(row["seconds"][name] for name in names)]
        times.append([row["keys"], row["r"], *map(_quartiles, spent)])
        ratios = [quartiles[1] / row["prefill"][1] for quartiles in spent[1:]]
        parts.append([row["keys"], row["r"], *(f"{ratio:,.1f}" for ratio in ratios)])

    def errors(field: str) -> str:
        head = list(rows[0][field])
        cells = [[row["keys"], row["r"], *(f"{row[field][x]:.3f}" for x in head)] for row in rows]
        return markdown(["keys", "r", *head], cells)

    head = list(record["models"][0])
    models = [
        [model["keys"], f"{model['prefill']:.1f} s"]
        + [f"{model[name]:.1f} ({model[name] / model['prefill']:.1f})" for name in head[2:]]
        for model in record["models"]
    ]
    return (
        "# Choosing the keys of a cache\n\n"
        f"One key-value head of {record['head_dim']} numbers, {record['rows_observed']} observed "
        f"queries, one key of {PART} kept, one thread; random tensors. {setting(record)}\n\n"
        f"## Milliseconds, with the quartiles of {CALLS} calls\n\n"
        f"{markdown(['keys', 'r', 'prefill', *names], times)}\n\n"
        f"## Medians in prefills\n\n{markdown(['keys', 'r', *names], parts)}\n\n"
        f"## Error on the observed queries, over that of the joint search\n\n{WHY}\n"
        f"{errors('errors')}\n\n"
        f"## Error on {ROWS} queries that were not observed, over that of the joint search\n\n"
        f"{errors('new_errors')}\n\n"
        f"## Processor seconds of a whole model, in prefills\n\n{markdown(head, models)}\n"
    )


def _quartiles(spent: list[float]) -> str:
    low, middle, high = (1e3 * quartile for quartile in spent)
    return f"{middle:,.1f} ({low:,.1f} to {high:,.1f})"


if __name__ == "__main__":
    main()
