"""Measures everything that needs a GPU, on one machine.

    python -m benchmarks.gpu                       # every part, at most 8 minutes each
    python -m benchmarks.gpu --parts training      # one part alone
    python -m benchmarks.gpu --quick --device cpu  # tiny sizes, to try the script without a GPU

choosing: SmolLM2 in fp32, 2,048 and 8,064 tokens of which a quarter is kept: the time of reading
          while keys are chosen over that of reading alone, in paired rounds, with PyTorch's losses
          of single keys and with the Triton kernels of each precision
token:    the time of a later token over that of the full cache, for the same prompts
layer:    the survey's benchmark (`benchmarks.survey`) in bf16, to 32,768 tokens
patterns: fixed patterns beside SDPA and eager attention, bf16, 4,096 to 32,768 tokens
steps:    100 steps of every model of scale=gpu in the pipeline, on docstrings: the medians of
          tokens/s and MFU after the first 10 steps, which compile, and the peak memory
training: a training step of the causal LM with each kernel at the paper's width, not compiled,
          compiled (as `trainer=bf16` does), and with eager attention: tokens/s and model-FLOP
          utilisation (MFU)
loss:     the causal loss over a vocabulary, forward and backward, beside PyTorch's
search:   optimal-v-aware-r in fp32 with 4, 16 and 65 keys, L = 2048, 8 heads, "fast" and "default":
          time beside exact attention; under 90 seconds
solver:   optimal-v-aware-r on the device beside the CPU, L = 4096, 8 heads: time and error
caches:   SmolLM2 in fp32 on docstrings, 2,048 to 8,064 tokens of which a quarter is kept: the time
          of choosing beside that of reading, and of a token beside that of the full cache

Writes results/benchmarks/gpu.json and .md after every part. Each part is a separate process. A part
that exceeds its minutes keeps its rows; --resume leaves out parts that this code has completed in
the same folder. $PEAK_FLOPS, for example 989e12, gives the bf16 peak of a GPU with an unknown name.
Caches and patterns were run on an H100, the other parts on no GPU yet.
results/search/gpu_steps.json has losses and steps of pipelines.train_causal and train_masked on it,
without the long model, timed by a script. --quick only writes to a --folder.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import cross_entropy, linear_cross_entropy, scaled_dot_product_attention
from torch.utils.benchmark import Timer
from transformers import DynamicCache

from benchmarks import decoder_caches, survey
from benchmarks.memory import tensor_peak
from benchmarks.record import FOLDER, header, markdown, setting, write
from benchmarks.rounds import in_rounds, ratio
from benchmarks.training_step import ADAMW, KERNELS
from pipelines import train_causal, train_masked
from pipelines.app.training import StepLogger
from value_aware_attention.approximations import (
    Longformer,
    OptimalValueAware,
    SlidingWindow,
    Strided,
)
from value_aware_attention.attention import attention, attention_weights, working_precision
from value_aware_attention.caches.triton_losses import SCORES, VARIABLE
from value_aware_attention.call import seconds_now
from value_aware_attention.error import relative_output_error
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.kernels import Exponential
from value_aware_attention.linear_memory import with_linear_memory
from value_aware_attention.models import CausalLanguageModel
from value_aware_study.training.fit import peak_flops_of
from value_aware_study.training.modules import (
    CHUNK_ON_GPU,
    CausalTraining,
    SummedCrossEntropy,
    chunked_cross_entropy,
)
from value_aware_study.training.optimizers import InverseSquareRoot

Row = dict[str, Any]
Rows = Iterator[Row]
HEADS, HEAD_DIM = 8, 64
LAYERS, WIDTH, FEEDFORWARD, VOCABULARY, LENGTH, BATCH = 6, 512, 2048, 50_304, 512, 64
PATTERNS: Mapping[str, Callable[..., nn.Module]] = {
    "sliding window, 256 keys": partial(SlidingWindow, 256),
    "strided, stride 64": partial(Strided, 64),
    "Longformer, window 256": partial(Longformer, 256, 1, (0,)),
}
PROMPTS = (2048, 8064)
"""Tokens of SmolLM2's prompts; it has 8,192 positions"""
ROUNDS_SECONDS = 15.0
"""Seconds of rounds at a prompt length; a part takes less than 90 seconds"""
RUN_TIME = 1.0
"""Least seconds for which a call is repeated."""
LAYER_SECONDS = 20.0
"""Seconds of rounds for a pass of the layer at a length."""


