"""Measures the memory of an evaluation at 4096 tokens and 12 heads of 64, at two memory_gib.

    python -m benchmarks.evaluation_memory            # most of an hour on two cores
    python -m benchmarks.evaluation_memory --quick    # one row; writes nothing

Writes results/benchmarks/evaluation_memory.json and .md. A row is a fresh process. It runs whole
grid cells (end metric, output error of every layer, and the other measurements of every layer) of a
random RoBERTa of one layer, or of one with the depth and vocabulary of roberta-base; or methods on
one sequence of random queries, keys and values.
"""

import os
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from benchmarks.memory import in_fresh_process, resident_peak
from benchmarks.record import finish, header, markdown, options, setting
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
    """Measures, prints the table, and writes it unless asked for --quick."""
    quick = options(__doc__).parse_args().quick
    cases = [(kind, name, gib) for gib in MEMORY for kind in KINDS for name in KINDS[kind]]
    if quick:
        cases = [("method", "Exact()", 1.0)]
    rows = []
    for kind, name, gib in tqdm(cases):
        with patch.dict(os.environ, {MALLOC: str(2**20)} if gib < 1 else {}):
            rows.append(in_fresh_process(measured, kind, name, gib))
    record = header("evaluation_memory") | {"length": LENGTH, "heads": HEADS, "head_dim": HEAD_DIM}
    record |= {"models": MODELS, "rows": rows}
    finish("evaluation_memory", record, page(record), keep=not quick)


def measured(kind: str, name: str, gib: float) -> dict[str, str | float]:
    """Measures a row: MiB above those held before, MiB of the whole process, and seconds."""
    torch.manual_seed(0)
    work = cell_evaluation(name, **MODELS[kind]) if kind in MODELS else method_call(name)
    began = time.perf_counter()
    with torch.inference_mode(), chunked(max_elements_within(gib)):
        above = resident_peak(work)
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent = round(time.perf_counter() - began, 1)
    row = {"kind": kind, "method": name, "memory_gib": gib}
    return row | {"above": round(above), "whole": round(whole), "seconds": spent}


def method_call(name: str) -> Callable[[], object]:
    inputs = [torch.randn(1, HEADS, LENGTH, HEAD_DIM) for _ in range(3)]
    method = METHODS[name]()
    # An evaluation asks methods that solve for their weights for their choice.
    solves = getattr(method, "solves_for_weights", False)
    return lambda: (method.select if solves else method)(*inputs)


def cell_evaluation(
    name: str, *, layers: int, vocabulary_size: int, sequences: int
) -> Callable[[], object]:
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
    headers = ["", "method", "evaluation.memory_gib", "MiB above what was held before"]
    headers += ["MiB of the process", "seconds"]
    rows = [
        [row["kind"], row["method"], f"{row['memory_gib']:g}"]
        + [row[name] for name in ("above", "whole", "seconds")]
        for row in record["rows"]
    ]
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
