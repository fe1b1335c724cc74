"""Measures when an attention output that is nearer to the exact one also predicts better.

    python -m benchmarks.nearer_output FILE smollm2 gemma3 qwen   # an hour or two on one core
    python -m benchmarks.nearer_output FILE smollm2 --quick       # one window; writes nothing

FILE is a text (docs/pretrained.md says how the published record's was made); `make models` fetches
the decoders. Each method of 4 vectors a query replaces attention in one layer at a time. Several
errors of that layer stand next to the KL divergence of the model's predictions: of the heads'
outputs, after the output projection, and of the residual stream. The second halves of 4 windows of
256 tokens are scored. A stopped run continues. Writes results/benchmarks/nearer_output.json and
.md.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.mean_candidate import OtherCandidate, zeros
from benchmarks.record import FOLDER, finish, header, markdown, options, setting
from value_aware_attention import approximations
from value_aware_attention.approximations.missing_mass import MeanValueSlot
from value_aware_attention.call import Call
from value_aware_attention.hugging_face import attention_layers, replace_attention
from value_aware_attention.hugging_face.traits import output_projection
from value_aware_attention.measurement.measure import weights_hash
from value_aware_attention.measurement.store import RecordCache
from value_aware_attention.measurement.task import Task, kl_from_exact
from value_aware_attention.named_models import named_models
from value_aware_attention.probe import loaded, window_task

LENGTH, WINDOWS, R = 256, 4, 4
ALONE = ("OVA", "slot, exact mass")
"""Methods whose heads are also replaced one at a time, on the first window"""
Method = Callable[[Call, nn.Module], Tensor]
"""(call of a layer, its module) -> output (B, H, N, V)"""


class Projected(nn.Module):
    """Chooses keys and weights for the distance after the output projection, and what follows it.

    The nearest combination of the projected values W^T v_i has the weights that are best for the
    values in the metric W W^T. Values times its Cholesky factor have this metric, and their size.
    """

    def __init__(self, layer: nn.Module, scale: Tensor | None) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale

    @torch.no_grad()
    def forward(self, call: Call) -> Float[Tensor, "B H N V"]:
        weight = head_projections(self.layer, call)
        weight = weight if self.scale is None else weight * self.scale
        metric = (weight @ weight.mT).double()
        ridge = 1e-9 * metric.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
        factor = torch.linalg.cholesky(metric + ridge * torch.eye(metric.shape[-1]))
        seen = replace(call, value=(call.value.double() @ factor).to(call.value.dtype))
        return approximations.OptimalValueAware(R).select(**seen.arguments()).output(call.value)


def head_projections(layer: nn.Module, call: Call) -> Float[Tensor, "H V E"]:
    """Returns the part of the output projection that reads each head."""
    projection = output_projection(layer, (call.query.shape[1], 1), call.value.shape[-1])
    assert projection is not None
    return projection[:, 0]


def methods() -> dict[str, Method]:
    """Builds the methods, each with r = 4 vectors a query."""
    of = approximations
    alike = {
        "OVO": of.OptimalValueOblivious(R),
        "slot, mean key": MeanValueSlot(R, "mean_key"),
        "slot, exact mass": MeanValueSlot(R, "exact"),
        "by weight and mean, best weights": of.ObliviousKeysOptimalWeights(R, mean=True),
        "OVA": of.OptimalValueAware(R),
        "OVA with zeros": OtherCandidate(R, zeros),
        "OVA with the mean": of.OptimalValueAware(R, mean=True),
    }
    built: dict[str, Method] = {
        name: lambda call, layer, method=method: method(**call.arguments())  # type: ignore[misc]
        for name, method in alike.items()
    }
    return built | {"OVA after W_o": lambda call, layer: Projected(layer, scale_of(layer))(call)}


_SCALES: dict[nn.Module, Tensor] = {}


def scale_of(layer: nn.Module) -> Tensor | None:
    """Returns the factors of a norm that reads the output projection, as Gemma has one."""
    return _SCALES.get(layer)


class Given(nn.Module):
    """Returns an output that was computed before."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Tensor, **__: object) -> Tensor:
        return self.output