UTILISATION = (
    "MFU counts the products of all pairs of positions, also of a kernel that takes fewer: between "
    "kernels, compare tokens/s."
)


class Eager(nn.Module):
    """Computes attention with all N x M weights in memory; takes the options of `attention`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        weights = attention_weights(query, key, **options)
        return (weights @ working_precision(value)).to(value.dtype)


def choosing(device: str, quick: bool) -> Rows:
    """Compares reading a prompt while keys are chosen with reading alone."""
    model, text = decoder_caches.prompt_of(64 if quick else max(PROMPTS))
    losses = ("PyTorch", *(() if quick or find_spec("triton") is None else SCORES))
    for tokens in (64,) if quick else PROMPTS:
        full = partial(reading_seconds, model, text[:, :tokens], decoder_caches.FULL, "")
        works = {"full": full} | {
            name: partial(
                reading_seconds, model, text[:, :tokens], decoder_caches.BEST,
                "" if name == "PyTorch" else name,
            )
            for name in losses
        }  # fmt: skip
        spent = in_rounds(works, [(losses[0], "full")], 0.0 if quick else ROUNDS_SECONDS)
        for name in losses:
            over = ratio(spent, name, "full")
            yield {
                "tokens": tokens, "losses": name, "reading ms": 1000 * median(spent["full"]),
                "choosing / reading": over.median - 1, "interval": str(over),
                "rounds": len(spent[name]),
            }  # fmt: skip


@torch.inference_mode()
def reading_seconds(model: nn.Module, prompt: Tensor, name: str, scores: str) -> float:
    """Times reading a prompt with a cache of this name, and its choice of keys."""
    context = decoder_caches.opened(model, name, prompt.shape[1])
    with patch.dict(os.environ, {VARIABLE: scores}), context():
        begun = seconds_now()
        model(prompt, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
        return seconds_now() - begun


def token(device: str, quick: bool) -> Rows:
    """Compares a later token over the kept keys with one over the full cache."""
    model, text = decoder_caches.prompt_of(64 if quick else max(PROMPTS))
    names = (decoder_caches.FULL, decoder_caches.BEST)
    for tokens in (64,) if quick else PROMPTS:
        prompt = text[:, :tokens]
        works = {
            name: partial(token_seconds, model, prompt, decoder_caches.opened(model, name, tokens))
            for name in names
        }
        spent = in_rounds(works, [names[::-1]], 0.0 if quick else ROUNDS_SECONDS)
        over = ratio(spent, names[1], names[0])
        yield {
            "tokens": tokens, "full ms": 1000 * median(spent[names[0]]),
            "token / full": over.median, "interval": str(over), "rounds": len(spent[names[0]]),
        }  # fmt: skip


def token_seconds(
    model: nn.Module, prompt: Tensor, context: Callable[[], AbstractContextManager[object]]
) -> float:
    """Times a later token, the median of some."""
    return decoder_caches.read_and_decoded(model, prompt, context)[1] / 1000


def layer(device: str, quick: bool) -> Rows:
    """Measures the cells of the survey's benchmark, one row each."""
    lengths: Mapping[str, Sequence[int]] = survey.QUICK
    if not quick:
        layer_lengths = (512, 2048, 8192, 32768)
        lengths = dict.fromkeys(survey.LENGTHS, layer_lengths) | {"attention": layer_lengths[1:]}
    like = torch.empty(0, device=device, dtype=torch.bfloat16)
    for cell in survey.cells(lengths, 0.0 if quick else LAYER_SECONDS, like):
        yield {
            **{name: cell[name] for name in ("pass", "length", "method")},
            "ms": cell["time"]["milliseconds"] if "time" in cell else None,
            "rounds": len(cell["time"]["rounds"]) if "time" in cell else None,
            "peak MiB": cell.get("peak_mib"),
            "left out": cell.get("left_out"),
        }


def patterns(device: str, quick: bool) -> Rows:
    """Measures each pattern and dense attention, forward and with gradients."""
    for length in (256,) if quick else (4096, 8192, 16384, 32768):
        inputs = gaussian((3, 1, HEADS, length, HEAD_DIM), device, torch.bfloat16)
        works: dict[str, Callable[..., Tensor]] = {
            "dense, SDPA": scaled_dot_product_attention,
            "dense, eager": partial(Eager(), kernel=Exponential()),
        }
        works |= {name: build() for name, build in PATTERNS.items()}
        for name, work in works.items():
            row = {"length": length, "attention": name}
            yield row | {"pass": "forward"} | measured(partial(forward, work, inputs), device)
            both = measured(partial(with_gradients, work, inputs), device)
            yield row | {"pass": "forward + backward"} | both


