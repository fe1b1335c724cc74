"""The token explorer: which keys each head keeps on a readable text, method by method."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from value_aware_attention.approximations import (
    SparseApproximation,
)
from value_aware_attention.call import Call
from value_aware_attention.measurement import Task
from value_aware_study.cards import cards
from value_aware_study.evaluation.exploration import WHOLE, Exploration, Head, Kept, Model, Query

SizedMethod = Callable[[int], SparseApproximation]
"""Number of keys a query may keep -> the method."""
Chosen = tuple[Float[Tensor, "H N M"], Float[Tensor, "H N"]]
"""A method's weights on every key, and the relative output error they leave."""


@torch.inference_mode()
def explored_model(
    name: str,
    calls: Sequence[Call],
    tokens: Sequence[str],
    methods: Mapping[str, SizedMethod],
    sizes: Sequence[int],
    heads: Collection[tuple[int, int]] | None = None,
) -> Model:
    """Lists the keys that every method keeps in a model's heads, on a sequence's first tokens.

    `calls` are the layers', in order; attention is restricted to `tokens`, which changes nothing
    where it is causal or the recorded sequence is no longer. `heads`: (layer, head), None = all.
    Raises ValueError where a call has fewer keys than there are tokens.
    """
    if calls[0].keys < len(tokens):
        raise ValueError(f"{len(tokens)} tokens given for a call of {calls[0].keys} keys")
    found = [
        head
        for layer, call in enumerate(calls)
        for head in _explored_layer(layer, call.unit(0, positions=len(tokens)), methods, sizes)
        if heads is None or (layer, head.head) in heads
    ]
    return Model(name, tuple(tokens), tuple(found))


def _explored_layer(
    layer: int, call: Call, methods: Mapping[str, SizedMethod], sizes: Sequence[int]
) -> list[Head]:
    exact = call.weights[0]

    def chosen(method: SparseApproximation) -> Chosen:
        weights = method.select(**call.arguments()).dense(call.keys)[0]
        return weights, _relative_error(weights, exact, call.value[0])

    by_size = [[chosen(method(size)) for method in methods.values()] for size in sizes]
    heads, queries, _ = exact.shape
    return [
        Head(layer, head, tuple(_query((head, row), exact, by_size) for row in range(queries)))
        for head in range(heads)
    ]


def _relative_error(
    weights: Float[Tensor, "H N M"], exact: Float[Tensor, "H N M"], value: Float[Tensor, "H M V"]
) -> Float[Tensor, "H N"]:
    """||o - o~||^2 / ||o||^2 in fp64, from the difference of the weights: no digits cancel."""
    difference = (exact.double() - weights) @ value.double()
    output = exact.double() @ value.double()
    return difference.square().sum(dim=-1) / output.square().sum(dim=-1)


def _query(
    at: tuple[int, int], exact: Float[Tensor, "H N M"], by_size: Sequence[Sequence[Chosen]]
) -> Query:
    kept = (
        tuple(_kept(weights[at], error[at]) for weights, error in by_method)
        for by_method in by_size
    )
    seen = exact[at].nonzero()[:, 0]
    last = int(seen[-1]) + 1 if len(seen) else 0
    return Query(_rounded(exact[at][:last]), tuple(kept))


def _kept(weights: Float[Tensor, " M"], error: Float[Tensor, ""]) -> Kept:
    keys = weights.nonzero()[:, 0]
    relative = float(f"{error:.3g}") if error.isfinite() else None
    return Kept(tuple(keys.tolist()), _rounded(weights[keys]), relative)


def _rounded(weights: Float[Tensor, " K"]) -> tuple[int, ...]:
    return tuple(round(WHOLE * weight) for weight in weights.tolist())


def exploration(
    name: str,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int,
    sizes: Sequence[int],
) -> Exploration:
    """Explores the first `tokens` of the recorded text with the most tokens that are words."""
    calls = task.layer_calls()
    texts = [
        [str(tokenizer.decode([token])) for token in task.first_tokens(tokens, unit)]
        for unit in range(len(calls[0].query))
    ]
    unit = max(range(len(texts)), key=lambda unit: sum(t.strip().isalpha() for t in texts[unit]))
    shown = [call.unit(unit) for call in calls]
    methods = {card.explored: card.method for card in cards().values() if card.explored}
    model = explored_model(name, shown, texts[unit], methods, sizes)
    return Exploration(tuple(sizes), tuple(methods), (model,))
