"""A trained model, the text for measuring it, and the end metric of its predictions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from inspect import signature
from typing import Any, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, pad
from transformers import PreTrainedModel

from value_aware_attention.approximations import Exact
from value_aware_attention.call import Call
from value_aware_attention.distributed import shared_map
from value_aware_attention.hugging_face import attention_layers, own_kernel, replace_attention
from value_aware_attention.hugging_face.recording import recording
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.measurement.recorded import answers_alone, evenly_spaced


class _ScoredRows(nn.Module):
    """Computes the last layer's attention at the scored positions only; no score changes.

    Nothing after the last layer's attention mixes positions. Methods that answer each query alone
    get only the scored rows, and the other rows are 0. Other methods get the whole call.

    Attributes:
        asked: Scored positions of the next batch.
    """

    asked: Bool[Tensor, "B N"]
    method: nn.Module

    def in_last_layer(self, methods: "Layerwise", layers: int) -> "Layerwise":
        """Returns the methods of all `layers`; the last one computes only the scored rows."""

        def build(layer: int) -> nn.Module:
            built = methods(layer)
            if layer < layers - 1 or not answers_alone(built):
                return built
            self.method = built
            return self

        return build

    @torch.inference_mode()
    def forward(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N V"],
        *,
        kernel: Kernel,
        attn_mask: Bool[Tensor, "#B #H #N #N"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "B H N V"]:
        """Returns the method's output at the scored rows, 0 elsewhere."""
        call = Call.of(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
        # Sequences with fewer scored rows than others are filled up with other rows of theirs.
        first = self.asked.long().argsort(dim=1, descending=True, stable=True)
        count = max(1, int(self.asked.sum(dim=1).max()))  # methods need at least one query
        position = first[:, None, :count].expand(-1, query.shape[1], -1)
        output = self.method(**call.at(position).arguments())
        return value.new_zeros(*query.shape[:-1], value.shape[-1]).scatter(
            2, position[..., None].expand_as(output), output
        )


Result = TypeVar("Result")
Layerwise = Callable[[int], nn.Module]
"""layer index -> the method that replaces attention there"""
Read = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, tokens (B, L), asked (B, L)) -> logits or hidden states (S, .) at the asked positions"""


@dataclass(frozen=True)
class UnitSums:
    """The summed loss (nats, or wrong predictions) and the number of targets of each unit.

    Attributes:
        predictions: Sums of `PREDICTIONS` over the targets of each unit, if a task compares
            predictions.
    """

    totals: NDArray[np.float64]
    counts: NDArray[np.float64]
    predictions: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def mean(self) -> float:
        """Averages the loss over all targets."""
        return float(self.totals.sum() / self.counts.sum())


def joined(results: Sequence[Result]) -> Result:
    """Joins results along their units: dataclasses of arrays, or mappings of them.

    Other fields come from the first result.
    """

    def together(name: str) -> Any:
        values = [getattr(result, name) for result in results]
        if isinstance(values[0], Mapping):
            return {key: np.concatenate([value[key] for value in values]) for key in values[0]}
        return np.concatenate(values) if isinstance(values[0], np.ndarray) else values[0]

    first: Any = results[0]
    return replace(first, **{field.name: together(field.name) for field in fields(first)})


def jsonable(result: Any) -> Any:
    """Converts the arrays in a result's fields and mappings to lists, for JSON."""
    if isinstance(result, np.ndarray):
        return result.tolist()
    items = vars(result) if is_dataclass(result) else result
    return {key: jsonable(x) for key, x in items.items()} if isinstance(items, Mapping) else items


def arrays(content: Any) -> Any:
    """Converts the lists of `jsonable` back to arrays."""
    if isinstance(content, Mapping):
        return {key: arrays(x) for key, x in content.items()}
    return np.array(content) if isinstance(content, list) else content


@dataclass(frozen=True)
class Text:
    """Rows of tokens to read, and the labels of the scored positions.

    Attributes:
        labels: The token to predict at each position, IGNORED at unscored ones.
        pieces: Rows that a unit is cut into.
        seed: The seed that the units were drawn with.
    """

    inputs: Sequence[Int[Tensor, " L"]] | Int[Tensor, "R L"]
    labels: Sequence[Int[Tensor, " L"]] | Int[Tensor, "R L"]
    pieces: int = 1
    seed: int = 0

    @classmethod
    def of_tokens(cls, tokens: Int[Tensor, "R L"], seed: int = 0, context: int = 0) -> Self:
        """Labels each token with the next one; those of the first `context` are not scored."""
        labels = pad(tokens[:, 1:], (0, 1), value=IGNORED)
        labels[:, :context] = IGNORED
        return cls(tokens, labels, seed=seed)

    def take(self, rows: Sequence[int]) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B L"]]:
        """Stacks inputs and labels of rows of one length."""
        inputs, labels = (
            torch.stack([tensors[row] for row in rows]) for tensors in (self.inputs, self.labels)
        )
        return inputs, labels

    def batches(self, size: int) -> Iterator[list[int]]:
        """Groups rows of one length into batches of at most `size`."""
        lengths: dict[int, list[int]] = {}
        for row, tokens in enumerate(self.inputs):
            lengths.setdefault(len(tokens), []).append(row)
        for rows in lengths.values():
            for first in range(0, len(rows), size):
                yield rows[first : first + size]


