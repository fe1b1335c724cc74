"""Measures an oracle that chooses the keys of all heads of a layer together, after W_o.

    python -m benchmarks.joint_oracle FILE smollm2 gemma3 qwen   # an hour or two on one core
    python -m benchmarks.joint_oracle FILE smollm2 --quick       # one window; writes nothing

FILE is a text (docs/pretrained.md says how the published record's was made); `make models` fetches
the decoders. OVA with the mean chooses 4 vectors for each head alone. Here the heads take turns:
each is solved again, so that the layer's output after W_o comes nearer to the exact one, while the
others stay. A stopped run continues. Writes results/benchmarks/joint_oracle.json and .md.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from benchmarks.mean_candidate import LENGTH, WINDOWS
from benchmarks.nearer_output import Method, Window, head_projections, residuals
from benchmarks.permuted_values import permuted
from benchmarks.record import finish, header, markdown, options, setting
from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.approximations.closest_combination import flatten, mean_apart, solve
from value_aware_attention.approximations.sparse_weights import combination
from value_aware_attention.call import Call
from value_aware_attention.hugging_face import attention_layers
from value_aware_attention.measurement.control import random_weights
from value_aware_attention.measurement.measure import weights_hash
from value_aware_attention.measurement.store import RecordCache
from value_aware_attention.measurement.task import Task
from value_aware_attention.named_models import named_models
from value_aware_attention.probe import loaded, window_task
from value_aware_attention.records.estimate import ratio_of_sums

R, BASE = 4, "OVA with the mean"


class Heads:
    """The heads of a layer that reads one text, in fp64, with their errors z - o.

    The error of the layer is sum_h (z_h - o_h) W_h. With the sum x of the other heads fixed, it is
    least where (z_h - t) W_h is, with the target t = o_h - x W_h^T (W_h W_h^T)^-1. Values times a
    Cholesky factor of W_h W_h^T have this metric, so today's search solves the problem.
    """

    def __init__(self, call: Call, layer: nn.Module, output: Float[Tensor, "1 H N V"]) -> None:
        call = replace(call, **{n: getattr(call, n).double() for n in ("query", "key", "value")})
        self.value = call.value.expand(*call.batch, -1, -1)[0]
        self.exact = call.output()[0]
        self.error = output[0].double() - self.exact
        self.weight = head_projections(layer, call).double()
        metric = self.weight @ self.weight.mT
        ridge = 1e-9 * metric.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
        self.factor = torch.linalg.cholesky(metric + ridge * torch.eye(metric.shape[-1]))
        self.problem = flatten(replace(call, value=call.value @ self.factor), mean=True)

    def solved(self, head: int, others: Float[Tensor, "N E"]) -> Float[Tensor, "N V"]:
        """Returns the error of a head that compensates the others' error best."""
        at, problem = slice(head, head + 1), self.problem
        pulled = self.weight[head] @ others.T
        pulled = torch.linalg.solve_triangular(self.factor[head], pulled, upper=False).T
        mean = None if problem.mean is None else problem.mean[at]
        moved = replace(
            problem, value=problem.value[at], weights=problem.weights[at], unit=problem.unit[at],
            output=problem.output[at] - pulled / problem.unit[head], original=None, mean=mean,
            visible=None if problem.visible is None else problem.visible[at],
        )  # fmt: skip
        indices, weights = mean_apart(moved, *solve(moved, R, "default"))
        return combination(indices, weights, self.value[at], moved.visible)[0] - self.exact[head]

    def take_turns(self) -> None:
        """Solves every head again, in order; queries keep a step that lowers the joint error."""
        joint = torch.einsum("hnv,hve->ne", self.error, self.weight)
        for head in range(len(self.error)):
            others = joint - self.error[head] @ self.weight[head]
            error = self.solved(head, others)
            after = others + error @ self.weight[head]
            falls = after.square().sum(dim=-1, keepdim=True) < joint.square().sum(-1, keepdim=True)
            self.error[head] = error.where(falls, self.error[head])
            joint = after.where(falls, joint)

    def output(self, dtype: torch.dtype) -> Float[Tensor, "1 H N V"]:
        return (self.exact + self.error)[None].to(dtype)


def alone(call: Call, layer: nn.Module, r: int, mean: bool) -> Tensor:
    """Chooses each head for its own distance."""
    return OptimalValueAware(r, mean=mean)(**call.arguments())


@torch.no_grad()
def alone_after_projection(call: Call, layer: nn.Module) -> Tensor:
    """Chooses each head for its own distance after W_o, as if the others had no error."""
    heads = Heads(call, layer, call.output())
    none = torch.zeros_like(heads.exact[0] @ heads.weight[0])
    heads.error = torch.stack([heads.solved(head, none) for head in range(len(heads.exact))])
    return heads.output(call.dtype)


@torch.no_grad()
def together(call: Call, layer: nn.Module, rounds: int) -> Tensor:
    """Chooses all heads for the layer's output, starting from OVA with the mean."""
    heads = Heads(call, layer, alone(call, layer, R, mean=True))
    for _ in range(rounds):
        heads.take_turns()
    return heads.output(call.dtype)


METHODS: dict[str, Method] = {
    "OVA": partial(alone, r=R, mean=False),
    BASE: partial(alone, r=R, mean=True),
    f"{BASE}, {R + 1} vectors": partial(alone, r=R + 1, mean=True),
    f"{BASE}, each head after W_o": alone_after_projection,
    **{f"heads together, rounds: {n}": partial(together, rounds=n) for n in (1, 4)},
}


