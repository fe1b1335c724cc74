"""The picture of what each method attends to, on a text's first tokens."""

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from value_aware_attention.approximations import Exact
from value_aware_attention.call import Call
from value_aware_attention.measurement import Task
from value_aware_attention.measurement.layer_errors import rounded
from value_aware_attention.measurement.record import Panel, Picture
from value_aware_study.evaluation.equal_budgets import Contender
from value_aware_study.tasks.attention_picture import effective_weights, first_head


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
