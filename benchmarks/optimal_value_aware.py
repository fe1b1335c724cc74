"""What optimal-v-aware-r costs: time and memory as ratios to exact attention in the same run.

    python -m benchmarks.optimal_value_aware            # about ten minutes on two cores
    python -m benchmarks.optimal_value_aware --quick    # L = 512, r = 8, 16, 65; writes nothing

Writes results/benchmarks/optimal_value_aware.json and .md. Exact attention is the eager
softmax(QK'/sqrt(d))V; "solve" is the search alone, given alpha and o, "call" the whole module,
alpha, o and the weighted sum included. The floor counts the multiply-adds no greedy search can do
without: r products of a residual with all values, and r insertions into an orthonormal frame.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.optimize import nnls
from torch import Tensor
from tqdm import tqdm

from pipelines.provenance import run_on
from value_aware_attention.approximations import OptimalValueAware, closest_combination
from value_aware_attention.approximations.closest_combination import Problem
from value_aware_attention.kernels import Exponential

HEAD_DIM = 64
SIZES = (1, 2, 4, 8, 16, 32, 65)
LENGTHS = {512: 4, 2048: 2}
"""Length -> heads."""
SLOWEST = {"torch": {"best": 2, "default": 16, "fast": 65}, "compiled": {"best": 16}}
"""Largest r measured where more would take minutes."""
FOLDER = Path("results/benchmarks")


@dataclass(frozen=True)
class Row:
    """One setting; ratios are to exact attention."""

    length: int
    engine: str
    search: str
    r: int
    solve: float
    call: float
    floor: float
    relative_output_error: float


def main() -> None:
    arguments = parser().parse_args()
    if arguments.memory_of:
        print(peak_memory(arguments.memory_of))
        return
    lengths = {512: LENGTHS[512]} if arguments.quick else LENGTHS
    sizes = (8, 16, 65) if arguments.quick else SIZES
    rows = [row for length, heads in lengths.items() for row in measure(length, heads, sizes)]
    record = {
        "run_on": run_on() | {"threads": torch.get_num_threads()},
        "head_dim": HEAD_DIM,
        "inputs": "Gaussian queries, keys and values, fp32",
        "heads": lengths,
        "rows": [asdict(row) for row in rows],
        "one_query_at_a_time": solvers(),
        "peak_memory": {} if arguments.quick else memory(),
    }
    print(page(record))
    if arguments.quick:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "optimal_value_aware.json").write_text(json.dumps(record, indent=1) + "\n")
    (FOLDER / "optimal_value_aware.md").write_text(page(record))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="L = 512 and three sizes only")
    made.add_argument("--memory-of", help=argparse.SUPPRESS)
    return made


def inputs(length: int, heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (heads, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    return query, key, value


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * HEAD_DIM**-0.5).softmax(dim=-1) @ value


def problem_of(query: Tensor, key: Tensor, value: Tensor) -> Problem:
    inputs = OptimalValueAware(1).inputs(query, key, value, Exponential(), None, False)
    return closest_combination.flatten(inputs)


def measure(length: int, heads: int, sizes: tuple[int, ...]) -> Iterator[Row]:
    """Every engine, search and size at one length."""
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
        peer = partial(exact, *tensors)
        solve = ratio(partial(closest_combination.solve, problem, r, search, engine), peer)
        call = ratio(partial(method, *tensors), peer)
        error = (method(*tensors) - whole).square().sum() / whole.square().sum()
        yield Row(length, engine, search, r, solve, call, floor(r, length), float(error))


def floor(r: int, length: int) -> float:
    """Multiply-adds of r scans and r insertions (2 size width + size^2 / 2), over exact's."""
    width = HEAD_DIM + 1
    insertions = sum(2 * size * width + size**2 / 2 for size in range(1, r))
    return (r * length * HEAD_DIM + insertions) / (2 * length * HEAD_DIM)