def in_all_layers(window: Window, method: Method) -> dict[str, Any]:
    """Returns the KL with a method in every layer, and the stream's relative error by layer."""
    with residuals(window.model) as streams:
        kl = window.together(method)
    pairs = [[x[window.asked] for x in pair] for pair in zip(streams, window.residual, strict=True)]
    errors = [(ours - exact).square().sum() / exact.square().sum() for ours, exact in pairs]
    return {"kl": kl, "stream": [error.item() for error in errors]}


def in_single_layers(window: Window, method: Method) -> dict[str, Any]:
    """Returns KL and errors with a method in one layer at a time, by layer.

    "permuted" is the error after W_o if every query meets its values in a random order.
    """
    rows = []
    for number, layer in enumerate(attention_layers(window.model)):
        call = window.calls[number]
        output = method(call, layer)
        row = window.replaced(number, output) | window.errors(number, output)
        window.calls[number] = permuted(call)
        row["permuted"] = window.errors(number, method(window.calls[number], layer))["after W_o"]
        window.calls[number] = call
        rows.append(row)
    return {name: [row[name] for row in rows] for name in rows[0]}


CONTROLLED = (BASE, f"{BASE}, {R + 1} vectors", "heads together, rounds: 4")
"""Methods that read the first window again: with random weights, and a layer at a time"""


def measured(model: nn.Module, task: Task, store: RecordCache) -> dict[str, Any]:
    """Measures every method on every window; ratios are paired over windows."""
    opened = lru_cache(maxsize=1)(lambda part, number: Window(task, number))

    def measure(work: Callable[..., Any], name: str, number: int = 0, part: str = "own") -> Any:
        key = {"part": part, "window": task.digest(number), "method": name, "of": work.__name__}
        return store.get(key, lambda: work(opened(part, number), METHODS[name]))

    rows: dict[str, list[Any]] = {name: [] for name in METHODS}
    for number in range(task.parts):
        for name in METHODS:
            rows[name].append(measure(in_all_layers, name, number))
    single = {name: measure(in_single_layers, name) for name in CONTROLLED}
    task.model = random_weights(model)
    random = {name: measure(in_all_layers, name, part="random")["kl"] for name in CONTROLLED}
    kl = {name: np.array([row["kl"] for row in windows]) for name, windows in rows.items()}
    return {
        name: {
            "kl": kl[name].tolist(),
            "ratio": [float(x) for x in ratio_of_sums(kl[name], kl[BASE]) if np.isfinite(x)],
            "stream": np.mean([row["stream"] for row in windows], axis=0).tolist(),
            "single": single.get(name), "random": random.get(name),
        }
        for name, windows in rows.items()
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", choices=[*named_models()])
    parser.add_argument("--windows", type=int, default=WINDOWS, help="the first of the 8")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    record = header("joint_oracle") | {"text": arguments.text.stem, "models": {}}
    for name in arguments.models:
        model, tokenizer = loaded(name)
        task, _ = window_task(
            model, tokenizer, text, windows=WINDOWS, length=LENGTH, seed=0, context=LENGTH // 2
        )
        task.texts = task.texts[: 1 if arguments.quick else arguments.windows]
        store = RecordCache(
            Path(".cache/benchmark/joint_oracle"),
            {"weights": weights_hash(model), "code": record["source"]},
        )
        record["models"][name] = {
            "model": named_models()[name]["model"], "methods": measured(model, task, store)
        }  # fmt: skip
        finish("joint_oracle", record, page(record), keep=not arguments.quick)


def page(record: dict[str, Any]) -> str:
    """Renders a table for each model."""
    lines = [
        "# All heads of a layer, chosen together\n",
        f"{setting(record)}\n",
        f"KL in nats a token of windows of {LENGTH} tokens of {record['text']}, second halves "
        f"scored, {R} vectors a query in every layer and head. In brackets is its ratio to that of "
        'OVA with the mean, with the paired 95% interval over windows. "Stream" is the relative '
        "squared error of the residual stream after the last attention. The other columns are of "
        "the first window. The model has random weights, or one layer is replaced at a time: sums "
        "over layers of the KL and of the error in the stream; means over layers of the relative "
        "squared errors of the heads' outputs, after W_o, and after W_o with values permuted as in "
        "benchmarks.permuted_values.\n",
    ]
    for model in record["models"].values():
        rows = []
        for name, of in model["methods"].items():
            ratio = "; ".join(f"{x:.2f}" for x in of["ratio"])
            numbers = [of["stream"][-1]]
            if of["single"]:
                single = {n: np.array(x) for n, x in of["single"].items()}
                numbers += [of["random"], single["kl"].sum(), single["residual"].sum()]
                numbers += [single[n].mean() for n in ("error", "after W_o", "permuted")]
            cells = [f"{x:.3g}" for x in numbers] + [""] * (7 - len(numbers))
            rows.append([name, f"{np.mean(of['kl']):.3g} ({ratio})", *cells])
        head = [model["model"], f"KL, {len(model['methods'][BASE]['kl'])} windows", "stream",
                "KL, random weights", "KL, single layers", "stream, single layers", "heads",
                "after W_o", "permuted"]  # fmt: skip
        lines += [markdown(head, rows), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
