"""Times the choice of a cache's keys: seconds a key-value head, beside exact prefill.

    python -m benchmarks.caches            # some minutes on one core
    python -m benchmarks.caches --quick    # 64 keys; writes nothing

One head of 64 numbers, 128 observed queries, 512 to 8,192 keys of which an eighth is kept, fp32,
one thread: random queries (twice as long as keys), keys and values. Beside each method the error
that its set leaves on the observed queries, over that of the joint search. "Prefill" is exact
causal attention of as many tokens by the fused kernel, for one query head. Writes
results/benchmarks/caches.json and .md.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from benchmarks.rounds import seconds
from value_aware_attention import attention, caches
from value_aware_attention.kernels import Exponential

HEAD_DIM, ROWS, PART = 64, 128, 8
KEYS = (512, 1024, 2048, 4096, 8192)
FEWER_ROWS = 32
ONCE = 2.0
"""Seconds above which a call is timed once; shorter calls are timed three times."""
METHODS: dict[str, Callable[[int], caches.CacheMethod]] = {
    "ObservedAttention": caches.ObservedAttention,
    "LeaveOneOut": caches.LeaveOneOut,
    "ValueAware": caches.ValueAware,
    "ValueAware, fast": lambda r: caches.ValueAware(r, search="fast"),
    "ValueAware, refit": lambda r: caches.ValueAware(r, refit=True),
    "AttentionMatching": caches.AttentionMatching,
}
FEWER = f"ValueAware, {FEWER_ROWS} rows"


def main() -> None:
    """Measures, prints the table, and writes it unless asked for --quick."""
    given = options(__doc__).parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [measured(keys) for keys in tqdm((64,) if given.quick else KEYS)]
    record = header("caches") | {"head_dim": HEAD_DIM, "rows_observed": ROWS, "rows": rows}
    finish("caches", record, page(record), keep=not given.quick)


def measured(keys: int) -> dict[str, Any]:
    """Measures every method on the same head: seconds, and errors over the joint search's."""
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (torch.randn(1, keys, HEAD_DIM, generator=generator) for _ in range(3))
    r = keys // PART

    def seen(rows: int) -> caches.Observed:
        observed = 2 * query[:, None, -rows:]
        return caches.Observed(observed, key, value, Exponential())

    spent, left = {}, {}
    for name, build in METHODS.items():
        method = build(r)
        spent[name] = timed(lambda method=method: method.keep(seen(ROWS)))  # type: ignore[misc]
        left[name] = float(seen(ROWS).error(method.keep(seen(ROWS))))
    joint = caches.ValueAware(r)
    spent[FEWER] = timed(lambda: joint.keep(seen(FEWER_ROWS)))
    left[FEWER] = float(seen(ROWS).error(joint.keep(seen(FEWER_ROWS))))
    return {
        "keys": keys,
        "r": r,
        "prefill": timed(lambda: attention(query, key, value, is_causal=True)),
        "seconds": spent,
        "errors": {name: one / left["ValueAware"] for name, one in left.items()},
    }


def timed(call: Callable[[], object]) -> float:
    """Returns the median seconds of three calls, or those of one slow call."""
    first = seconds(call)
    return first if first > ONCE else median([first, seconds(call), seconds(call)])


def page(record: dict) -> str:
    """Renders the record as Markdown."""
    names = list(record["rows"][0]["seconds"])
    times = [
        [row["keys"], row["r"], f"{1e3 * row['prefill']:.1f}"]
        + [f"{1e3 * row['seconds'][name]:,.1f}" for name in names]
        for row in record["rows"]
    ]
    errors = [
        [row["keys"], row["r"], *(f"{row['errors'][name]:.3f}" for name in names)]
        for row in record["rows"]
    ]
    return (
        "# Choosing the keys of a cache\n\n"
        f"One key-value head of {record['head_dim']} numbers, {record['rows_observed']} observed "
        f"queries, one key of {PART} kept, one thread; random tensors. {setting(record)}\n\n"
        f"## Milliseconds\n\n{markdown(['keys', 'r', 'prefill', *names], times)}\n\n"
        "## Error on the observed queries, over that of the joint search\n\n"
        f"{markdown(['keys', 'r', *names], errors)}\n"
    )


if __name__ == "__main__":
    main()