def nats(output: Float[Tensor, "S C"], labels: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Computes the cross-entropy of each prediction."""
    return cross_entropy(output.float(), labels, reduction="none")


def wrong(output: Float[Tensor, "S C"], labels: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Returns 1 for each prediction that is not the label, else 0."""
    return (output.argmax(dim=-1) != labels).double()


def cosine(output: Float[Tensor, "S C"], exact: Float[Tensor, "S C"]) -> Float[Tensor, " S"]:
    """Computes the cosine of each hidden state with the one under exact attention."""
    return cosine_similarity(output.double(), exact.double(), dim=-1)


METRICS = {"perplexity": nats, "error": wrong, "cosine": cosine}
"""End metric -> the loss per target that it averages"""


def kl_from_exact(output: Float[Tensor, "*S C"], exact: Float[Tensor, "*S C"]) -> Tensor:
    """Computes KL(exact || output) of each prediction, in nats."""
    return kl_div(
        output.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)


def same_top_token(output: Float[Tensor, "S C"], exact: Float[Tensor, "S C"]) -> Tensor:
    """Returns 1 for each prediction with the same likeliest token as the exact model's, else 0."""
    return output.argmax(-1) == exact.argmax(-1)


PREDICTIONS = {"kl": kl_from_exact, "same_top_token": same_top_token}
"""Comparisons of a language model's predictions with those under exact attention"""
SCORED_AT_ONCE = 256
"""Predictions compared at a time: memory holds three matrices of them by the vocabulary"""


def output_at(
    model: PreTrainedModel, tokens: Int[Tensor, "B L"], asked: Bool[Tensor, "B L"], **options: Any
) -> Float[Tensor, "S C"]:
    """Reads logits, or hidden states of a model without a head, at some positions."""
    if "logits_to_keep" in signature(model.forward).parameters:  # the head takes much of the time
        places = asked.any(dim=0).nonzero()[:, 0]
        options, asked = {**options, "logits_to_keep": places}, asked[:, places]
    # A model might take tokens for padding and hide them; texts have no padding.
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)[0][asked]


