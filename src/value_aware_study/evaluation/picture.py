"""The picture of what each method attends to, on a text's first tokens."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from value_aware_attention.approximations import Exact, SparseApproximation
from value_aware_attention.call import Call
from value_aware_attention.measurement import Task
from value_aware_attention.measurement.layers import rounded
from value_aware_attention.measurement.record import Panel, Picture
from value_aware_study.evaluation.budgets import Contender


def first_head(call: Call, positions: int) -> Call:
    """Cuts a call to its first sequence and head, and to its first positions."""
    return call.unit(0, heads=slice(1), positions=positions)


@torch.inference_mode()
def effective_weights(method: nn.Module, call: Call) -> Float[Tensor, "N M"]:
    """Finds W with output = W @ value: what the method uses for alpha, negative included.

    A method that names its keys says so itself; any other is linear in the values, so that the
    identity in their place reads W off.
    """
    if isinstance(method, SparseApproximation):
        return method.select(**call.arguments()).dense(call.keys)[0, 0]
    identity = torch.eye(call.keys, dtype=call.dtype, device=call.value.device)
    return method(**call.arguments() | {"value": identity})[0, 0]


def picture(
    contenders: Sequence[Contender],
    task: Task,
    call: Call,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int,
    budget: int,
) -> Picture:
    """Draws the weights of every method on a text's first tokens, in the first layer and head."""
    shown = first_head(call, tokens)
    text = (str(tokenizer.decode([token])).strip() for token in task.first_tokens(tokens))
    exact = _matrix(effective_weights(Exact(), shown))
    panels = [Panel(approximation="exact", parameters={}, cost=None, weights=exact)]
    for contender in contenders:
        found = contender.near(budget, shown, within=math.inf)
        if found is None:
            continue
        weights = effective_weights(contender.build(found.parameter), shown)
        panels.append(
            Panel(
                approximation=contender.name,
                parameters=contender.given(found.parameter),
                cost=rounded(found.cost),
                weights=_matrix(weights),
            )
        )
    return Picture(tokens=tuple(text), panels=tuple(panels))


def _matrix(weights: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """Rounds weights to three digits after the point, as a record holds them."""
    return tuple(tuple(round(number, 3) for number in row) for row in weights.tolist())
