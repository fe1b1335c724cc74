"""Times fixed patterns beside dense attention, as r halves.

    python -m benchmarks.patterns                # at most a quarter of an hour
    python -m benchmarks.patterns --seconds 5    # at most 5 seconds a method, but three rounds
    python -m benchmarks.patterns --quick        # L = 256; writes nothing

Writes results/benchmarks/patterns.json and .md. One batch of 8 heads of 64 numbers, fp32, forward
only. "eager" is softmax(QK'/sqrt(d))V with all weights held, "fused" torch's
scaled_dot_product_attention. All are called in paired rounds. "first call" is the one that lays the
pattern out.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from benchmarks.optimal_value_aware import exact, inputs
from benchmarks.record import HOW, finish, header, markdown, options, setting
from benchmarks.rounds import cells, in_rounds, ratio, seconds
from value_aware_attention.approximations import (
    BigBird,
    DilatedWindow,
    Fixed,
    Longformer,
    RandomKeys,
    SlidingWindow,
    Strided,
)
from value_aware_attention.approximations.fixed_pattern import FixedPattern
from value_aware_attention.error import budget

HEADS, HEAD_DIM = 8, 64
LENGTHS = (1024, 4096)
SECONDS = 40.0
DENSE = ("eager", "fused")
METHODS: dict[str, tuple[Callable[..., FixedPattern], Callable[..., FixedPattern]]] = {
    "sliding window": (partial(SlidingWindow, 256), partial(SlidingWindow, 128)),
    "dilated window": (partial(DilatedWindow, 256, 4), partial(DilatedWindow, 128, 4)),
    "strided": (partial(Strided, 64), partial(Strided, 32)),
    "fixed": (partial(Fixed, 64, 8), partial(Fixed, 64, 4)),
    "longformer": (partial(Longformer, 256, 1, (0,)), partial(Longformer, 128, 1, (0,))),
    "random keys": (partial(RandomKeys, 32, 0), partial(RandomKeys, 16, 0)),
    "big bird": (partial(BigBird, 128, 16, (0,), 0), partial(BigBird, 64, 8, (0,), 0)),
}
"""Name -> a method, and its like with half the keys (or half the stride, or summary)."""


def main() -> None:
    given = options(__doc__, SECONDS).parse_args()
    limit = 0.0 if given.quick else given.seconds
    rows = [
        row for length in ((256,) if given.quick else LENGTHS) for row in measure(length, limit)
    ]
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM}
    record = header("patterns") | sizes | {"rows": rows}
    finish("patterns", record, page(record), keep=not given.quick)


@torch.inference_mode()
def measure(length: int, limit: float) -> Iterator[dict[str, Any]]:
    """Measures every method, whole and halved, at one length."""
    tensors = inputs(length, HEADS)
    for whole, half in tqdm(METHODS.values(), desc=f"L = {length}"):
        yield from compare(length, tensors, (whole(), half()), limit)


def compare(
    length: int,
    tensors: tuple[Tensor, ...],
    methods: tuple[FixedPattern, FixedPattern],
    limit: float,
) -> Iterator[dict[str, Any]]:
    """Times a method and its half in turn with dense attention."""
    batch = tuple(x[None] for x in tensors)
    works: dict[str, Callable[[], Any]] = {
        str(method): partial(method, *batch) for method in methods
    }
    pairs = [(method, dense) for method in works for dense in DENSE]
    works |= {
        "eager": partial(exact, *batch),
        "fused": partial(scaled_dot_product_attention, *batch),
    }
    first = {name: seconds(work) for name, work in works.items()}
    clocks = {name: partial(seconds, work) for name, work in works.items()}
    spent = in_rounds(clocks, pairs, limit)
    for method in methods:
        name = str(method)
        yield {
            "length": length,
            "method": name,
            "pairs_kept": share(method, length),
            "milliseconds": 1e3 * median(spent[name]),
            "first_call": 1e3 * first[name],
            **{dense: asdict(ratio(spent, name, dense)) for dense in DENSE},
        }


def share(method: FixedPattern, length: int) -> float:
    """Computes the share of pairs of a query and a key that a pattern keeps."""
    return budget(method, queries=length, keys=length, head_dim=1, value_dim=1) / 2 / length


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    headers = ["L", "method", "pairs kept", "ms", "/ eager", "verdict", "/ fused", "verdict"]
    headers += ["rounds", "first call ms"]
    table = markdown(headers, [_cells(row) for row in record["rows"]], names=2)
    return (
        "# Fixed patterns: time beside dense attention\n\n"
        f"Batch 1, {record['heads']} heads of {record['head_dim']}, fp32, forward. "
        f"{setting(record)} {HOW} Eager holds all weights, fused is PyTorch's "
        f"scaled_dot_product_attention; under 1 = the pattern needs less time.\n\n{table}\n"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["length"]), f"`{row['method']}`", f"{row['pairs_kept']:.2%}",
        f"{row['milliseconds']:.1f}", *cells(*(row[name] for name in DENSE)),
        f"{row['first_call']:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
