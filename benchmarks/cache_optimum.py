"""Measures how far cache methods are from the optimum that branch and bound proves.

    python -m benchmarks.cache_optimum            # about six minutes on one core
    python -m benchmarks.cache_optimum --quick    # 10 keys, two caches; writes nothing

One key-value head of 16 numbers, 24 observed queries, fp64, one thread. Random queries, keys and
values; sharp: four times the usual length of queries. Repeated: eight kinds of tokens, whose
queries, keys and values differ by noise of half their spread. The first table has the number of
keys up to which a search ends in time, for each share kept. The second has each method's error over
the proved lower bound of every set: the share of caches where it is the optimum (1e-6), the median,
the largest, and the geometric mean with its 95% interval. "SmolLM2" has the caches of every third
layer of the packaged decoder on docstrings, with all queries of the prompt observed as "continued".
Heads of one model are not independent draws. Writes results/benchmarks/cache_optimum.json and .md.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from scipy.stats import t as student
from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from value_aware_attention import caches
from value_aware_attention.decoding.reading import SharedReading
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial
from value_aware_attention.probe import loaded
from value_aware_study.data.text import Docstrings
from value_aware_study.evaluation.pretrained import packaged_model

KERNELS: dict[str, Kernel] = {
    "exponential": Exponential(),
    "polynomial": Polynomial(),
    "elu": Elu(),
}
SHARPNESS = {"flat": 0.3, "usual": 1.0, "sharp": 4.0, "repeated": 1.0}
"""Length of queries"""
ROWS, HEAD_DIM, KINDS = 24, 16, 8
PARTS = (4, 2)
KEYS = range(16, caches.optimum.MOST_SOLVED + 1, 8)
SECONDS = 5.0
"""Most of a search"""
CACHES = 5
COMPARED = 24
"""Keys of the caches on which methods are compared"""
DECODER, CARD = "SmolLM2", "conf/pretrained/smollm2.yaml"
PROMPTS = (32, 48)
"""Tokens of its prompts"""
METHODS: dict[str, Callable[[int], caches.CacheMethod]] = {
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
    kinds = [
        (kernel, attention, divisor)
        for kernel, attention, divisor in product(KERNELS, SHARPNESS, PARTS)
        if kernel != "polynomial" or attention not in ("flat", "sharp")  # the same weights
    ]
    keys, compared, count = KEYS, COMPARED, CACHES
    if quick:
        kinds, keys, compared, count = kinds[2:4], range(8, 11, 2), 10, 2
    usual = [kind for kind in kinds if kind[1] in ("usual", "repeated")]
    reached = [reach(*kind, keys) for kind in tqdm(usual or kinds)]
    rows = [row for kind in tqdm(kinds) for row in comparison(*kind, compared, count)]
    rows += [row for keys in tqdm(() if quick else PROMPTS) for row in of_decoder(keys)]
    record = header("cache_optimum") | {"seconds": SECONDS, "keys": compared, "caches": count}
    record |= {"reached": reached, "rows": rows}
    finish("cache_optimum", record, page(record), keep=not quick)


def drawn(kernel: str, attention: str, keys: int, seed: int = 0) -> caches.Observed:
    """Draws a cache and the queries that it is judged by."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, HEAD_DIM, generator=generator, dtype=torch.float64)

    query, key, value = normal(ROWS), normal(keys), normal(keys)
    if attention == "repeated":
        of_queries, of_keys = (
            torch.randint(KINDS, (n,), generator=generator) for n in (ROWS, keys)
        )
        tokens, values = normal(KINDS), normal(KINDS)
        query, key = tokens[of_queries] + query / 2, tokens[of_keys] + key / 2
        value = values[of_keys] + value / 2
    query = SHARPNESS[attention] * query
    return caches.Observed(query[None, None], key[None], value[None], KERNELS[kernel])


