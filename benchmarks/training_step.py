"""A whole training step of the causal LM with each kernel, beside transformers' GPT-2.

    python -m benchmarks.training_step            # about three minutes on two cores
    python -m benchmarks.training_step --quick    # fewer rounds; writes nothing

One step is forward, loss over the whole vocabulary, backward and AdamW's update, in fp32, dropout
off: 6 layers of width 512, 8 heads, 512 tokens, a vocabulary of 50,000. GPT-2 has the same shape,
with learned positions, gelu and transformers' own loss. All take a step in every round, in turn.
Writes results/benchmarks/training_step.json and .md.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import AdamW
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from pipelines.provenance import run_on
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial
from value_aware_attention.models import CausalLanguageModel
from value_aware_attention.training.causal import CausalTraining
from value_aware_attention.training.schedules import InverseSquareRoot

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 6, 512, 8, 512, 2, 50_000
KERNELS: dict[str, Kernel] = {
    "exponential": Exponential(),
    "polynomial": Polynomial(),
    "elu": Elu(),
}
PEER = "GPT-2 (transformers)"
FOLDER = Path("results/benchmarks")
Step = Callable[[Tensor], float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds; writes nothing")
    quick = parser.parse_args().quick
    steps = {name: ours(kernel) for name, kernel in KERNELS.items()} | {PEER: gpt2()}
    spent = rounds(steps, 3 if quick else 12)
    record = {
        "run_on": run_on() | {"threads": torch.get_num_threads()},
        "shape": f"{LAYERS} layers, width {WIDTH}, {HEADS} heads, batch {BATCH} x {LENGTH}, "
        f"vocabulary {VOCABULARY:,}, fp32",
        "seconds": {name: [round(second, 4) for second in each] for name, each in spent.items()},
    }
    print(page(record))
    if not quick:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "training_step.json").write_text(json.dumps(record, indent=1) + "\n")
        (FOLDER / "training_step.md").write_text(page(record))


def ours(kernel: Kernel) -> Step:
    """The step that the pipeline takes, without Lightning around it."""
    torch.manual_seed(0)
    size = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "feedforward": 4 * WIDTH}
    model = CausalLanguageModel(**size, kernel=kernel, vocabulary_size=VOCABULARY, dropout=0.0)
    schedule = InverseSquareRoot(peak=1e-4, warmup_steps=1)
    module = CausalTraining(model, schedule=schedule, weight_decay=0.01, seed=0).train()
    optimizer = module.optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    return partial(step, module, optimizer, module.loss)


def gpt2() -> Step:
    """transformers' model, with its default (fused) attention and the same optimizer."""
    torch.manual_seed(0)
    size = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**size, **dropout, vocab_size=VOCABULARY)).train()
    optimizer = AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    return partial(step, model, optimizer, lambda rows: _gpt2_loss(model, rows))


def _gpt2_loss(model: GPT2LMHeadModel, rows: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=rows[:, :-1], labels=rows[:, :-1]).loss
    return loss


def step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor], Tensor],
    rows: Tensor,
) -> float:
    """Seconds of one optimizer step on `rows`."""
    began = perf_counter()
    optimizer.zero_grad()
    loss(rows).backward()
    optimizer.step()
    return perf_counter() - began


def rounds(steps: dict[str, Step], count: int) -> dict[str, list[float]]:
    """Seconds of every step, `count` rounds of all in turn, after one that is not counted."""
    generator = torch.Generator().manual_seed(0)
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for number in tqdm(range(count + 1), unit="round"):
        rows = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        for name in steps if number % 2 else reversed(steps):
            second = steps[name](rows)
            if number:
                spent[name].append(second)
    return spent


def page(record: dict[str, Any]) -> str:
    """The table: medians, and the median of the ratios taken round by round."""
    seconds = record["seconds"]
    rows = [
        (name, f"{1000 * median(seconds[name]):.0f}", ratio(seconds, name, PEER),
         ratio(seconds, name, "exponential"))
        for name in seconds
    ]  # fmt: skip
    headers = ["step of", "ms", "/ GPT-2", "/ exponential"]
    run = record["run_on"]
    return (
        "# A training step with each kernel\n\n"
        f"{record['shape']}. {run['hardware']}, {run['threads']} threads; versions: "
        f"{json.dumps(run['versions'])}. Median of {len(seconds[PEER])} rounds in turn; ratios are "
        "taken round by round, quartiles in brackets, under 1 = faster than the column's.\n\n"
        f"{tabulate(rows, headers, tablefmt='github')}\n"
    )


def ratio(seconds: dict[str, list[float]], name: str, to: str) -> str:
    """Median and quartiles of one's time over the other's, round by round."""
    paired = [a / b for a, b in zip(seconds[name], seconds[to], strict=True)]
    low, middle, high = quantiles(paired, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
