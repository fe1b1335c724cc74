"""Measures the loss of cheaper choices of a cache's keys, and of other turns of observed queries.

    make caches && python -m benchmarks.cache_choices            # about ten minutes on one core
    python -m benchmarks.cache_choices --quick                   # two texts; writes nothing

The joint search of `caches.ValueAware` on the models of `make caches` with one key of 8 and of 4
kept, on the same texts with fewer observed queries, and with non-causal queries that rotary
positions turn by other amounts. Errors are those of queries that were not observed, beside those of
128 queries, turned by the length of the prefix: ratios of means over texts, with 95% intervals from
paired differences. Writes results/benchmarks/cache_choices.json and .md.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hydra.utils import instantiate
from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from pipelines.app import composed
from value_aware_attention import caches
from value_aware_attention.caches.observed import OBSERVED, Choice
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_attention.measurement.caches import cache_settings, measure_caches
from value_aware_attention.measurement.record import estimate
from value_aware_attention.measurement.task import Task

TEXTS = ("recall", "markov", "copying", "docstrings")
ROTARY = ("recall", "markov", "copying")
PARTS = (8, 4)
ROWS = 128
METHODS: dict[str, Callable[[int], caches.CacheMethod]] = {
    "joint": caches.ValueAware,
    "DropKV": caches.LeaveOneOut,
}
TURNS = {"not at all": 0.0, "half the prefix": 0.5, "1.5 prefixes": 1.5, "2 prefixes": 2.0}
"""Rotation of non-causal queries, in lengths of the prefix"""


def main() -> None:
    """Measures, prints the table, and writes it unless asked for --quick."""
    arguments = options(__doc__).parse_args()
    torch.set_num_threads(1)
    units, seeds = (2, [0]) if arguments.quick else (8, [0, 1, 2])
    rows = [row for name in tqdm(TEXTS) for row in measured(name, units, seeds)]
    record = header("cache_choices") | {"units": units * len(seeds), "rows": rows}
    finish("cache_choices", record, page(record), keep=not arguments.quick)


def measured(name: str, units: int, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """Measures every setting on one model's texts, the usual one first.

    `seconds` are those of one choice for a key-value head.
    """
    cfg = composed("caches", [f"texts={name}"]).caches
    task: Task = instantiate(cfg.load, seeds=seeds, units=units)
    record = one(task, name, METHODS, ROWS)
    usual = {cell.r: cell for cell in record.cells if cell.method == "joint"}
    only = {"joint": METHODS["joint"]}
    records = {"": record}
    records |= {f", {rows} queries": one(task, name, only, rows) for rows in (64, 32, 16)}
    if name in ROTARY:
        records |= {f", turned {by}": turned_by(task, name, only, of) for by, of in TURNS.items()}
    records[", repeated prefix"] = one(task, name, only, ROWS, "repeat")
    for how, each in records.items():
        for cell in each.cells:
            error, beside = (np.array(x.by_unit["error"]) for x in (cell, usual[cell.r]))
            over_usual = asdict(estimate(error, beside))
            yield {
                "texts": name,
                "r": cell.r,
                "setting": f"{cell.method}{how}",
                "error": float(error.mean()),
                "kl": float(np.mean(cell.by_unit["kl"])),
                "seconds": cell.seconds,
                "ratio": over_usual.pop("value"),
                **over_usual,
            }


def one(task: Task, name: str, methods: Any, rows: int, observed: str = "noncausal") -> CacheRecord:
    """Measures methods with `rows` observed queries."""
    settings = cache_settings(
        methods, sizes=[task.first_row // divisor for divisor in PARTS], observed=[observed],
        prefix=task.first_row, rows=rows,
    )  # fmt: skip
    return measure_caches(task, settings, model_name=name, task_name=name, progress=False)


def turned_by(task: Task, name: str, methods: Any, of: float) -> CacheRecord:
    """Measures methods whose non-causal queries are turned by a part `of` the prefix."""

    def noncausal(choice: Choice) -> dict[str, Any]:
        return noncausal(replace(choice, start=round(of * choice.start)))

    with patch.dict(OBSERVED, noncausal=noncausal):  # type: ignore[arg-type]
        return one(task, name, methods, ROWS)


def page(record: dict) -> str:
    """Renders the record as Markdown."""
    rows = [
        (
            row["texts"],
            row["r"],
            row["setting"],
            f"{row['error']:.4f}",
            f"{1e3 * row['kl']:,.1f}",
            _interval(row),
            f"{1e3 * row['seconds']:.1f}",
        )
        for row in record["rows"]
    ]
    head = ["texts", "r", "choice", "error", "KL, milli-nats", "error over the usual", "ms a head"]
    return (
        "# Cheaper choices of a cache's keys, and turned queries\n\n"
        f'Errors of queries that were not observed, {record["units"]} texts each. "Joint": '
        f"`ValueAware` with {ROWS} non-causal queries, turned by the length of the prefix where a "
        "model has rotary positions (docstrings' has none). "
        f"{setting(record)}\n\n{markdown(head, rows, names=3)}\n"
    )


def _interval(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return "–"
    ends = "–" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}"
    return f"{row['ratio']:.2f} ({ends})"


if __name__ == "__main__":
    main()