def reach(kernel: str, attention: str, divisor: int, keys: range) -> dict[str, Any]:
    """Raises the number of keys until a search ends unproved: the last proved, and that gap."""
    row: dict[str, Any] = {"kernel": kernel, "attention": attention, "part": divisor}
    row |= {"proved": None, "took": None, "beyond": None, "gap": None}
    for count in keys:
        observed, start = drawn(kernel, attention, count), perf_counter()
        best = caches.optimal_set(observed, count // divisor, seconds=SECONDS)
        if not best.proved.all():
            gap = float(best.error / best.lower_bound) if best.lower_bound > 0 else None
            return row | {"beyond": count, "gap": gap}
        row |= {"proved": count, "took": perf_counter() - start}
    return row


def comparison(
    kernel: str, attention: str, divisor: int, keys: int, count: int
) -> list[dict[str, Any]]:
    """Compares every method with the proved lower bound, unless that is 0."""
    observed = [drawn(kernel, attention, keys, seed) for seed in range(count)]
    return compared(observed, {"kernel": kernel, "attention": attention, "r": keys // divisor})


def of_decoder(keys: int) -> Iterator[dict[str, Any]]:
    """Compares every method on the caches of the packaged decoder, a quarter of the keys kept."""
    model, tokenizer = loaded(packaged_model(OmegaConf.load(CARD), ".cache/benchmark"))
    text = "\n\n".join(document.text for document in Docstrings(package="networkx"))
    tokens = tokenizer(text[:9999], return_tensors="pt").input_ids[:, : keys + 1]
    reading = SharedReading(model, tokens, keys)
    after = caches.AfterPrefix(
        caches.LeaveOneOut(keys // 4), prefix=keys, observed="continued", sinks=0, recent=0
    )
    observed = [
        layer.cache((0, head))
        for call in reading.calls[::3]
        for layer in [after.observe(**call.arguments(), layer=call.layer)]
        for head in range(layer.batch[1])
    ]
    yield from compared(
        observed, {"kernel": DECODER, "attention": f"{keys} tokens", "r": keys // 4}
    )


def compared(observed: Sequence[caches.Observed], where: dict[str, Any]) -> list[dict[str, Any]]:
    """Compares every method with the proved lower bound of each cache."""
    ratios: dict[str, list[float]] = {name: [] for name in METHODS}
    r, proved = where["r"], 0
    for cache in observed:
        best = caches.optimal_set(cache, r, seconds=SECONDS)
        proved += bool(best.proved.all())
        for name, build in METHODS.items() if best.lower_bound > 0 else ():
            ratios[name].append(float(cache.error(build(r).keep(cache)) / best.lower_bound))
    shares = {"caches": len(observed), "proved": proved}
    return [where | shares | {"method": name} | summary(of) for name, of in ratios.items()]


def summary(ratios: list[float]) -> dict[str, Any]:
    """Describes errors over the optimum; without an interval below two of them."""
    if not ratios:
        return {"optimal": None, "median": None, "largest": None, "mean": None}
    logs, count = np.log(ratios), len(ratios)
    half = student.ppf(0.975, count - 1) * logs.std(ddof=1) / count**0.5 if count > 1 else None
    ends = [] if half is None else [float(np.exp(logs.mean() + x)) for x in (-half, half)]
    return {
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
            f"{row['proved']} of {row['caches']}",
            _number(row["optimal"], ".0%"),
            _number(row["median"], ".3f"),
            _number(row["largest"], ".2f"),
            _interval(row["mean"]),
        ]
        for row in record["rows"]
    ]
    head = ["kernel", "attention", "r", "keys proved", "seconds", "error / bound beyond"]
    of = ["kernel", "attention", "r", "method", "caches proved", "optimal", "median", "largest"]
    return (
        "# The optimal set of keys of a cache\n\n"
        f"`caches.optimal_set`: branch and bound, one cache of {HEAD_DIM} numbers a head and "
        f"{ROWS} observed queries, one thread, at most {record['seconds']:g} seconds a search. "
        f"{setting(record)}\n\n"
        "## Largest number of keys proved within the time\n\n"
        "Seconds count the set of `ValueAware` that the search starts from. Beyond: the error of "
        f"the best set found over its proved lower bound.\n\n{markdown(head, reached, names=3)}\n\n"
        f"## Error over the proved bound, a quarter or a half of {record['keys']} keys"
        f"\n\n{markdown([*of, 'geometric mean'], rows, names=4)}\n"
    )


def _number(value: float | None, how: str) -> str:
    return "–" if value is None else format(value, how)


def _interval(mean: list[float] | None) -> str:
    if mean is None:
        return "–"
    middle = f"{mean[0]:.3f}"
    return f"{middle} ({mean[1]:.3f} to {mean[2]:.3f})" if len(mean) > 1 else middle


if __name__ == "__main__":
    main()