class Window:
    """A window that the exact model has read, with the calls of its layers."""

    def __init__(self, task: Task, number: int) -> None:
        self.task, self.model = task, task.model
        self.tokens, labels = task.texts[number].take([0])
        self.asked = labels >= 0
        self.calls = task.layer_calls(number)
        self.logits, self.residual = self.read()

    @torch.inference_mode()
    def read(self) -> tuple[Tensor, list[Tensor]]:
        """Returns the scored logits, and the residual stream after each layer's attention."""
        with residuals(self.model) as streams:
            return self.task.read(self.model, self.tokens, self.asked), streams

    def replaced(
        self, layer: int, output: Tensor, heads: list[int] | None = None
    ) -> dict[str, Any]:
        """Replaces one layer's output; returns the KL and the change of the residual stream."""
        output = output if heads is None else output[:, heads]
        with replace_attention(self.model, Given(output), layers=[layer], heads=heads):
            logits, streams = self.read()
        before, after = (x[layer][self.asked].double() for x in (self.residual, streams))
        change, norm = (after - before).square().sum(dim=-1), before.square().sum(dim=-1)
        of_channels = (after - before).square().mean(dim=0) / before.var(dim=0)
        return {
            "kl": kl_from_exact(logits.float(), self.logits.float()).mean().item(),
            "residual": (change.sum() / norm.sum()).item(),
            "residual, by token": (change / norm).mean().item(),
            "residual, by channel": of_channels.mean().item(),
        }

    def together(self, method: Method) -> float:
        """Returns the KL with a method in every layer."""
        layers = attention_layers(self.model)

        class Everywhere(nn.Module):
            def __init__(self, layer: nn.Module) -> None:
                super().__init__()
                self.of = [layer]  # in a list, not a child: else the model would contain itself

            def forward(self, *tensors: Tensor, **arguments: Any) -> Tensor:
                return method(Call.of(*tensors, **arguments), self.of[0])

        with replace_attention(self.model, lambda number: Everywhere(layers[number])):
            logits, _ = self.read()
        return kl_from_exact(logits.float(), self.logits.float()).mean().item()

    def errors(self, layer: int, output: Tensor) -> dict[str, float]:
        """Returns errors of a layer's output at the scored queries, relative to exact squares."""
        call = self.calls[layer]
        exact, ours = (x[:, :, self.asked[0]].double() for x in (call.output(), output))
        error, norm = ours - exact, exact.square().sum()
        weight = head_projections(attention_layers(self.model)[layer], call).double()
        of_heads = torch.einsum("bhnv,hve->bhne", error, weight)
        joint, whole = of_heads.sum(dim=1), torch.einsum("bhnv,hve->bne", exact, weight)
        to_first = call.weights.expand(*call.batch, -1, -1).argmax(dim=-1)[:, :, self.asked[0]] == 0
        squared, lost = error.square().sum(dim=-1), (exact - ours).square().sum()
        return {
            "error": (lost / norm).item(),
            "length": (ours.square().sum() / norm).sqrt().item(),
            "cosine": torch.cosine_similarity(ours, exact, dim=-1).mean().item(),
            "direction": (1 - torch.cosine_similarity(ours, exact, dim=-1).square()).mean().item(),
            "error, by query": (squared / exact.square().sum(dim=-1)).mean().item(),
            "first token, queries": to_first.double().mean().item(),
            "first token, of the error": (squared[to_first].sum() / squared.sum()).item(),
            "after W_o": (joint.square().sum() / whole.square().sum()).item(),
            "coherence of heads": (joint.square().sum() / of_heads.square().sum()).item(),
            "constant part": (joint.mean(dim=1).square().sum() * joint.shape[1]
                              / joint.square().sum()).item(),
        }  # fmt: skip


