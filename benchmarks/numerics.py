"""Measures how far low precision moves the output of every method from its output in fp64.

    python -m benchmarks.numerics            # some minutes on one core
    python -m benchmarks.numerics --quick    # 64 keys; writes nothing

It measures every approximation with the settings of its card (conf/approximation), the settings of
`VARIANTS`, and every cache method, with 4 heads of 64 numbers (1 head for 8,192 keys) and the last
32 queries. Inputs are first rounded to bf16, fp16 or fp32. The reference is the same method on
those rounded numbers in fp64, so the error is that of the arithmetic, not of rounded inputs. For
fp64 there is no reference with more digits: every input is changed by its last bit instead. Writes
results/benchmarks/numerics.json and .md.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor
from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from value_aware_attention import approximations, caches, kernels
from value_aware_attention.approximations import LSH, Approximation, SparseApproximation
from value_aware_attention.approximations.fixed_pattern import FixedPattern
from value_aware_attention.attention import attention, working_precision
from value_aware_attention.error import relative_output_error
from value_aware_attention.kernels import Exponential, Kernel
from value_aware_study.cache_cards import cache_cards
from value_aware_study.cards import cards

HEADS, HEAD_DIM, QUERIES, KEYS, MANY_KEYS = 4, 64, 32, 512, 8192
LANDMARKS, KEPT = 64, 16
FAR = 10.0
"""Factor over the error of exact attention on the same inputs, above which a cell is bold."""
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
Inputs = tuple[Tensor, ...]
"""Queries, keys and values"""
CACHES = {card.label: card.method for card in cache_cards().values()}
"""Every cache method of conf/cache, by its label"""


@dataclass(frozen=True)
class MethodCall:
    """Holds a method and the options of its call."""

    method: Approximation
    kernel: Kernel = Exponential()
    is_causal: bool = False

    def output(self, inputs: Inputs) -> Tensor:
        """Computes the rows of the last queries, and earlier rows if a method needs them."""
        query, key, value = inputs
        if not (self.is_causal or isinstance(self.method, LSH)):
            query = query[..., -QUERIES:, :]
        output = self.method(query, key, value, kernel=self.kernel, is_causal=self.is_causal)
        return output[..., -QUERIES:, :]

    def exact(self, inputs: Inputs) -> Tensor:
        """Computes exact attention of these rows."""
        query, key, value = inputs
        rows, keys = QUERIES, key.shape[-2]
        past = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        mask = past if self.is_causal else None
        return attention(query[..., -rows:, :], key, value, kernel=self.kernel, attn_mask=mask)


@dataclass(frozen=True)
class Cell:
    """Holds a method's errors ||o - o~|| / ||o|| a row, for one input and dtype; o is in fp64."""

    method: str
    input: str
    dtype: str
    rows: int
    other_rows: int = 0
    """Number of rows that chose other keys than in fp64."""
    largest: float | None = None
    """Largest error of the rows that chose the same keys; None: no row did."""
    mean: float | None = None
    largest_of_others: float | None = None
    non_finite_rows: int = 0
    distance: float = 0.0
    """Distance to exact attention in fp64: root of the pooled relative output error of all rows."""
    distance_in_fp64: float = 0.0
    refused: str = ""
    exact: float = field(default=0.0)
    """`largest` of exact attention with the same kernel on the same inputs."""

    @property
    def far(self) -> bool:
        """Tells whether the error is more than ten times that of exact attention."""
        most = FAR * self.exact
        return bool(self.refused or self.non_finite_rows) or (self.largest or 0.0) > most


VARIANTS: dict[str, MethodCall] = {
    "exact, polynomial": MethodCall(approximations.Exact(), kernels.Polynomial()),
    "exact, elu": MethodCall(approximations.Exact(), kernels.Elu()),
    **{
        f"optimal-v-aware-{r}, {search}": MethodCall(approximations.OptimalValueAware(r, search))
        for r, search in ((16, "fast"), (16, "default"), (4, "best"), (HEAD_DIM + 1, "default"))
    },
    "Nyström, 6 iterations": MethodCall(approximations.Nystrom(LANDMARKS, iterations=6)),
    "ORF as in A.1": MethodCall(approximations.OrthogonalRandomFeatures(256, 0, scaling="paper")),
    "ORF, causal": MethodCall(approximations.OrthogonalRandomFeatures(256, 0), is_causal=True),
    "RFF, causal": MethodCall(approximations.RandomFourierFeatures(256, 0), is_causal=True),
    "linear attention, causal": MethodCall(approximations.LinearAttention(), kernels.Elu(), True),
}
"""Settings that no card has."""