class Task:
    """A model in evaluation mode, its text in parts of one or more units, and its end metric.

    Numbers are computed and stored part by part, so an added part needs only its own. `metric` is
    "perplexity", "error" (percent), or "cosine" (of hidden states with the exact ones, at every
    position with a label). `kernel` None is the model's own. Layers are measured on
    `recorded_units` evenly spaced rows (None = all) of a part among those with `length` tokens
    (None: the longest). Tokens before `first_row` of such a row are only context. `scored_rows`
    lets the last layer attend at the scored positions only. `predictions` lets `run` compare every
    prediction with the exact model's (`PREDICTIONS`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        texts: Sequence[Text],
        metric: str,
        *,
        unit: str = "window",
        kernel: Kernel | None = None,
        read: Read | None = None,
        batch_size: int = 1,
        recorded_units: int | None = None,
        first_row: int = 0,
        length: int | None = None,
        head_dim: int | None = None,
        scored_rows: bool = False,
        predictions: bool = False,
    ) -> None:
        self.model, self.texts, self.metric, self.unit = model.eval(), texts, metric, unit
        self.given_kernel, self.given_head_dim = kernel, head_dim
        causal = partial(output_at, use_cache=False)
        self.read = read or (causal if metric == "perplexity" else output_at)
        self.batch_size, self.recorded_units = batch_size, recorded_units
        self.first_row, self.scored_rows = first_row, scored_rows
        self.length = length or max(len(row) for text in texts for row in text.inputs)
        self.compared = PREDICTIONS if predictions else {}
        self.device = next(model.parameters()).device
        self.exact: dict[tuple[int, int], Tensor] = {}

    @property
    def parts(self) -> int:
        return len(self.texts)

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel of exact attention."""
        return self.given_kernel or own_kernel(self.model)

    @cached_property
    def head_dim(self) -> int:
        """The width of a head's values."""
        return self.given_head_dim or self.layer_calls()[0].value.shape[-1]

    @torch.inference_mode()
    def run(self, method: Layerwise | None, number: int = 0) -> UnitSums:
        """Sums the losses of a text with replaced attention; None = the model's own."""
        text, scored = self.texts[number], _ScoredRows()
        batches = list(text.batches(self.batch_size))
        replaced: AbstractContextManager[object] = nullcontext()
        if method is not None:
            if self.scored_rows:
                method = scored.in_last_layer(method, len(attention_layers(self.model)))
            replaced = replace_attention(self.model, method, kernel=self.given_kernel)

        def losses_of(rows: list[int]) -> NDArray[np.float64]:
            inputs, labels = (x.to(self.device) for x in text.take(rows))
            scored.asked = labels >= 0
            output = self.read(self.model, inputs, scored.asked)
            target = (
                self._exact_output(number, rows[0], inputs, scored.asked)
                if self.metric == "cosine"
                else labels[scored.asked]
            )
            losses = [METRICS[self.metric](output, target)]
            if self.compared:
                exact = self._exact_output(number, rows[0], inputs, scored.asked)
                losses += [_compared(measure, output, exact) for measure in self.compared.values()]
            each = torch.stack([x.double().cpu() for x in losses])
            return np.array(
                [
                    of_row.sum(dim=1).numpy()
                    for of_row in each.split((labels >= 0).sum(dim=1).tolist(), dim=1)
                ]
            )

        with replaced:
            by_batch = shared_map(losses_of, batches)
        totals = np.zeros((len(text.inputs), 1 + len(self.compared)))
        for rows, losses in zip(batches, by_batch, strict=True):
            totals[rows] = losses
        counts = np.array([float((labels >= 0).sum()) for labels in text.labels])
        units, *compared, counts = (
            x.reshape(-1, text.pieces).sum(axis=1) for x in (*totals.T, counts)
        )
        return UnitSums(units, counts, dict(zip(self.compared, compared, strict=True)))

    def _exact_output(
        self, number: int, row: int, inputs: Int[Tensor, "B L"], asked: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "S C"]:
        """Reads a batch with exact attention, once for all methods."""
        if (number, row) not in self.exact:
            with replace_attention(self.model, exactly, kernel=self.given_kernel):
                self.exact[number, row] = self.read(self.model, inputs, asked)
        return self.exact[number, row]

    def recorded_rows(self, number: int = 0) -> list[int]:
        """Lists the rows of a text for measuring layers."""
        rows = self.texts[number].inputs
        full = [row for row, tokens in enumerate(rows) if len(tokens) == self.length]
        if not full:
            raise ValueError(
                f"none of the {len(rows)} windows has {self.length} tokens, as the layers need "
                f"that are recorded; take more (evaluation.causal_units)"
            )
        return [full[index] for index in evenly_spaced(len(full), self.recorded_units)]

    @torch.inference_mode()
    def layer_calls(self, number: int = 0) -> list[Call]:
        """Records each layer's call in the exact model, on the recorded rows as one batch.

        A layer that the model runs several times (ALBERT) counts as several. Raises ValueError,
        naming the layer, if the output of exact attention is not a number.
        """
        layers = []
        for row in self.recorded_rows(number):
            inputs, labels = (x.to(self.device) for x in self.texts[number].take([row]))
            with recording(self.model, kernel=self.given_kernel) as calls:
                output = self.read(self.model, inputs, labels >= 0)
            if output.isnan().any():
                lost = [i for i, call in enumerate(calls) if call.query.isnan().any()]
                layer = max(lost[0] - 1, 0) if lost else len(calls) - 1
                raise ValueError(
                    f"the model's output is not a number from layer {layer} on: scores of its "
                    f"attention overflow, or weights are no numbers"
                )
            layers.append(calls)
        return [
            replace(Call.joined(calls), first_row=self.first_row)
            for calls in zip(*layers, strict=True)
        ]

    def first_tokens(self, count: int, unit: int = 0) -> list[int]:
        """Returns the first tokens of one of the recorded rows."""
        return self.texts[0].inputs[self.recorded_rows()[unit]][:count].tolist()

    def digest(self, number: int) -> str:
        """Hashes the tokens and labels of a text, and its recorded rows."""
        text = self.texts[number]
        facts = (
            self.metric,
            (self.recorded_rows(number), self.first_row),
            text.pieces,
            [len(row) for row in text.inputs],
        )
        digest = sha256(repr(facts).encode())
        for row in (*text.inputs, *text.labels):
            digest.update(row.cpu().numpy().tobytes())
        return digest.hexdigest()


def _compared(measure: Callable[[Tensor, Tensor], Tensor], output: Tensor, exact: Tensor) -> Tensor:
    pairs = zip(output.split(SCORED_AT_ONCE), exact.split(SCORED_AT_ONCE), strict=True)
    return torch.cat([measure(*(x.float() for x in pair)) for pair in pairs])


def exactly(layer: int) -> nn.Module:
    """Builds exact attention for every layer."""
    return Exact()