@contextmanager
def residuals(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list of the inputs of every layer's feed-forward part, as the model reads."""
    streams: list[Tensor] = []
    handles = []
    for block in model.model.layers:  # type: ignore[union-attr]
        norm = getattr(block, "pre_feedforward_layernorm", block.post_attention_layernorm)
        handles.append(norm.register_forward_pre_hook(lambda _, x: streams.append(x[0].detach())))
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()


ERRORS = (
    "error", "error, by query", "direction", "after W_o",
    "residual", "residual, by token", "residual, by channel",
)  # fmt: skip
"""Errors that are compared as predictors of a layer's KL"""


def measured(task: Task, number: int, store: RecordCache) -> list[dict[str, Any]]:
    """Measures every method in every layer of a window, and in all layers."""
    window: list[Window] = []
    layers = attention_layers(task.model)

    def opened() -> Window:
        if not window:
            window.append(Window(task, number))
        return window[0]

    def of_layer(name: str, layer: int) -> dict[str, Any]:
        here = opened()
        with torch.no_grad():
            output = methods()[name](here.calls[layer], layers[layer])
        row = here.errors(layer, output) | here.replaced(layer, output)
        if number == 0 and name in ALONE:
            heads = range(output.shape[1])
            row["heads alone"] = sum(here.replaced(layer, output, [h])["kl"] for h in heads)
        return {"method": name, "layer": layer, "window": number, **row}

    rows = []
    for name, method in methods().items():
        key = {"window": task.digest(number), "method": name}
        for layer in range(len(layers)):
            rows.append(store.get(key | {"layer": layer}, lambda n=name, x=layer: of_layer(n, x)))
        kl = store.get(key, lambda m=method: {"kl": opened().together(m)})["kl"]
        rows.append({"method": name, "layer": None, "window": number, "kl": kl})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Averages windows; then compares errors with KL between methods and between layers."""
    cells: dict[tuple[str, int | None], dict[str, float]] = {}
    for method, layer in dict.fromkeys((row["method"], row["layer"]) for row in rows):
        alike = [row for row in rows if (row["method"], row["layer"]) == (method, layer)]
        names = [n for n, x in alike[0].items() if isinstance(x, float)]
        cells[method, layer] = {
            n: float(np.mean([row[n] for row in alike if n in row])) for n in names
        }
    names = list(dict.fromkeys(method for method, _ in cells))
    layers = sorted({layer for _, layer in cells if layer is not None})
    predictors = {}
    for error in ERRORS:
        pairs = [
            (cells[a, x][error] < cells[b, x][error]) == (cells[a, x]["kl"] < cells[b, x]["kl"])
            for x in layers for a, b in combinations(names, 2)
        ]  # fmt: skip
        of_all = [[cells[m, x][n] for m in names for x in layers] for n in (error, "kl")]
        predictors[error] = {
            "pairs in order": float(np.mean(pairs)), "spearman": float(spearmanr(*of_all)[0])
        }  # fmt: skip
    of_methods = {
        name: {
            "kl, all layers": cells[name, None]["kl"],
            "kl, sum of layers alone": sum(cells[name, x]["kl"] for x in layers),
            **{e: float(np.mean([cells[name, x][e] for x in layers])) for e in (*ERRORS, *SHAPES)},
            **({"heads alone / together": sum(cells[name, x]["heads alone"] for x in layers)
                / sum(row["kl"] for row in rows if row["method"] == name and row["window"] == 0
                      and row["layer"] is not None)} if name in ALONE else {}),
        }
        for name in names
    }  # fmt: skip
    by_layer = {n: [cells[n, x]["kl"] for x in layers] for n in names}
    return {"methods": of_methods, "predictors": predictors, "kl by layer": by_layer}


SHAPES = ("length", "cosine", "first token, queries", "first token, of the error",
          "coherence of heads", "constant part")  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", choices=[*named_models()])
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    record = header("nearer_output") | {"text": arguments.text.stem, "models": {}}
    file = FOLDER / "nearer_output.json"
    if file.exists() and (before := json.loads(file.read_text()))["source"] == record["source"]:
        record["models"] = before["models"]
    for name in arguments.models:
        model, tokenizer = loaded(name)
        for block, layer in zip(model.model.layers, attention_layers(model), strict=True):
            if hasattr(block, "pre_feedforward_layernorm"):
                _SCALES[layer] = 1 + block.post_attention_layernorm.weight.detach()
        task, read = window_task(
            model, tokenizer, text, windows=1 if arguments.quick else WINDOWS, length=LENGTH,
            seed=0, context=LENGTH // 2,
        )  # fmt: skip
        store = RecordCache(
            Path(".cache/benchmark/nearer_output"),
            {"weights": weights_hash(model), "code": record["source"]},
        )
        rows = [row for number in range(len(read)) for row in measured(task, number, store)]
        record["models"][name] = {"model": named_models()[name]["model"], **summary(rows)}
        finish("nearer_output", record, page(record), keep=not arguments.quick)


def page(record: dict[str, Any]) -> str:
    """Renders a table of methods and one of predictors for each model."""
    lines = [
        "# When does a nearer output predict better?\n",
        f"{setting(record)}\n",
        f"r = {R} vectors a query, {WINDOWS} windows of {LENGTH} tokens of {record['text']}, "
        "second halves scored. Errors and shapes are means over layers, each replaced alone.\n",
    ]
    for of in record["models"].values():
        columns = [*next(iter(of["methods"].values()))]
        rows = [[name, *(f"{row.get(c, float('nan')):.3g}" for c in columns)]
                for name, row in of["methods"].items()]  # fmt: skip
        lines += [f"## {of['model']}\n", markdown(["method", *columns], rows), ""]
        rows = [
            [name, *(f"{x:.2f}" for x in row.values())] for name, row in of["predictors"].items()
        ]
        lines += [markdown(["error", "pairs of methods in order", "Spearman"], rows), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
