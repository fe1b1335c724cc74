"""Measures the time and memory of an encoder layer with every method of the survey.

    python -m benchmarks.survey                # about six minutes on two cores
    python -m benchmarks.survey --seconds 60   # most seconds of rounds for a pass at a length
    python -m benchmarks.survey --quick        # tiny; writes nothing

The layer is pre-norm, of width 512 with 8 heads, and each method takes the place of its attention;
FNet, linear and random mixing replace the projections too. `forward` and `forward_backward` run the
layer. `attention` runs the method alone, on longer sequences: the rest of the layer grows with the
length and would hide the exponent of the method's cost. The survey names 64 landmarks and 8 hash
rounds; it left the other settings to xFormers' defaults, in which Linformer has rank L / 4.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import linear_regression, median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory import tensor_peak
from benchmarks.ratio import Ratio
from benchmarks.record import finish, header, markdown, options, setting
from benchmarks.rounds import LEVEL, in_rounds, seconds
from value_aware_attention import approximations as methods
from value_aware_attention.approximations import Approximation
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes, budget
from value_aware_attention.kernels import Elu, Exponential, Kernel
from value_aware_attention.models.mixing import FourierMixing, LinearMixing, Mixing, RandomMixing

Cell = dict[str, Any]
Work = Callable[[], object]
WIDTH, HEADS, FEEDFORWARD = 512, 8, 2048
LENGTHS = {
    "forward": (128, 256, 512, 1024, 2048),
    "forward_backward": (128, 256, 512, 1024, 2048),
    "attention": (2048, 4096, 8192),
}
QUICK = {"forward": (16,), "forward_backward": (16,), "attention": (16, 32)}
SECONDS = 20.0
SLOWEST = 15.0
"""Seconds that a pass may be expected to take; a slower one is left out."""
SHARE_OF_MEMORY = 0.7
"""Share of the free memory that a pass may be expected to need."""
DENSE, TRAINING = "eager", "forward_backward"
TITLES = {
    "forward": "Forward",
    "forward_backward": "Forward + backward",
    "attention": "The attention alone, forward",
}
GROWTH = (
    "Exponents p of cost ~ L^p are fitted to the attention alone (least squares of logarithms). "
    "Time may grow faster than the counted multiply-adds, most of all for dense attention, which "
    "fetches L² weights from memory. Random keys compute all pairs and hide the others where they "
    "keep a sixteenth or more of the keys, and gather them beyond, so that their exponents mix two "
    "ways. Where an exponent of memory is far below 1, most of the peak does not grow with the "
    "length: projections, features or landmarks weigh as much."
)
HOW = (
    "Rounds run every method once in turn at one length, so that a slow spell of the machine falls "
    "on all of them; the first round is not counted. Memory is the largest sum of tensors that "
    "PyTorch holds at once during a pass, above those that stay: weights, inputs, the layout of a "
    "pattern."
)


class EagerAttention(Approximation):
    """Computes exact attention and holds all weights, as the survey's dense attention did.

    `Exact` computes the same with PyTorch's fused kernel, which never holds them.
    """

    kernels = (Exponential,)

    def approximate(self, call: Call) -> Tensor:
        return call.weights @ call.value

    def multiply_adds(self, sizes: Sizes) -> float:
        return sizes.kept(sizes.keys) * sizes.one_key


@dataclass(frozen=True)
class Method:
    """A method of the survey: the published growth of its cost, and how it is built.

    `order` is the growth in words and `exponent` its power of the length L. `arguments` returns
    the arguments of `build` for a length.
    """

    label: str
    order: str
    exponent: float
    build: Callable[..., nn.Module]
    arguments: Callable[[int], dict[str, Any]] = lambda length: {}
    kernel: Kernel = Exponential()

    def at(self, length: int) -> nn.Module:
        """Builds the method for a length, with the same random weights every time."""
        torch.manual_seed(0)
        return self.build(**self.arguments(length))

    def multiply_adds(self, length: int) -> float | None:
        """Counts the multiply-adds of all heads and queries; None where the method does not."""
        method, each = self.at(length), WIDTH // HEADS
        if not isinstance(method, Approximation):
            return None
        a_query = budget(method, queries=length, keys=length, head_dim=each, value_dim=each)
        return HEADS * length * a_query


def of_window(length: int) -> int:
    return min(length // 2, 128)


def mixed(length: int) -> dict[str, int]:
    return {"length": length, "width": WIDTH, "seed": 0}


HASHED = {"r": 128, "rounds": 8, "seed": 0}  # chunks of 64
METHODS = {
    "fused": Method("dense attention (fused)", "L²", 2, methods.Exact),
    "sliding_window": Method(
        "sliding window", "L", 1, methods.SlidingWindow, lambda n: {"r": 128}
    ),
    "dilated_window": Method(
        "dilated window", "L", 1, methods.DilatedWindow, lambda n: {"r": 128, "dilation": 2}
    ),
    "random_keys": Method(
        "random keys", "L", 1, methods.RandomKeys, lambda n: {"r": 128, "seed": 0}
    ),
    "strided": Method(
        "Sparse Transformer (strided)", "L √L", 1.5, methods.Strided,
        lambda n: {"stride": round(n**0.5)},
    ),
    "fixed": Method(
        "Sparse Transformer (fixed)", "L √L", 1.5, methods.Fixed,
        lambda n: {"stride": round(n**0.5), "summary": min(8, round(n**0.5 / 2))},
    ),
    "longformer": Method(
        "Longformer", "L", 1, methods.Longformer,
        lambda n: {"window": of_window(n), "dilation": 1, "global_positions": [0]},
    ),
    "big_bird": Method(
        "BigBird", "L", 1, methods.BigBird,
        lambda n: {
            "window": min(64, n // 2), "random": min(64, n // 2), "global_positions": [0], "seed": 0
        },
    ),
    "lsh": Method("LSH (appendix A.1)", "L log L", 1, methods.LSH, lambda n: HASHED),
    "reformer": Method(
        "Reformer", "L log L", 1, methods.LSH, lambda n: HASHED | {"share_query_key": True}
    ),
    "orf": Method(
        "Performer", "L", 1, methods.OrthogonalRandomFeatures,
        lambda n: {"features": 256, "seed": 0, "scaling": "performer"},
    ),
    "random_fourier_features": Method(
        "random Fourier features", "L", 1, methods.RandomFourierFeatures,
        lambda n: {"features": 256, "seed": 0},
    ),
    "linear_attention": Method(
        "linear attention (elu)", "L", 1, methods.LinearAttention, kernel=Elu()
    ),
    "nystrom": Method(
        "Nyströmformer", "L", 1, methods.Nystrom,
        lambda n: {"landmarks": min(64, n), "iterations": 6},
    ),
    "linformer": Method(  # d log d of the survey is 266
        "Linformer (rank 256)", "L", 1, methods.Linformer,
        lambda n: {"rank": min(256, n), "length": n, "seed": 0},
    ),
    "linformer_quarter": Method(
        "Linformer (rank L/4)", "L²", 2, methods.Linformer,
        lambda n: {"rank": n // 4, "length": n, "seed": 0},
    ),
    DENSE: Method("dense attention", "L²", 2, EagerAttention),
    "fourier_mixing": Method("FNet", "L log L", 1, FourierMixing),
    "linear_mixing": Method("linear mixing", "L²", 2, LinearMixing, mixed),
    "random_mixing": Method("random mixing", "L²", 2, RandomMixing, mixed),
}  # fmt: skip


class SelfAttention(nn.Module):
    """Computes multi-head self-attention by a method."""

    def __init__(self, method: nn.Module, kernel: Kernel) -> None:
        super().__init__()
        self.method, self.kernel = method, kernel
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.inward(hidden).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        output = self.method(*heads.unbind(2), kernel=self.kernel)
        return self.outward(output.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Computes y = x + mixer(norm(x)), then y + feed-forward(norm(y)), without dropout."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mixer = mixer
        self.feedforward = nn.Sequential(
            nn.Linear(WIDTH, FEEDFORWARD), nn.GELU(), nn.Linear(FEEDFORWARD, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mixer(self.norms[0](hidden))
        return hidden + self.feedforward(self.norms[1](hidden))


def layer_of(method: Method, length: int) -> EncoderLayer:
    """Builds the encoder layer whose attention is the method."""
    mixer = method.at(length)
    return EncoderLayer(mixer if isinstance(mixer, Mixing) else SelfAttention(mixer, method.kernel))


def work_of(name: str, method: Method, length: int, like: Tensor) -> Work:
    """Prepares a pass of one sequence, on the device and in the precision of `like`."""
    alone = name == "attention"
    module = (method.at(length) if alone else layer_of(method, length)).to(like.device, like.dtype)
    options, shape = {}, (1, 1, length, WIDTH)
    if alone and not isinstance(module, Mixing):
        options, shape = {"kernel": method.kernel}, (3, 1, HEADS, length, WIDTH // HEADS)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like).unbind()
    if name == TRAINING:
        leaves = [*(x.requires_grad_() for x in inputs), *module.parameters()]
        return lambda: torch.autograd.grad(module(*inputs).square().mean(), leaves)
    return torch.no_grad()(lambda: module(*inputs, **options))


def main() -> None:
    arguments = options(__doc__, SECONDS).parse_args()
    lengths, limit = (QUICK, 0.0) if arguments.quick else (LENGTHS, arguments.seconds)
    record = header("survey") | measure(lengths, limit)
    finish("survey", record, page(record), keep=not arguments.quick)


def measure(lengths: Mapping[str, Sequence[int]], limit: float) -> dict[str, Any]:
    """Measures every pass, and describes the methods."""
    layer = {"width": WIDTH, "heads": HEADS, "feedforward": FEEDFORWARD, "batch": 1}
    sizes = sorted({length for each in lengths.values() for length in each})
    described = {
        name: {
            "label": method.label,
            "order": method.order,
            "exponent": method.exponent,
            "class": method.build.__name__,
            "kernel": repr(method.kernel),
            "multiply_adds": {str(length): method.multiply_adds(length) for length in sizes},
        }
        for name, method in METHODS.items()
    }
    measured = list(cells(lengths, limit))
    layer |= {"device": "cpu", "dtype": "float32", "threads": torch.get_num_threads()}
    record = {"how": HOW, "layer": layer, "methods": described, "cells": measured}
    return record | {"growth": growth(record)}


def cells(
    lengths: Mapping[str, Sequence[int]], limit: float, like: Tensor | None = None
) -> Iterator[Cell]:
    """Yields a cell per pass, length and method: time and peak memory, or why it was left out."""
    like = torch.empty(0) if like is None else like
    for name, sizes in lengths.items():
        before: dict[str, Cell] = {}
        for length in sizes:
            for method, cell in at_length(name, length, limit, like, before).items():
                arguments = METHODS[method].arguments(length)
                yield {"pass": name, "length": length, "method": method, "arguments": arguments} | (
                    cell
                )
                before[method] = cell | {"length": length}


def at_length(
    name: str, length: int, limit: float, like: Tensor, before: Mapping[str, Cell]
) -> dict[str, Cell]:
    """Measures every method in one pass at one length; `before` has the cells of the last one."""
    measured: dict[str, Cell] = {}
    works: dict[str, Work] = {}
    for key, method in METHODS.items():
        reason = too_much(method, length, before[key], like) if key in before else ""
        if not reason:
            work = work_of(name, method, length, like)
            try:
                measured[key] = {"peak_mib": round(tensor_peak(work, like.device.type), 3)}
                works[key] = work
            except RuntimeError as error:  # out of memory has no class of its own on a CPU
                if "memory" not in str(error):
                    raise
                reason = str(error).partition("\n")[0]
        if reason:
            measured[key] = {"left_out": reason}
    pairs = [(key, DENSE) for key in works if key != DENSE and DENSE in works]
    clock = partial(waited, like.device)
    spent = in_rounds({key: partial(seconds, work, clock) for key, work in works.items()}, pairs,
                      limit)  # fmt: skip
    for key, rounds in spent.items():
        measured[key]["time"] = summary([1000 * second for second in rounds])
    return measured


def waited(device: torch.device) -> float:
    """Reads the clock once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def summary(rounds: Sequence[float]) -> dict[str, Any]:
    """Returns the median, the quartiles and all rounds, in milliseconds."""
    low, _, high = (round(value, 4) for value in quantiles(rounds, n=4, method="inclusive"))
    numbers = [round(value, 4) for value in rounds]
    return {"milliseconds": round(median(rounds), 4), "low": low, "high": high, "rounds": numbers}


