"""Measures the memory of an evaluation at 4096 tokens and 12 heads of 64, at two memory_gib.

    python -m benchmarks.evaluation_memory                      # most of an hour on two cores
    python -m benchmarks.evaluation_memory --kinds method cell  # these rows anew, the others kept

Writes results/benchmarks/evaluation_memory.json and .md, row by row, each in a fresh process: whole
grid cells (end metric, output error of every layer, and what is measured of every layer beside the
grid) of a random RoBERTa of one layer, and of one as deep and with as many types as roberta-base;
and methods on one sequence of random queries, keys and values.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from benchmarks.record import FOLDER, header, markdown, setting, write
from value_aware_attention.approximations import (
    LSH,
    Exact,
    LeaveOneOutKeys,
    Nystrom,
    OptimalValueAware,
    OptimalValueOblivious,
    OrthogonalRandomFeatures,
    SampledKeys,
)
from value_aware_attention.call import chunked, max_elements_within
from value_aware_attention.measurement import Setting, measure
from value_aware_attention.models import build_roberta
from value_aware_study.benchmarking.process import resident_peak
from value_aware_study.data.batches import MaskedSequences
from value_aware_study.evaluation.texts import masked_task

LENGTH, HEADS, HEAD_DIM = 4096, 12, 64
MODELS = {
    "cell": {"layers": 1, "vocabulary_size": 1000, "sequences": 2},
    "roberta-base": {"layers": 12, "vocabulary_size": 50_265, "sequences": 1},
}
METHODS: dict[str, Callable[[], nn.Module]] = {
    "Exact()": Exact,
    "OptimalValueOblivious(65)": partial(OptimalValueOblivious, 65),
    "OptimalValueOblivious(4096)": partial(OptimalValueOblivious, 4096),
    "OptimalValueAware(4)": partial(OptimalValueAware, 4),
    "OptimalValueAware(65)": partial(OptimalValueAware, 65),
    "LeaveOneOutKeys(16)": partial(LeaveOneOutKeys, 16),
    "SampledKeys(16)": partial(SampledKeys, 16, seed=0),
    "LSH(512, rounds=16)": partial(LSH, 512, rounds=16, seed=0),
    "Nystrom(64)": partial(Nystrom, 64),
    "OrthogonalRandomFeatures(1024)": partial(OrthogonalRandomFeatures, 1024, seed=0),
}
KINDS: dict[str, tuple[str, ...]] = {
    "cell": ("OptimalValueOblivious(4096)", "OptimalValueAware(4)"),
    "method": tuple(METHODS),
    "roberta-base": ("OptimalValueAware(4)",),
}
MEMORY = (1.0, 0.25)
MALLOC = "MALLOC_MMAP_THRESHOLD_"
"""Variable that lets glibc return every large block; without it the process keeps them."""


def main() -> None:
    """Measures and writes the table row by row, or measures the one row of --row."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs=3, metavar=("KIND", "METHOD", "GIB"), help="internal")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    if row := given.row:
        print(json.dumps(measured(row[0], row[1], float(row[2]))))
        return
    wanted = [(kind, name, gib) for gib in MEMORY for kind in given.kinds for name in KINDS[kind]]
    rows = [row for row in written() if row["kind"] not in given.kinds]
    for one in tqdm(wanted):
        rows.append(fresh(*one))
        record = recorded(rows)
        write("evaluation_memory", record, page(record), FOLDER)


def written() -> list[dict[str, Any]]:
    """Reads the rows of the last run, with their threads and code."""
    path = FOLDER / "evaluation_memory.json"
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    had = {"threads": record["run_on"]["threads"], "source": record.get("source", "")}
    return [had | row for row in record["rows"]]