def main() -> None:
    """Measures, prints the tables, and writes them unless asked for --quick."""
    arguments = options(__doc__).parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        cells = list(measured(64, 128) if arguments.quick else measured(KEYS, MANY_KEYS))
    record = header("numerics") | {"heads": HEADS, "head_dim": HEAD_DIM}
    record |= {"keys": KEYS, "many_keys": MANY_KEYS, "cells": [asdict(cell) for cell in cells]}
    finish("numerics", record, page(record), keep=not arguments.quick)


def measured(keys: int, many: int) -> Iterator[Cell]:
    """Measures every method on every input in every dtype."""
    methods = cases()
    for name, inputs in inputs_of_every_kind(keys, many).items():
        for method, case in tqdm(methods.items(), desc=name):
            for dtype in DTYPES:
                yield cell(method, case, name, inputs, dtype)


def cases() -> dict[str, MethodCall]:
    """Returns all methods by name: those of the cards, `VARIANTS`, and caches of `KEPT` keys."""
    calls = {}
    for card in cards().values():
        method = instantiate(card.build())
        kernel = kernels.Elu() if method.kernels == (kernels.Elu,) else Exponential()
        calls[card.label] = MethodCall(method, kernel)
    after = partial(caches.AfterPrefix, prefix=None, observed="last", rows=QUERIES)
    kept_by = {f"cache: {name}": MethodCall(after(build(KEPT))) for name, build in CACHES.items()}
    return calls | VARIANTS | kept_by