@torch.inference_mode()
def forward(work: Callable[..., Tensor], inputs: Tensor) -> Tensor:
    return work(*inputs)


def with_gradients(work: Callable[..., Tensor], inputs: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in inputs]
    work(*leaves).sum().backward()


def steps(device: str, quick: bool) -> Rows:
    """Trains every model of a scale for some steps, as the pipeline does, one after the other."""
    count, scale = (20, "smoke") if quick else (100, "gpu")
    models = [(train_causal, f"kernel={kernel}", "causal") for kernel in KERNELS]
    models += [(train_masked, f"length={name}", f"masked.{name}") for name in ("short", "long")]
    with tempfile.TemporaryDirectory() as folder:
        shared = [f"scale={scale}", "corpus=docstrings", f"paths.root={folder}"]
        for stage in ("corpus", "tokens"):
            command = [sys.executable, "-m", f"pipelines.{stage}", *shared, "logger=none"]
            subprocess.run(command, check=True)
        shared += [f"training.{every}_every={count}" for every in ("evaluate", "checkpoint")]
        shared += [f"trainer.accelerator={'gpu' if device == 'cuda' else 'cpu'}"]
        shared += [f"trainer.peak_flops={peak_operations(device) or 'null'}"]
        for app, option, section in models:
            options = [*shared, option, f"{section}.steps={count}"]
            row = {"app": app.__name__, "option": option, "steps": count}
            yield row | trained(app, options, device)


def trained(app: ModuleType, options: Sequence[str], device: str) -> Row:
    """Trains a model in this process, and reads its speed from the points meant for W&B."""
    points: list[Mapping[str, float]] = []
    torch.compiler.reset()
    gc.collect()  # the model before
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with (
        patch.object(sys, "argv", [app.__name__, *options]),
        patch.object(StepLogger, "log_metrics", lambda _, point, step=None: points.append(point)),
        patch.dict(os.environ, WANDB_MODE="disabled"),
    ):
        app.main()
    names = {"tokens/s": "train/tokens_per_second", "MFU": "train/model_flops_utilisation"}
    speeds = {
        title: [point[name] for point in points if name in point][1:]
        for title, name in names.items()
    }
    return {
        **{title: median(values) if values else None for title, values in speeds.items()},
        "peak MiB": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
    }


def training(device: str, quick: bool) -> Rows:
    """Times a whole optimizer step of the causal LM: bf16 mixed precision, AdamW, dropout 0.1."""
    size = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "feedforward": FEEDFORWARD}
    length, batch, vocabulary = LENGTH, BATCH, VOCABULARY
    if quick:
        size = {"layers": 1, "width": 64, "heads": 1, "feedforward": 64}
        length, batch, vocabulary = 32, 2, 320
    tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
    peak, best = peak_operations(device), matrix_product(device, 256 if quick else 8192)
    variants = ("not compiled", "eager") if quick else ("not compiled", "compiled", "eager")
    for name, kernel in KERNELS.items():
        for variant in variants:
            torch.manual_seed(0)
            model = CausalLanguageModel(
                **size, kernel=kernel, vocabulary_size=vocabulary, dropout=0.1
            ).to(device)
            with_linear_memory(model)  # as pipelines.train_causal does
            schedule = InverseSquareRoot(peak=1e-4, warmup_steps=1)
            module = CausalTraining(model, schedule=schedule, optimizer=ADAMW, seed=0).train()
            operations = module.flops(tokens, batch * length)
            row = {"kernel": name, "attention": variant}
            costs = measured(optimizer_step(module, variant, tokens), device)
            yield row | costs | speed(costs["ms"], batch * length, operations, peak, best)


def optimizer_step(module: CausalTraining, variant: str, tokens: Tensor) -> Callable[[], None]:
    """Returns the timed step."""
    model = module.model
    optimizer = module.make_optimizer(module.parameter_groups())
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    if variant == "compiled":
        for part in module.compiled():
            part.compile(dynamic=False)

    def step() -> None:
        optimizer.zero_grad()
        dense = replace_attention(model, Eager()) if variant == "eager" else nullcontext()
        with dense, torch.autocast(tokens.device.type, torch.bfloat16):
            loss = module.loss(tokens)
        loss.backward()
        optimizer.step()

    return step


