"""A whole training step of the causal LM with each kernel, beside transformers' GPT-2.

    python -m benchmarks.training_step            # about three minutes on two cores
    python -m benchmarks.training_step --quick    # fewer rounds; writes nothing

One step is forward, loss over the whole vocabulary, backward and AdamW's update, in fp32, dropout
off: 6 layers of width 512, 8 heads, 512 tokens, a vocabulary of 50,000. GPT-2 has the same shape,
with learned positions, gelu and transformers' own loss. All take a step in every round, in turn.
Loading is what the pipeline's data sets take to read a batch, in the training process, from a
file of 20 million tokens: of that batch, and of 8 masked sequences of 512 tokens, which are masked
anew; the masked step is that of a RoBERTa of the same shape. `trainer.workers` reads meanwhile.
Writes results/benchmarks/training_step.json and .md.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import AdamW
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from pipelines.provenance import run_on
from value_aware_attention.data.batches import CausalBatches, MaskedBatches, MaskedSequences
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial
from value_aware_attention.models import CausalLanguageModel, build_roberta
from value_aware_attention.training.causal import CausalTraining
from value_aware_attention.training.masked import MaskedTraining
from value_aware_attention.training.module import LanguageModeling
from value_aware_attention.training.schedules import InverseSquareRoot, LinearWarmupDecay

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 6, 512, 8, 512, 2, 50_000
MASKED_BATCH = 8
KERNELS: dict[str, Kernel] = {
    "exponential": Exponential(),
    "polynomial": Polynomial(),
    "elu": Elu(),
}
PEER = "GPT-2 (transformers)"
FOLDER = Path("results/benchmarks")
Step = Callable[[Any], float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds; writes nothing")
    quick = parser.parse_args().quick
    steps = {name: ours(kernel) for name, kernel in KERNELS.items()} | {PEER: gpt2()}
    spent = rounds(steps, 3 if quick else 12)
    loading = loaded(spent["exponential"], 2 if quick else 4)
    record = {
        "run_on": run_on() | {"threads": torch.get_num_threads()},
        "shape": f"{LAYERS} layers, width {WIDTH}, {HEADS} heads, batch {BATCH} x {LENGTH}, "
        f"vocabulary {VOCABULARY:,}, fp32",
        "seconds": {name: [round(second, 4) for second in each] for name, each in spent.items()},
        "loading": loading,
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
    return _step_of(module)


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
    loss: Callable[[Any], Tensor],
    rows: Any,
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


def loaded(causal_steps: list[float], count: int) -> list[dict[str, Any]]:
    """Milliseconds that a batch takes to load and a step on it takes, by kind of model."""
    with TemporaryDirectory() as folder:
        stream, instances = Path(folder) / "stream.npy", Path(folder) / "instances.npy"
        numbers = np.random.default_rng(0)
        tokens = numbers.integers(5, VOCABULARY, size=39_063 * LENGTH, dtype=np.uint16)
        np.save(stream, tokens)
        np.save(instances, tokens.reshape(-1, LENGTH))
        causal = CausalBatches(stream, length=LENGTH, batch_size=BATCH, steps=10**6, seed=0)
        special = {"mask_token": 4, "special_tokens": range(5), "vocabulary_size": VOCABULARY}
        sequences = MaskedSequences([instances], length=LENGTH, **special)
        masked = MaskedBatches(sequences, batch_size=MASKED_BATCH, steps=10**6, seed=0)
        take, _ = roberta(), masked[0]
        masked_steps = [take(masked[number]) for number in range(count + 1)][1:]
        return [
            _share(f"causal, {BATCH} x {LENGTH}", causal, causal_steps),
            _share(f"masked, {MASKED_BATCH} x {LENGTH}", masked, masked_steps),
        ]


def _share(shape: str, batches: Any, steps: list[float]) -> dict[str, Any]:
    began = perf_counter()
    for number in range(1, 101):
        batches[997 * number]
    load = (perf_counter() - began) / 100
    return {"shape": shape, "load_ms": 1000 * load, "step_ms": 1000 * median(steps)}


def roberta() -> Step:
    """The pipeline's step of a RoBERTa of the same shape."""
    torch.manual_seed(0)
    size = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "feedforward": 4 * WIDTH}
    positions = {"length": LENGTH, "block": LENGTH, "dropout": 0.0}
    model = build_roberta(**size, **positions, vocabulary_size=VOCABULARY)
    schedule = LinearWarmupDecay(peak=1e-4, warmup_proportion=0.0, steps=10**6)
    settings = {"schedule": schedule, "weight_decay": 0.01, "max_grad_norm": 5.0, "seed": 0}
    module = MaskedTraining(model, **settings).train()
    return _step_of(module)


def _step_of(module: LanguageModeling) -> Step:
    optimizer = module.optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 1e-4  # which the schedule multiplies in a training
    return partial(step, module, optimizer, module.loss)


def page(record: dict[str, Any]) -> str:
    """The table: medians, and the median of the ratios taken round by round."""
    seconds = record["seconds"]
    rows = [
        (name, f"{1000 * median(seconds[name]):.0f}", ratio(seconds, name, PEER),
         ratio(seconds, name, "exponential"))
        for name in seconds
    ]  # fmt: skip
    shares = [
        (x["shape"], f"{x['load_ms']:.2f}", f"{x['step_ms']:.0f}",
         f"{100 * x['load_ms'] / x['step_ms']:.2f}%")
        for x in record["loading"]
    ]  # fmt: skip
    headers = ["step of", "ms", "/ GPT-2", "/ exponential"]
    run = record["run_on"]
    return (
        "# A training step with each kernel\n\n"
        f"{record['shape']}. {run['hardware']}, {run['threads']} threads; versions: "
        f"{json.dumps(run['versions'])}. Median of {len(seconds[PEER])} rounds in turn; ratios are "
        "taken round by round, quartiles in brackets, under 1 = faster than the column's.\n\n"
        f"{tabulate(rows, headers, tablefmt='github')}\n\n"
        f"{tabulate(shares, ['batch', 'ms to load', 'ms of a step', 'share'], tablefmt='github')}\n"
    )


def ratio(seconds: dict[str, list[float]], name: str, to: str) -> str:
    """Median and quartiles of one's time over the other's, round by round."""
    paired = [a / b for a, b in zip(seconds[name], seconds[to], strict=True)]
    low, middle, high = quantiles(paired, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