def recorded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Builds the record; its source is that of the first row of older code, if there is one."""
    sizes = {"length": LENGTH, "heads": HEADS, "head_dim": HEAD_DIM}
    now = header("evaluation_memory")
    rows = [{"source": now["source"]} | row for row in rows]
    older = [row["source"] for row in rows if row["source"] != now["source"]]
    return now | {"source": [*older, now["source"]][0], **sizes, "models": MODELS, "rows": rows}


def fresh(kind: str, name: str, gib: float) -> dict[str, Any]:
    """Measures a row in a process of its own; MALLOC is set for blocks below the default."""
    environment = os.environ | ({MALLOC: str(2**20)} if gib < 1 else {})
    command = [sys.executable, "-m", "benchmarks.evaluation_memory", "--row", kind, name, str(gib)]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def measured(kind: str, name: str, gib: float) -> dict[str, Any]:
    """Measures a row: MiB above those held before, MiB of the whole process, and seconds."""
    torch.manual_seed(0)
    work = cell_evaluation(name, **MODELS[kind]) if kind in MODELS else method_call(name)
    began = time.perf_counter()
    with torch.inference_mode(), chunked(max_elements_within(gib)):
        above = resident_peak(work)
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "kind": kind, "method": name, "memory_gib": gib, "above": round(above),
        "whole": round(whole), "seconds": round(time.perf_counter() - began, 1),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def method_call(name: str) -> Any:
    inputs = [torch.randn(1, HEADS, LENGTH, HEAD_DIM) for _ in range(3)]
    method = METHODS[name]()
    # An evaluation asks the methods that solve for their weights what they chose.
    solves = getattr(method, "solves_for_weights", False)
    return lambda: (method.select if solves else method)(*inputs)


def cell_evaluation(name: str, *, layers: int, vocabulary_size: int, sequences: int) -> Any:
    """Returns the work of one cell on a RoBERTa: its grid, and all measures of its layers."""
    model = build_roberta(
        vocabulary_size=vocabulary_size, layers=layers, width=HEADS * HEAD_DIM, heads=HEADS,
        feedforward=4 * HEADS * HEAD_DIM, length=LENGTH, block=512, dropout=0.0,
    )  # fmt: skip
    scratch = Path(tempfile.mkdtemp())
    rows = np.random.default_rng(0).integers(5, vocabulary_size, size=(sequences, LENGTH))
    np.save(scratch / "rows.npy", rows)
    read = MaskedSequences(
        [scratch / "rows.npy"], length=LENGTH, mask_token=4, special_tokens=[0, 1, 2, 3, 4],
        vocabulary_size=vocabulary_size,
    )  # fmt: skip
    task = masked_task(
        model=model, sequences=read, seed=0, units=None, batch_size=1, recorded_units=2,
        device="cpu",
    )  # fmt: skip
    method = Setting(name, {}, lambda layer: METHODS[name]())
    return lambda: measure(task, [method], cache=scratch)


def page(record: dict[str, Any]) -> str:
    """Renders the record as a table."""
    cell, base = record["models"].values()
    headers = ["", "method", "evaluation.memory_gib", "MiB above what was held before",
               "MiB of the process", "seconds", "threads", "code"]  # fmt: skip
    rows = [
        (row["kind"], row["method"], f"{row['memory_gib']:g}", row["above"], row["whole"],
         row["seconds"], row["threads"], row["source"][:12])
        for row in record["rows"]
    ]  # fmt: skip
    return (
        "# Memory of an evaluation at 4096 tokens\n\n"
        f"{record['heads']} heads of {record['head_dim']}, {record['length']} tokens, fp32, a "
        f"fresh process a row, measured once. {setting(record)} A method: one call on one "
        f"sequence. A cell: the evaluation of a RoBERTa of {cell['layers']} layer on "
        f"{cell['sequences']} sequences with that method in the place of its attention, one "
        "sequence at a time, and all that is measured of the layer, r = 65 included. roberta-base: "
        f"the same of {base['layers']} layers and {base['vocabulary_size']:,} types on "
        f"{base['sequences']} sequence; the weights, there before, are in the process' memory. "
        f"Rows below 1 GiB with `{MALLOC}={2**20}`. Seconds are of a machine with other work."
        f"\n\n{markdown(headers, rows, names=2)}\n"
    )


if __name__ == "__main__":
    main()