def speed(
    milliseconds: float | None, tokens: int, operations: float, peak: float | None, best: float
) -> Row:
    """Computes tokens and operations a second, and shares of the device's peak and best product."""
    if milliseconds is None:
        return dict.fromkeys(("tokens/s", "TFLOP/s", "MFU", "of a matrix product"))
    reached = 1000 * operations / milliseconds
    return {
        "tokens/s": round(1000 * tokens / milliseconds),
        "TFLOP/s": reached / 1e12,
        "MFU": reached / peak if peak else None,
        "of a matrix product": reached / best,
    }


def peak_operations(device: str) -> float | None:
    """Returns the maker's bf16 peak: $PEAK_FLOPS, or that of a GPU known by its name."""
    if peak := os.environ.get("PEAK_FLOPS"):
        return float(peak)
    return peak_flops_of(torch.cuda.get_device_name(), "bf16") if device == "cuda" else None


def matrix_product(device: str, side: int) -> float:
    """Measures the reachable operations a second: those of a square bf16 matrix product."""
    a, b = gaussian((2, side, side), device, torch.bfloat16)
    return 2 * side**3 / seconds(partial(torch.mm, a, b))[0]


def loss(device: str, quick: bool) -> Rows:
    """Times the causal loss of a step's targets under bf16 autocast, and measures its memory."""
    targets, width, vocabulary = (64, 16, 320) if quick else (2 * BATCH * LENGTH, WIDTH, VOCABULARY)
    rows = max(1, CHUNK_ON_GPU // vocabulary)
    hidden = gaussian((targets, width), device, torch.float32).requires_grad_()
    weight = (gaussian((vocabulary, width), device, torch.float32) / width**0.5).requires_grad_()
    labels = torch.randint(vocabulary, (targets,), device=device)
    compiled = SummedCrossEntropy()
    if not quick:
        compiled.compile(dynamic=False)
    works: dict[str, Callable[[], Tensor]] = {
        "linear_cross_entropy, 128 targets at a time": lambda: linear_cross_entropy(
            hidden, weight, labels, options=LinearCrossEntropyOptions(batch_chunk_size=128)
        ),
        "all logits at once": lambda: cross_entropy(hidden @ weight.T, labels),
        "ours": lambda: chunked_cross_entropy(SummedCrossEntropy(), rows, hidden, weight, labels),
        "ours, compiled": lambda: chunked_cross_entropy(compiled, rows, hidden, weight, labels),
    }
    for name, work in works.items():

        def step(work: Callable[[], Tensor] = work) -> None:
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                nats = work()
            nats.backward()
            hidden.grad = weight.grad = None  # the next peak counts the gradients again

        yield {"loss": name, "targets": targets} | measured(step, device)


def solver(device: str, quick: bool) -> Rows:
    """Times a call of optimal-v-aware-r in fp32, exact attention included; measures its error."""
    length, heads = (64, 2) if quick else (4096, HEADS)
    inputs = gaussian((3, 1, heads, length, HEAD_DIM), "cpu", torch.float32)
    for r in (4, 65):
        for where in dict.fromkeys(("cpu", device)):
            here = inputs.to(where)
            method = OptimalValueAware(r)
            costs = measured(partial(forward, method, here), where)
            reached, exact = forward(method, here), attention(*here)
            error = relative_output_error(reached, exact).mean()
            row = {"r": r, "device": where, "length": length, "heads": heads}
            yield row | costs | {"relative output error": float(error)}


def search(device: str, quick: bool) -> Rows:
    """Times a call of optimal-v-aware-r beside exact attention, for few to many keys."""
    length, heads = (64, 2) if quick else (2048, HEADS)
    inputs = gaussian((3, 1, heads, length, HEAD_DIM), device, torch.float32)
    exact = measured(partial(forward, attention, inputs), device)
    yield {"r": None, "search": "exact attention", "length": length, "heads": heads} | exact
    for effort, r in (("fast", 4), ("fast", 16), ("fast", 65), ("default", 4), ("default", 16)):
        costs = measured(partial(forward, OptimalValueAware(r, search=effort), inputs), device)
        ratio = costs["ms"] / exact["ms"] if costs["ms"] and exact["ms"] else None
        row = {"r": r, "search": effort, "length": length, "heads": heads}
        yield row | costs | {"exact attentions": ratio}


def caches(device: str, quick: bool) -> Rows:
    """Times caches of the packaged decoder, on the GPU where there is one."""
    lengths = (256,) if quick else (2048, 4096, 8064)
    return decoder_caches.timed(lengths, few=quick, rounds=2)


def measured(work: Callable[[], object], device: str) -> Row:
    """Measures median milliseconds, and the peak MiB of tensors above those held before.

    The first call, which compiles, is not counted. Out of memory, all values are None.
    """
    try:
        peak = tensor_peak(work, device)
        spent, rounds = seconds(work)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"ms": None, "rounds": None, "peak MiB": None}
    return {"ms": 1000 * spent, "rounds": rounds, "peak MiB": peak}


