"""Measures time and memory of optimal-v-aware-r as ratios to exact attention in the same run.

    python -m benchmarks.optimal_value_aware                # about ten minutes on two cores
    python -m benchmarks.optimal_value_aware --seconds 1    # seconds per row, at least one round
    python -m benchmarks.optimal_value_aware --quick        # L = 64, r = 8; writes nothing

Writes results/benchmarks/optimal_value_aware.json and .md. Exact attention is softmax(QK'/sqrt(d))V
with all weights held (eager), and PyTorch's fused kernel; "solve" is the search alone, given alpha
and o, "call" the whole module, alpha, o and the weighted sum included. The floor counts the
multiply-adds that every greedy search needs, over those of eager attention: r products of a
residual with all values, and r insertions into an orthonormal frame.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from benchmarks import optimal_value_aware  # the name under which other processes import it
from benchmarks.memory import in_fresh_process, resident_peak
from benchmarks.ratio import Ratio
from benchmarks.record import PAIRED, finish, header, markdown, options, setting
from benchmarks.rounds import in_rounds, ratio, seconds
from value_aware_attention.approximations import OptimalValueAware, closest_combination
from value_aware_attention.approximations.closest_combination import Problem
from value_aware_attention.call import Call
from value_aware_attention.kernels import Exponential

HEAD_DIM = 64
SIZES = (1, 2, 4, 8, 16, 32, 65)
LENGTHS = {512: 4, 2048: 2}
"""Length -> number of heads."""
SLOWEST = {"torch": {"best": 2, "default": 16, "fast": 65}, "compiled": {"best": 16}}
"""Largest r that is measured, by engine and search; a larger one would take minutes."""
SECONDS = 5.0


def main() -> None:
    given = options(__doc__, SECONDS).parse_args()
    lengths, sizes = ({64: 2}, (8,)) if given.quick else (LENGTHS, SIZES)
    limit = 0.0 if given.quick else given.seconds
    rows = [
        row for length, heads in lengths.items() for row in measure(length, heads, sizes, limit)
    ]
    record = header("optimal_value_aware") | {
        "head_dim": HEAD_DIM,
        "inputs": "Gaussian queries, keys and values, fp32",
        "heads": lengths,
        "rows": rows,
        "one_query_at_a_time": {} if given.quick else solvers(),
        "peak_memory": {} if given.quick else memory(),
    }
    finish("optimal_value_aware", record, page(record), keep=not given.quick)


def inputs(length: int, heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (heads, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    return query, key, value


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * HEAD_DIM**-0.5).softmax(dim=-1) @ value


def problem_of(query: Tensor, key: Tensor, value: Tensor) -> Problem:
    return closest_combination.flatten(Call.of(query, key, value, kernel=Exponential()))


def measure(
    length: int, heads: int, sizes: tuple[int, ...], limit: float
) -> Iterator[dict[str, Any]]:
    """Measures every engine, search and size at one length, in times of exact attention."""
    tensors = inputs(length, heads)
    problem, whole = problem_of(*tensors), exact(*tensors)
    settings = [
        (engine, search, r)
        for engine in ("compiled", "torch")
        for search in closest_combination.SEARCHES
        for r in sizes
        if r <= SLOWEST[engine].get(search, r)
    ]
    for engine, search, r in tqdm(settings, desc=f"L = {length}"):
        method = OptimalValueAware(r, search, engine)
        works = {
            "solve": partial(closest_combination.solve, problem, r, search, engine),
            "call": partial(method, *tensors),
            "eager": partial(exact, *tensors),
            "fused": partial(scaled_dot_product_attention, *(x[None] for x in tensors)),
        }
        clocks = {name: partial(seconds, work) for name, work in works.items()}
        spent = in_rounds(clocks, [("call", "eager"), ("call", "fused")], limit, least=1)
        error = (method(*tensors) - whole).square().sum() / whole.square().sum()
        yield {
            **{"length": length, "engine": engine, "search": search, "r": r},
            "solve": asdict(ratio(spent, "solve", "eager")),
            "call": asdict(ratio(spent, "call", "eager")),
            "call_fused": asdict(ratio(spent, "call", "fused")),
            "floor": floor(r, length),
            "relative_output_error": float(error),
        }


def floor(r: int, length: int) -> float:
    """Counts multiply-adds of r scans and insertions (2 size width + size^2 / 2), over exact's."""
    width = HEAD_DIM + 1
    insertions = sum(2 * size * width + size**2 / 2 for size in range(1, r))
    return (r * length * HEAD_DIM + insertions) / (2 * length * HEAD_DIM)


