"""Measures how far cache methods are from the optimum that branch and bound proves.

    python -m benchmarks.cache_optimum            # hours on one core: at most a minute a cache
    python -m benchmarks.cache_optimum --quick    # 10 keys, two caches; writes nothing

One key-value head, fp64, one thread, random queries, keys and values; sharp: four times the usual
length of queries. First the number of keys up to which a minute proves the optimum, for each part
kept; then, at a size where it nearly always does, each method's error over the proved optimum:
the share of caches where it is the optimum (1e-6), the median, the largest, and the geometric mean
with its 95% interval. Caches that are not proved are counted and left out. Writes
results/benchmarks/cache_optimum.json and .md.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from value_aware_attention import caches
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial

KERNELS: dict[str, Kernel] = {
    "exponential": Exponential(),
    "polynomial": Polynomial(),
    "elu": Elu(),
}
SHARPNESS = {"flat": 0.3, "usual": 1.0, "sharp": 4.0}
SHAPES = ((32, 16), (128, 64))
"""Observed queries, and numbers of a head"""
PARTS = (8, 4, 2)
KEYS = range(16, caches.optimum.MOST_KEYS + 1, 8)
SECONDS = 60.0
CACHES = 20
COMPARED = 24
"""Keys of the caches on which methods are compared"""
METHODS: dict[str, Callable[[int], caches.CacheMethod]] = {
    "ValueAware, fast": partial(caches.ValueAware, search="fast"),
    "ValueAware": caches.ValueAware,
    "ValueAware, best": partial(caches.ValueAware, search="best"),
    "LeaveOneOut": caches.LeaveOneOut,
    "ObservedAttention": caches.ObservedAttention,
    "KeyDiff": caches.KeyDiff,
    "KeyNorm": caches.KeyNorm,
    "Random": partial(caches.Random, seed=0),
}


def main() -> None:
    """Measures, prints the tables, and writes them unless asked for --quick."""
    quick = options(__doc__).parse_args().quick
    torch.set_num_threads(1)
    kinds = list(product(KERNELS, SHARPNESS))
    shapes, keys, compared, count, seconds = SHAPES, KEYS, COMPARED, CACHES, SECONDS
    if quick:
        kinds, shapes, keys, compared, count, seconds = kinds[1:2], ((8, 4),), (8, 10), 10, 2, 5.0
    reached = [
        reach(kernel, sharp, shape, part, keys, seconds)
        for (kernel, sharp), shape, part in tqdm(list(product(kinds, shapes, PARTS)))
    ]
    rows = [
        row
        for (kernel, sharp), part in tqdm(list(product(kinds, PARTS)))
        for row in comparison(kernel, sharp, shapes[0], compared, part, count, seconds)
    ]
    record = header("cache_optimum") | {"seconds": seconds, "keys": compared, "caches": count}
    record |= {"reached": reached, "rows": rows}
    finish("cache_optimum", record, page(record), keep=not quick)


def drawn(
    kernel: str, sharp: str, shape: tuple[int, int], keys: int, seed: int = 0
) -> caches.Observed:
    """Draws a cache and the queries that it is judged by."""
    generator, (rows, size) = torch.Generator().manual_seed(seed), shape
    query, key, value = (
        torch.randn(1, n, size, generator=generator, dtype=torch.float64)
        for n in (rows, keys, keys)
    )
    return caches.Observed(SHARPNESS[sharp] * query[:, None], key, value, KERNELS[kernel])


def reach(
    kernel: str, sharp: str, shape: tuple[int, int], part: int, keys: Any, seconds: float
) -> dict[str, Any]:
    """Raises the number of keys until a search ends unproved: the last proved, and that gap."""
    found: dict[str, Any] = {"kernel": kernel, "attention": sharp, "shape": shape, "part": part}
    found |= {"proved": None, "took": None, "beyond": None, "gap": None}
    for count in keys:
        seen, start = drawn(kernel, sharp, shape, count), perf_counter()
        best = caches.optimal_set(seen, max(1, count // part), seconds=seconds)
        if not best.proved.all():
            gap = float(best.error / best.lower_bound) if best.lower_bound > 0 else None
            return found | {"beyond": count, "gap": gap}
        found |= {"proved": count, "took": perf_counter() - start}
    return found


def comparison(
    kernel: str,
    sharp: str,
    shape: tuple[int, int],
    keys: int,
    part: int,
    count: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Compares every method with the optimum of the caches for which it is proved."""
    ratios: dict[str, list[float]] = {name: [] for name in METHODS}
    r = max(1, keys // part)
    for seed in range(count):
        seen = drawn(kernel, sharp, shape, keys, seed)
        best = caches.optimal_set(seen, r, seconds=seconds)
        if best.proved.all():
            for name, build in METHODS.items():
                ratios[name].append(float(seen.error(build(r).keep(seen)) / best.error))
    where = {"kernel": kernel, "attention": sharp, "r": r}
    return [where | {"method": name} | summary(of) for name, of in ratios.items()]


def summary(ratios: list[float]) -> dict[str, Any]:
    """Describes errors over the optimum; without an interval below two of them."""
    if not ratios:
        return {"proved": 0, "optimal": None, "median": None, "largest": None, "mean": None}
    logs, count = np.log(ratios), len(ratios)
    half = student.ppf(0.975, count - 1) * logs.std(ddof=1) / count**0.5 if count > 1 else None
    ends = [] if half is None else [float(np.exp(logs.mean() + x)) for x in (-half, half)]
    return {
        "proved": count,
        "optimal": float(np.mean(np.array(ratios) <= 1 + 1e-6)),
        "median": float(np.median(ratios)),
        "largest": max(ratios),
        "mean": [float(np.exp(logs.mean())), *ends],
    }


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    reached = [
        [
            row["kernel"],
            row["attention"],
            "{} queries, {} numbers".format(*row["shape"]),
            f"M/{row['part']}",
            _number(row["proved"], "d"),
            _number(row["took"], ".1f"),
            "–" if row["beyond"] is None else f"{_number(row['gap'], '.2f')} at {row['beyond']}",
        ]
        for row in record["reached"]
    ]
    rows = [
        [
            row["kernel"],
            row["attention"],
            row["r"],
            row["method"],
            row["proved"],
            _number(row["optimal"], ".0%"),
            _number(row["median"], ".3f"),
            _number(row["largest"], ".2f"),
            _interval(row["mean"]),
        ]
        for row in record["rows"]
    ]
    head = ["kernel", "attention", "head", "r", "keys proved", "seconds", "error / bound beyond"]
    of = ["kernel", "attention", "r", "method", "caches proved", "optimal", "median", "largest"]
    return (
        "# The optimal set of keys of a cache\n\n"
        "`caches.optimal_set`: branch and bound, one cache of random queries, keys and values, "
        f"one thread, at most {record['seconds']:g} seconds a search. {setting(record)}\n\n"
        "## Largest number of keys proved within the time\n\n"
        "Seconds count the set of `ValueAware` that the search starts from. Beyond: the error of "
        f"the best set found over its proved lower bound.\n\n{markdown(head, reached, names=4)}\n\n"
        f"## Error over the proved optimum, {record['keys']} keys, {record['caches']} caches each"
        f"\n\n{markdown([*of, 'geometric mean'], rows, names=4)}\n"
    )


def _number(value: float | None, how: str) -> str:
    return "–" if value is None else format(value, how)


def _interval(mean: list[float] | None) -> str:
    if mean is None:
        return "–"
    shown = f"{mean[0]:.3f}"
    return f"{shown} ({mean[1]:.3f} to {mean[2]:.3f})" if len(mean) > 1 else shown


if __name__ == "__main__":
    main()
