"""Cells and picture of the survey: each method with the arguments that cost nearest a budget."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from value_aware_attention.approximations import Exact, SparseApproximation
from value_aware_attention.call import Call
from value_aware_attention.error import budget
from value_aware_attention.measurement import Record, Setting, Task
from value_aware_attention.measurement.layers import rounded
from value_aware_attention.records.record import Panel, Picture
from value_aware_study.evaluation.grid import setting


class Affordable(NamedTuple):
    """A parameter, and the method's cost: multiply-adds over those of one key, a query."""

    parameter: int
    cost: float


def cost_in_keys(method: nn.Module, *, length: int, head_dim: int, is_causal: bool) -> float:
    """Divides `error.budget` by the head_dim + value_dim multiply-adds of attending to one key.

    Assumes self-attention over `length` positions, with values as wide as the queries.
    """
    return budget(
        method, queries=length, keys=length, head_dim=head_dim, value_dim=head_dim,
        is_causal=is_causal,
    ) / (2 * head_dim)  # fmt: skip


def closest_to_budget(
    build: Callable[[int], nn.Module],
    keys: int,
    *,
    length: int,
    head_dim: int,
    is_causal: bool,
    within: float,
) -> Affordable | None:
    """Searches 1 to `length` for the parameter whose cost is closest to `keys`, coarse to fine.

    Returns None if no cost is within the share `within` of `keys`: a pattern may have no such
    setting, as strided attention never sees fewer than about 2 sqrt(2 length) keys. Skips
    parameters that `build` rejects with ValueError.
    """
    costs: dict[int, float] = {}

    def away(parameter: int) -> float:
        return abs(costs[parameter] - keys)

    low, high = 1, length
    while untried := {*range(low, high, max(1, (high - low) // 16)), high} - costs.keys():
        for parameter in untried:
            try:
                costs[parameter] = cost_in_keys(
                    build(parameter), length=length, head_dim=head_dim, is_causal=is_causal
                )
            except ValueError:  # the method rejects the parameter
                costs[parameter] = math.inf
        tried = sorted(costs)
        best = min(tried, key=away)
        place = tried.index(best)
        low, high = tried[max(0, place - 1)], tried[min(len(tried) - 1, place + 1)]
    return Affordable(best, costs[best]) if away(best) <= within * keys else None


Planned = tuple[Setting, float, float]


@dataclass(frozen=True)
class Contender:
    """A configured method with one integer argument left open, or none.

    `make` builds it from the argument named `vary`.
    """

    name: str
    method: Mapping[str, object]
    vary: str | None
    make: Callable[..., nn.Module]

    def argument(self, parameter: int) -> dict[str, int]:
        return {} if self.vary is None else {self.vary: parameter}

    def build(self, parameter: int) -> nn.Module:
        return self.make(**self.argument(parameter))

    def near(self, keys: int, call: Call, within: float) -> Affordable | None:
        """Finds the argument with the cost nearest to `keys` on a call; None if it cannot run."""
        length, head_dim = call.key.shape[-2:]
        closest = closest_to_budget(
            self.build, keys, length=length, head_dim=head_dim, is_causal=call.is_causal,
            within=within,
        )  # fmt: skip
        return closest if closest and _usable(self.build(closest.parameter), call) else None


def planned_cells(
    contenders: Sequence[Contender],
    call: Call,
    budgets: Sequence[int],
    *,
    within: float,
    seeds: Sequence[int],
) -> list[Planned]:
    """Plans every method near every budget, a random method once per seed.

    Each cell comes with its budget and its cost, both in keys a query.

    Raises ValueError if no method comes within the share `within` of a budget.
    """
    keys = call.key.shape[-2]
    possible = [budget for budget in budgets if budget <= keys]
    plan = [
        cell for contender in contenders for cell in _near(contender, call, possible, within, seeds)
    ]
    if not plan:
        raise ValueError(
            f"no method of the survey comes within {within:g} of survey.budgets {budgets}; a "
            f"budget is a number of keys, at most {keys}"
        )
    return plan


def _near(
    contender: Contender,
    call: Call,
    budgets: Sequence[int],
    within: float,
    seeds: Sequence[int],
) -> Iterator[Planned]:
    for keys in budgets:
        if (closest := contender.near(keys, call, within)) is None:
            continue
        method = {**contender.method, **contender.argument(closest.parameter)}
        for seed in seeds if "seed" in method else [None]:
            yield (
                setting(contender.name, method if seed is None else method | {"seed": seed}),
                keys,
                rounded(closest.cost),
            )


def _usable(method: nn.Module, call: Call) -> bool:
    """Returns whether the method approximates the call's kernel under its mask."""
    kernels = getattr(method, "kernels", ())
    fits = not kernels or isinstance(call.kernel, kernels)
    return fits and (getattr(method, "supports_causal", True) or not call.is_causal)


def with_costs(record: Record, plan: Sequence[Planned]) -> Record:
    """Adds budget and cost to every cell of a record except the first, exact attention."""
    exact, *measured = record.cells
    return replace(
        record,
        cells=(
            exact,
            *(
                replace(cell, budget=budget, cost=cost)
                for cell, (_, budget, cost) in zip(measured, plan, strict=True)
            ),
        ),
    )


@torch.inference_mode()
def effective_weights(method: nn.Module, call: Call) -> Float[Tensor, "N M"]:
    """Finds W with output = W @ value: the method's weights in place of alpha, maybe negative.

    A method that selects keys reports them. Any other is linear in the values, so W is its output
    for the identity as values.
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
    """Computes every method's weights on a text's first tokens, in the first layer and head."""
    head = call.unit(0, heads=slice(1), positions=tokens)
    text = (str(tokenizer.decode([token])).strip() for token in task.first_tokens(tokens))
    panels = [
        Panel(
            approximation="exact",
            parameters={},
            cost=None,
            weights=_matrix(effective_weights(Exact(), head)),
        )
    ]
    for contender in contenders:
        if (closest := contender.near(budget, head, within=math.inf)) is None:
            continue
        panels.append(
            Panel(
                approximation=contender.name,
                parameters=contender.argument(closest.parameter),
                cost=rounded(closest.cost),
                weights=_matrix(effective_weights(contender.build(closest.parameter), head)),
            )
        )
    return Picture(tokens=tuple(text), panels=tuple(panels))


def _matrix(weights: Tensor) -> tuple[tuple[float, ...], ...]:
    """Rounds weights to three decimals, as in records."""
    return tuple(tuple(round(number, 3) for number in row) for row in weights.tolist())
