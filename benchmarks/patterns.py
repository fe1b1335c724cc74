"""Fixed patterns beside dense attention: time in one run, as r halves, with FlexAttention too.

    python -m benchmarks.patterns            # three minutes on two idle cores
    python -m benchmarks.patterns --quick    # L = 1024 without FlexAttention; writes nothing

Writes results/benchmarks/patterns.json and .md. One batch of 8 heads of 64 numbers, fp32, forward
only. "eager" is softmax(QK'/sqrt(d))V, "SDPA" torch's scaled_dot_product_attention, "flex" the same
method with engine="flex", at the longest length only. All are called in turn; times are medians. "first call" is the one that
lays the pattern out or compiles it.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from benchmarks.optimal_value_aware import exact, inputs, seconds
from pipelines.provenance import run_on
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
REPEATS = 3
METHODS: dict[str, tuple[Callable[..., FixedPattern], Callable[..., FixedPattern]]] = {
    "sliding window": (partial(SlidingWindow, 256), partial(SlidingWindow, 128)),
    "dilated window": (partial(DilatedWindow, 256, 4), partial(DilatedWindow, 128, 4)),
    "strided": (partial(Strided, 64), partial(Strided, 32)),
    "fixed": (partial(Fixed, 64, 8), partial(Fixed, 64, 4)),
    "longformer": (partial(Longformer, 256, 1, (0,)), partial(Longformer, 128, 1, (0,))),
    "random keys": (partial(RandomKeys, 32, 0), partial(RandomKeys, 16, 0)),
    "big bird": (partial(BigBird, 128, 16, (0,), 0), partial(BigBird, 64, 8, (0,), 0)),
}
"""Name -> the method, and the same with half as many keys (or half the stride, or summary)."""
FOLDER = Path("results/benchmarks")


@dataclass(frozen=True)
class Row:
    """One method at one length; milliseconds."""

    length: int
    method: str
    pairs_kept: float
    """Share of all pairs of a query and a key."""
    milliseconds: float
    first_call: float
    eager: float
    sdpa: float
    flex: float | None
    flex_first_call: float | None
    difference_from_flex: float | None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="L = 1024, no FlexAttention")
    quick = parser.parse_args().quick
    rows = [
        row
        for length in LENGTHS[: 1 if quick else None]
        for row in measure(length, length == LENGTHS[-1])
    ]
    record = {
        "run_on": run_on() | {"threads": torch.get_num_threads()},
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "rows": [asdict(row) for row in rows],
    }
    print(page(record))
    if quick:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "patterns.json").write_text(json.dumps(record, indent=1) + "\n")
    (FOLDER / "patterns.md").write_text(page(record))


@torch.inference_mode()
def measure(length: int, with_flex: bool) -> Iterator[Row]:
    """Every method, whole and halved, at one length."""
    tensors = inputs(length, HEADS)
    for name, (whole, half) in tqdm(METHODS.items(), desc=f"L = {length}"):
        flexible = with_flex and name not in ("random keys", "big bird")
        flex = whole(engine="flex") if flexible else None
        yield from compare(length, tensors, (whole(), half()), flex)


def compare(
    length: int,
    tensors: tuple[Tensor, ...],
    methods: tuple[FixedPattern, FixedPattern],
    flex: FixedPattern | None,
) -> Iterator[Row]:
    """A method and its half, called in turn with dense attention and with the whole by flex."""
    batch = tuple(x[None] for x in tensors)
    works: dict[str, Callable[[], Any]] = {
        str(method): partial(method, *batch) for method in methods
    }
    works |= {
        "eager": partial(exact, *batch),
        "sdpa": partial(scaled_dot_product_attention, *batch),
    }
    if flex is not None:
        works["flex"] = partial(flex, *batch)
    first = {name: 1e3 * seconds(work) for name, work in works.items()}
    turns = [{name: 1e3 * seconds(work) for name, work in works.items()} for _ in range(REPEATS)]
    times = {name: median(turn[name] for turn in turns) for name in works}
    sizes = {"queries": length, "keys": length, "head_dim": 1, "value_dim": 1}
    for method, engine in zip(methods, (flex, None), strict=True):
        name = str(method)
        yield Row(
            length,
            name,
            budget(method, **sizes) / 2 / length,
            times[name],
            first[name],
            times["eager"],
            times["sdpa"],
            None if engine is None else times["flex"],
            None if engine is None else first["flex"],
            None if engine is None else float((works[name]() - works["flex"]()).abs().max()),
        )


def page(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    on = record["run_on"]
    lines = [
        "# Fixed patterns: time beside dense attention",
        "",
        f"Batch 1, {record['heads']} heads of {record['head_dim']}, fp32, forward; "
        f"{on['hardware']}, {on['threads']} threads; versions: {json.dumps(on['versions'])}.",
        "",
        "| L | method | pairs kept | ms | faster than eager | faster than SDPA | first call ms "
        "| flex ms | flex first call ms | max difference |",
        "|--:|:--|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        flex = "| | | |"
        if row["flex"] is not None:
            flex = f"| {row['flex']:.0f} | {row['flex_first_call']:,.0f} "
            flex += f"| {row['difference_from_flex']:.0e} |"
        lines.append(
            f"| {row['length']} | `{row['method']}` | {row['pairs_kept']:.2%} "
            f"| {row['milliseconds']:.0f} | {row['eager'] / row['milliseconds']:.1f}x "
            f"| {row['sdpa'] / row['milliseconds']:.1f}x | {row['first_call']:.0f} {flex}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