def ratio(work: Callable[[], object], peer: Callable[[], object], budget: float = 2.0) -> float:
    """Median over repeats of the time of `work` over that of `peer`, run in turn."""
    work(), peer(), peer()
    ratios, started = [], time.perf_counter()
    while len(ratios) < 3 or (time.perf_counter() - started < budget and len(ratios) < 30):
        spent = seconds(work)
        times = max(1, min(20, round(spent / 0.01)))
        ratios.append(spent / median(seconds(peer) for _ in range(times)))
        if spent > 3 * budget:
            break
    return median(ratios)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def solvers() -> dict[str, Any]:
    """Microseconds a query at r = d + 1 of solvers that take one query at a time, and of ours."""
    problem = problem_of(*inputs(512, 4))
    total = problem.output[..., 0].numel()
    record: dict[str, float] = {
        engine: 1e6 * min(seconds(partial(full, problem, engine)) for _ in range(3)) / total
        for engine in ("compiled", "torch")
    }
    value = problem.value[0].double()
    record["scipy.optimize.nnls"] = each(problem, 64, lambda o: by_nnls(value, o))
    record["clarabel (QP)"] = each(problem, 8, lambda o: by_clarabel(value, o))
    return record


def full(problem: Problem, engine: str) -> None:
    closest_combination.solve(problem, HEAD_DIM + 1, "fast", engine)


def each(problem: Problem, count: int, solve: Callable[[Tensor], None]) -> float:
    outputs = problem.output[0, :count].double()
    solve(outputs[0])
    return 1e6 * seconds(lambda: [solve(output) for output in outputs]) / count


def by_nnls(value: Tensor, output: Tensor) -> None:
    lifted = torch.cat([(value - output).T, torch.ones(1, len(value), dtype=value.dtype)])
    target = torch.zeros(len(lifted), dtype=value.dtype)
    target[-1] = 1
    nnls(lifted.numpy(), target.numpy())


def by_clarabel(value: Tensor, output: Tensor) -> None:
    """min ||V'b - o||^2 over the simplex as min z'z, z = V'b - o."""
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
    """Peak MiB above the inputs, each in a fresh process, L = 2048 with 4 heads."""
    names = ("exact", *(f"{engine} {r}" for engine in ("compiled", "torch") for r in (16, 65)))
    command = [sys.executable, "-m", "benchmarks.optimal_value_aware", "--memory-of"]
    return {
        name: float(subprocess.run([*command, name], capture_output=True, check=True).stdout)
        for name in names
    }


def peak_memory(name: str) -> float:
    tensors = inputs(2048, 4)
    small = [x[:, :64] for x in tensors]
    if name == "exact":
        work: Callable[..., Tensor] = exact
    else:
        engine, r = name.split()
        work = OptimalValueAware(int(r), "fast", engine)
    work(*small)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = resident("VmRSS")
    work(*tensors)
    return resident("VmHWM") - before


def resident(name: str) -> float:
    """A figure of this process's memory in MiB, as Linux reports it."""
    status = Path("/proc/self/status").read_text()
    return int(next(x.split()[1] for x in status.splitlines() if x.startswith(name))) / 1024


def page(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    on = record["run_on"]
    lines = [
        "# optimal-v-aware-r: cost as a ratio to exact attention",
        "",
        f"{record['inputs']}, head size {record['head_dim']}; {on['hardware']}, "
        f"{on['threads']} threads; versions: {json.dumps(on['versions'])}.",
        "",
        "| L | engine | search | r | solve | call | floor | relative output error |",
        "|--:|:--|:--|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['length']} | {row['engine']} | {row['search']} | {row['r']} "
            f"| {row['solve']:.1f} | {row['call']:.1f} | {row['floor']:.1f} "
            f"| {row['relative_output_error']:.1e} |"
        )
    lines += ["", f"## r = d + 1 = {HEAD_DIM + 1}, L = 512: microseconds a query", ""]
    lines += ["| solver | microseconds |", "|:--|--:|"]
    lines += [f"| {name} | {value:,.0f} |" for name, value in record["one_query_at_a_time"].items()]
    if record["peak_memory"]:
        lines += ["", "## Peak memory above the inputs, L = 2048, 4 heads, fresh process", ""]
        lines += ["| method | MiB |", "|:--|--:|"]
        lines += [f"| {name} | {value:,.0f} |" for name, value in record["peak_memory"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