def inputs_of_every_kind(keys: int, many: int) -> dict[str, Inputs]:
    """Draws queries, keys and values in fp64; in `outliers` one key and another value are far."""

    def drawn(length: int, sharpness: float = 1.0, heads: int = HEADS) -> Inputs:
        generator = torch.Generator().manual_seed(length)
        shape = (1, heads, length, HEAD_DIM)
        query, key, value = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
        )
        return sharpness * query, key, value

    query, key, value = drawn(keys)
    key[..., keys // 3, :] *= 1e3
    value[..., keys // 2, :] *= 1e4
    return {
        "ordinary": drawn(keys),
        "large logits": drawn(keys, 100.0),
        "outliers": (query, key, value),
        "long": drawn(many, heads=1),
    }


def cell(method: str, case: MethodCall, name: str, drawn: Inputs, dtype: str) -> Cell:
    """Measures one method on one input in one dtype."""
    inputs = tuple(x.to(DTYPES[dtype]) for x in drawn)
    reference = tuple(x.double() for x in inputs)
    if dtype == "fp64":
        inputs = moved(inputs)
    rows = drawn[0].shape[1] * QUERIES
    try:
        output = case.output(inputs)
    except ValueError as error:
        return Cell(method, name, dtype, rows, refused=str(error))
    precise, exact = case.output(reference), case.exact(reference)
    return Cell(
        **{"method": method, "input": name, "dtype": dtype, "rows": rows},
        **errors(output, precise, other_keys(case, inputs, reference)),
        distance=distance(output, exact),
        distance_in_fp64=distance(precise, exact),
        exact=float(relative(case.exact(inputs), exact).max()),
    )


def moved(inputs: Inputs) -> Inputs:
    """Moves every number of the inputs one bit up or down."""
    generator = torch.Generator().manual_seed(0)

    def one(x: Tensor) -> Tensor:
        up = torch.randint(2, x.shape, generator=generator).bool()
        return x.nextafter(torch.where(up, torch.inf, -torch.inf).to(x))

    return tuple(map(one, inputs))


def relative(approximate: Tensor, exact: Tensor) -> Tensor:
    """Computes ||o - o~|| / ||o||, which unlike its square can be compared with rounding."""
    return relative_output_error(approximate.double(), exact).sqrt()


def distance(approximate: Tensor, exact: Tensor) -> float:
    difference = (approximate.double() - exact).nan_to_num(posinf=0.0, neginf=0.0)
    return float(difference.norm() / exact.norm())


def errors(output: Tensor, reference: Tensor, others: Tensor) -> dict[str, Any]:
    """Summarises the rows with the same keys, and the largest error of the others."""
    finite = output.isfinite().all(dim=-1)
    row = relative(output, reference)
    same, other = row[finite & ~others], row[finite & others]
    return {
        "other_rows": int(others.sum()),
        "largest": float(same.max()) if len(same) else None,
        "mean": float(same.mean()) if len(same) else None,
        "largest_of_others": float(other.max()) if len(other) else None,
        "non_finite_rows": int((~finite).sum()),
    }


def other_keys(case: MethodCall, rounded: Inputs, reference: Inputs) -> Tensor:
    """Tells which rows of two calls see different keys; none if a method chooses no keys."""
    mine, theirs = (chosen(case, inputs) for inputs in (rounded, reference))
    return ((mine - theirs).abs() > 0.5).any(dim=-1).expand(*rounded[0].shape[:2], QUERIES)


def chosen(case: MethodCall, inputs: Inputs) -> Tensor:
    """Returns numbers that differ by more than 1/2 if two calls chose different keys."""
    query, key, value = inputs
    last, method = query[..., -QUERIES:, :], case.method
    if isinstance(method, caches.AfterPrefix):
        choice = method.method.keep(method.observe(last, key, value, kernel=case.kernel))
        return choice.indices[..., None, :].double()
    if isinstance(method, SparseApproximation) and not isinstance(method, FixedPattern):
        weights = method.select(last, key, value, kernel=case.kernel).dense(key.shape[-2])
        return (weights > 0).double()
    if isinstance(method, LSH):
        # Degree 0 weighs every key alike: a row is the mean of the numbers of the keys it sees.
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(2**16, (*key.shape[:-1], 4), generator=generator)
        query, key = working_precision(query), working_precision(key)
        return replace(case, kernel=kernels.Polynomial(0)).output((query, key, numbers.to(query)))
    return torch.zeros(*query.shape[:2], QUERIES, 1)


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    cells = [Cell(**cell) for cell in record["cells"]]
    parts = []
    for name in dict.fromkeys(cell.input for cell in cells):
        some = [cell for cell in cells if cell.input == name]
        parts.append(f"## {TITLES[name]}\n\n{_table(some)}")
    return (
        "# Numerics: every method in low precision\n\n"
        f"{HOW_READ}\n\n{setting(record)}\n\n" + "\n\n".join(parts) + "\n"
    )


TITLES = {
    "ordinary": f"Ordinary: normal queries, keys and values, {KEYS} keys",
    "large logits": "Large logits: the same with queries 100 times as long, logits of hundreds",
    "outliers": "Outliers: one key 1,000 and another value 10,000 times as long",
    "long": f"Long: {MANY_KEYS:,} keys, one head",
}
HOW_READ = (
    f"The largest ||o - o~|| / ||o|| of a row ({HEADS} heads, the last {QUERIES} queries of "
    "each): the root of `error.relative_output_error`, o the same method's output in fp64 on "
    "the same inputs, rounded to the dtype. fp64 is compared with itself after every input moved "
    "by its last bit. Where rows chose other keys than in fp64, the number is that of the rows "
    "which chose the same, followed by how many of all rows chose others; behind the arrow is the "
    "distance of all outputs from exact attention, in fp64 and in this dtype: where the two agree, "
    f"the other keys are as good. **Bold**: more than {FAR:g} times the error of exact attention "
    "with the same kernel on these inputs. Bold in fp32 and in fp64 by a like factor is the "
    "method's own sensitivity to its inputs; in fp32 alone it would be digits lost on the way. "
    "What each comes from: [numerics](../../docs/numerics.md)."
)


def _table(cells: list[Cell]) -> str:
    rows: dict[str, list[str]] = {}
    for cell in cells:
        rows.setdefault(cell.method, []).append(_text(cell))
    return markdown(["method", *DTYPES], [[name, *texts] for name, texts in rows.items()])


def _text(cell: Cell) -> str:
    if cell.refused:
        return f"**{cell.refused}**"
    text = "" if cell.largest is None else f"{cell.largest:.1e}"
    if cell.non_finite_rows:
        text += f" ({cell.non_finite_rows} rows not finite)"
    text = f"**{text}**" if cell.far else text
    if not cell.other_rows:
        return text
    others = f"{cell.other_rows} of {cell.rows} others"
    return f"{text}; {others} → {cell.distance_in_fp64:.3g}, {cell.distance:.3g}".lstrip("; ")


if __name__ == "__main__":
    main()