def solvers() -> dict[str, Any]:
    """Times solvers that take one query at a time, and ours: microseconds a query at r = d + 1."""
    problem = problem_of(*inputs(512, 4))
    total = problem.output[..., 0].numel()
    every = partial(closest_combination.solve, problem, HEAD_DIM + 1, "fast")
    record: dict[str, float] = {
        engine: 1e6 * min(seconds(partial(every, engine)) for _ in range(3)) / total
        for engine in ("compiled", "torch")
    }
    value = problem.value[0].double()
    record["scipy.optimize.nnls"] = each(problem, 64, lambda o: by_nnls(value, o))
    record["clarabel (QP)"] = each(problem, 8, lambda o: by_clarabel(value, o))
    return record


def each(problem: Problem, count: int, solve: Callable[[Tensor], None]) -> float:
    """Times a solver of single queries: microseconds a query."""
    outputs = problem.output[0, :count].double()
    solve(outputs[0])
    return 1e6 * seconds(lambda: [solve(output) for output in outputs]) / count


def by_nnls(value: Tensor, output: Tensor) -> None:
    lifted = torch.cat([(value - output).T, torch.ones(1, len(value), dtype=value.dtype)])
    target = torch.zeros(len(lifted), dtype=value.dtype)
    target[-1] = 1
    nnls(lifted.numpy(), target.numpy())


def by_clarabel(value: Tensor, output: Tensor) -> None:
    """Solves min ||V'b - o||^2 over the simplex as min z'z, z = V'b - o."""
    import clarabel
    import numpy as np
    from scipy import sparse

    keys, width = value.shape
    quadratic = sparse.block_diag([sparse.csc_matrix((keys, keys)), 2 * sparse.eye(width)], "csc")
    equal = sparse.bmat([[value.numpy().T, -sparse.eye(width)], [np.ones((1, keys)), None]])
    positive = sparse.hstack([-sparse.eye(keys), sparse.csc_matrix((keys, width))])
    limits = np.concatenate([output.numpy(), [1.0], np.zeros(keys)])
    cones = [clarabel.ZeroConeT(width + 1), clarabel.NonnegativeConeT(keys)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    clarabel.DefaultSolver(
        quadratic, np.zeros(keys + width), sparse.vstack([equal, positive], "csc"), limits, cones,
        settings,
    ).solve()  # fmt: skip


def memory() -> dict[str, float]:
    """Measures peak MiB above the inputs, each in a fresh process, at L = 2048 with 4 heads."""
    methods = {
        f"{engine} {r}": OptimalValueAware(r, "fast", engine)
        for engine in ("compiled", "torch")
        for r in (16, 65)
    }
    works = {"exact": optimal_value_aware.exact} | methods
    fresh = partial(in_fresh_process, optimal_value_aware.peak_memory)
    return {name: fresh(work) for name, work in works.items()}


def peak_memory(work: Callable[..., Tensor]) -> float:
    """Measures the peak MiB of one call, above those held after a short one."""
    tensors = inputs(2048, 4)
    work(*(x[:, :64] for x in tensors))
    return resident_peak(partial(work, *tensors))


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    headers = ["L", "engine", "search", "r", "solve / eager", "call / eager", "call / fused",
               "rounds", "floor", "relative output error"]  # fmt: skip
    parts = [
        "# optimal-v-aware-r: cost as a ratio to exact attention",
        f"{record['inputs']}, head size {record['head_dim']}. {setting(record)} {PAIRED} Eager is "
        "exact attention with all weights held, fused PyTorch's scaled_dot_product_attention.",
        markdown(headers, [_cells(row) for row in record["rows"]], names=3),
    ]
    if record["one_query_at_a_time"]:
        parts.append(f"## r = d + 1 = {HEAD_DIM + 1}, L = 512: microseconds a query")
        rows = [(name, f"{x:,.0f}") for name, x in record["one_query_at_a_time"].items()]
        parts.append(markdown(["solver", "microseconds"], rows))
        parts.append("Ours: the fastest of three calls for all queries; the others one call each.")
    if record["peak_memory"]:
        parts.append("## Peak memory above the inputs, L = 2048, 4 heads, fresh process")
        rows = [(name, f"{x:,.0f}") for name, x in record["peak_memory"].items()]
        parts.append(markdown(["method", "MiB"], rows))
    return "\n\n".join(parts) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    ratios = [Ratio(**row[name]) for name in ("solve", "call", "call_fused")]
    return [
        *(str(row[name]) for name in ("length", "engine", "search", "r")), *map(str, ratios),
        str(ratios[0].rounds), f"{row['floor']:.1f}", f"{row['relative_output_error']:.1e}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