def seconds(work: Callable[[], object]) -> tuple[float, int]:
    """Returns median seconds and rounds of a call; torch's timer waits for the device."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    measurement = timer.blocked_autorange(min_run_time=RUN_TIME)
    return measurement.median, len(measurement.times)


def gaussian(shape: Sequence[int], device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=generator).to(device, dtype)


PARTS: Mapping[str, Callable[[str, bool], Rows]] = {
    measure.__name__: measure
    for measure in (choosing, token, steps, search, caches, training, loss, solver, patterns, layer)
}


def main() -> None:
    arguments = parser().parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here; --quick --device cpu tries the script without one")
    if arguments.rows:
        write_rows(arguments)
        return
    folder = arguments.folder or ("" if arguments.quick else FOLDER)
    file = Path(folder, "gpu.json")
    parts = json.loads(file.read_text())["parts"] if folder and file.exists() else {}
    head = header("gpu") | {"device": arguments.device, "quick": arguments.quick}
    record = head | {"parts": parts}
    for name in arguments.parts:
        if arguments.resume and is_complete(parts.get(name), head):
            continue
        parts[name] = head | run_part(name, arguments)  # others stay, with their machine and code
        if folder:
            write("gpu", record, page(record), file.parent)
    print(page(record))
    if early := [name for name in arguments.parts if parts[name]["stopped"]]:
        sys.exit(f"error: incomplete: {', '.join(early)}; the rows that there are were kept")


def is_complete(part: Row | None, head: Row) -> bool:
    """Returns whether a part has all its rows from this code, at these sizes and on this device."""
    if part is None or part["stopped"]:
        return False
    return all(part[name] == head[name] for name in ("source", "device", "quick"))


def run_part(name: str, arguments: argparse.Namespace) -> Row:
    """Runs a part; returns its rows, and the reason if it ended early."""
    print(f"{name}: at most {arguments.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks.gpu", "--parts", name, "--rows", str(rows)]
        command += ["--device", arguments.device, *(["--quick"] if arguments.quick else [])]
        environment = os.environ | {"TMPDIR": folder}  # the files of a killed part go with it
        process = subprocess.Popen(command, start_new_session=True, env=environment)
        try:
            code = process.wait(60 * arguments.minutes)
            stopped = None if code == 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
            stopped = f"stopped after {arguments.minutes:g} minutes"
        lines = rows.read_text().splitlines() if rows.exists() else []
    return {"rows": [json.loads(line) for line in lines], "stopped": stopped}


def write_rows(arguments: argparse.Namespace) -> None:
    """Runs a part in its process and writes every row to disk as soon as it is measured."""
    with Path(arguments.rows).open("a") as file:
        for row in PARTS[arguments.parts[0]](arguments.device, arguments.quick):
            print(json.dumps(row), file=file, flush=True)


def page(record: Mapping[str, Any]) -> str:
    """Renders the record as Markdown."""
    lines = ["# On a GPU", "", f"Times are medians of their rounds. {UTILISATION}", ""]
    for name, part in record["parts"].items():
        lines += [f"## {name}", "", f"On {part['device']}. {setting(part)}", ""]
        if part["quick"]:
            lines += ["Tiny sizes, to try the script: no number means anything.", ""]
        if part["stopped"]:
            lines += [f"Incomplete: {part['stopped']}.", ""]
        headers = list(dict.fromkeys(key for row in part["rows"] for key in row))
        rows = [[_cell(row.get(key)) for key in headers] for row in part["rows"]]
        lines += [markdown(headers, rows, names=2), ""]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--minutes", type=float, default=8.0, help="for each part")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--quick", action="store_true", help="tiny sizes")
    options.add_argument("--resume", action="store_true", help="leave out completed parts")
    options.add_argument(
        "--folder", help=f"where gpu.json and gpu.md are written; default {FOLDER}"
    )
    options.add_argument("--rows", help=argparse.SUPPRESS)
    return options


if __name__ == "__main__":
    main()