def too_much(method: Method, length: int, before: Cell, like: Tensor) -> str:
    """Says why a length is left out, by the published growth of cost; "" where it is measured."""
    if "left_out" in before:
        return str(before["left_out"])
    factor = (length / before["length"]) ** max(1.0, method.exponent)
    second = factor * before["time"]["milliseconds"] / 1000
    if second > SLOWEST:
        return f"expected to take {second:.0f} s, more than {SLOWEST:g}"
    gib = factor * before["peak_mib"] / 1024
    return f"expected to need {gib:.0f} GiB" if gib > SHARE_OF_MEMORY * free_gib(like) else ""


def free_gib(like: Tensor) -> float:
    """Returns the free memory of a GPU, or the memory of this machine."""
    if like.is_cuda:
        return torch.cuda.mem_get_info()[0] / 2**30
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def growth(record: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Fits p of cost ~ L^p to the attention alone, and to the multiply-adds of all lengths."""
    fitted = {}
    for key, method in record["methods"].items():
        rows = [
            cell
            for cell in of_pass(record, "attention")
            if cell["method"] == key and "time" in cell
        ]
        counts = {int(length): count for length, count in method["multiply_adds"].items()}
        fitted[key] = {
            "counted": slope({cell["length"]: counts[cell["length"]] for cell in rows}),
            "time": slope({cell["length"]: milliseconds(cell) for cell in rows}),
            "memory": slope({cell["length"]: cell["peak_mib"] for cell in rows}),
        }
    return fitted


def slope(costs: Mapping[int, float | None]) -> float | None:
    """Fits p of cost ~ L^p by least squares of logarithms; None below two positive costs."""
    logs = {math.log(length): math.log(cost) for length, cost in costs.items() if cost}
    return linear_regression(list(logs), list(logs.values())).slope if len(logs) > 1 else None


def page(record: dict[str, Any]) -> str:
    """Renders the costs, their growth, and every measurement."""
    layer, parts = record["layer"], []
    for name, title in TITLES.items():
        for quantity, write in {
            "median and quartiles in ms": time,
            "peak memory in MiB": mib,
        }.items():
            parts += [f"## {title}: {quantity}", every_length(record, name, write)]
    reasons = sorted({cell["left_out"] for cell in record["cells"] if "left_out" in cell})
    return (
        "\n\n".join(
            [
                "# Time and memory of every method of the survey",
                f"One pre-norm encoder layer, width {layer['width']}, {layer['heads']} heads, "
                f"feed-forward {layer['feedforward']}, batch {layer['batch']}, {layer['dtype']}, "
                f"on {layer['device']}. {setting(record)} {record['how']}",
                *(f"Left out (–): {reason}." for reason in reasons),
                f"## {TITLES[TRAINING]}, and the growth of cost",
                GROWTH,
                costs(record),
                *parts,
            ]
        )
        + "\n"
    )


def costs(record: Mapping[str, Any]) -> str:
    """Tabulates forward + backward at the greatest length, fastest first, and the exponents."""
    last = max(cell["length"] for cell in record["cells"] if cell["pass"] == TRAINING)
    rows = {cell["method"]: cell for cell in of_pass(record, TRAINING) if cell["length"] == last}
    table = []
    for key in sorted(rows, key=lambda key: milliseconds(rows[key])):
        method, exponents = record["methods"][key], record["growth"][key].values()
        fitted = ("–" if power is None else f"{power:.2f}" for power in exponents)
        quotient = beside_dense(rows[key], rows[DENSE])
        table.append(
            (method["label"], method["order"], time(rows[key]), quotient, mib(rows[key]), *fitted)
        )
    headers = ["method", "published", f"ms, {last:,} tokens", "/ dense", "MiB"]
    return markdown([*headers, "p counted", "p of time", "p of memory"], table, names=2)


def every_length(record: Mapping[str, Any], name: str, write: Callable[[Cell], str]) -> str:
    """Tabulates one quantity of one pass, a column a length."""
    rows = {(cell["method"], cell["length"]): write(cell) for cell in of_pass(record, name)}
    lengths = sorted({length for _, length in rows})
    table = [
        (method["label"], *(rows[key, length] for length in lengths))
        for key, method in record["methods"].items()
    ]
    return markdown(["method", *(f"{length:,} tokens" for length in lengths)], table)


def of_pass(record: Mapping[str, Any], name: str) -> list[Cell]:
    return [cell for cell in record["cells"] if cell["pass"] == name]


def milliseconds(cell: Cell) -> float:
    return cell["time"]["milliseconds"] if "time" in cell else math.inf


def time(cell: Cell) -> str:
    if "time" not in cell:
        return "–"
    middle, low, high = (cell["time"][name] for name in ("milliseconds", "low", "high"))
    return f"{middle:,.1f} ({low:,.1f} to {high:,.1f})"


def mib(cell: Cell) -> str:
    return f"{cell['peak_mib']:,.1f}" if "peak_mib" in cell else "–"


def beside_dense(cell: Cell, dense: Cell) -> str:
    """Writes the ratio to dense attention's time in the same rounds, with its 99% interval."""
    if "time" not in cell or "time" not in dense:
        return "–"
    pairs = zip(cell["time"]["rounds"], dense["time"]["rounds"], strict=True)
    return str(Ratio.of([ours / theirs for ours, theirs in pairs], LEVEL))


if __name__ == "__main__":
    main()
