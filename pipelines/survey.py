"""Stage survey: every method on a trained model at equal budgets, and what each attends to.

python -m pipelines.survey model=masked length=long
python -m pipelines.survey kernel=elu 'survey.budgets=[32]'
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from pipelines.app import app, plain
from pipelines.evaluate import evaluating, hashes_of, setting, tracked_by_first, write
from value_aware_attention.approximations import Exact
from value_aware_attention.call import Call
from value_aware_attention.hugging_face.saved import saved_tokenizer
from value_aware_attention.measurement import Record, Setting, Task, measure
from value_aware_attention.measurement.layer_errors import rounded
from value_aware_attention.measurement.record import Panel, Picture
from value_aware_study.data.tokens import AGAIN
from value_aware_study.tasks.attention_picture import effective_weights, first_head
from value_aware_study.tasks.budgets import Affordable, closest_to_budget


@dataclass(frozen=True)
class Contender:
    """A configured method with one integer argument left open, or with none."""

    name: str
    method: dict[str, Any]
    vary: str | None
    make: Callable[..., nn.Module]

    def given(self, parameter: int) -> dict[str, int]:
        """The open argument by its name."""
        return {} if self.vary is None else {self.vary: parameter}

    def build(self, parameter: int) -> nn.Module:
        return self.make(**self.given(parameter))

    def near(self, keys: int, call: Call, within: float) -> Affordable | None:
        """The argument that costs nearest to `keys` on such a call; None where it cannot run."""
        length, head_dim = call.key.shape[-2:]
        sizes: dict[str, Any] = {"length": length, "head_dim": head_dim}
        sizes["is_causal"] = call.is_causal
        found = closest_to_budget(self.build, keys, within=within, **sizes)
        return found if found and usable(self.build(found.parameter), call) else None


@app("survey")
def main(cfg: DictConfig) -> None:
    """Writes <records>/<model>.json: the cells with their budgets, and the picture's weights."""
    with evaluating(cfg) as device:
        survey(cfg, device)


def survey(cfg: DictConfig, device: str) -> None:
    """Every method near every budget, and the picture."""
    hashes = hashes_of(cfg)
    task = instantiate(cfg.task, device=device)
    call = task.layer_calls()[0]
    budgets = [budget for budget in cfg.budgets if budget <= call.key.shape[-2]]
    contenders = [
        Contender(name, plain(method), cfg.vary[name], instantiate(method, _partial_=True))
        for name, method in cfg.methods.items()
    ]
    plan = [cell for one in contenders for cell in cells(cfg, one, call, budgets)]
    if not plan:
        raise ValueError(
            f"no method of the survey comes within {cfg.within:g} of survey.budgets {cfg.budgets}; "
            f"a budget is a number of keys, at most {call.key.shape[-2]}"
        )
    with tracked_by_first(cfg, "survey", hashes) as run:
        record = measure(
            task, [cell for cell, *_ in plan], layers=None, cache=cfg.cache, name=cfg.name,
            weights=hashes["checkpoint"], description=cfg.data,
        )  # fmt: skip
        exact, *measured = record.cells
        costed = (
            replace(cell, budget=budget, cost=cost)
            for cell, (_, budget, cost) in zip(measured, plan, strict=True)
        )
        record = replace(
            record,
            cells=(exact, *costed),
            scale=cfg.scale,
            hashes=hashes,
            picture=picture(cfg, contenders, task, call),
        )
        write(cfg, cfg.records, record)
        log_budgets(run, record)


def log_budgets(run: Any, record: Record) -> None:
    """Every method's metric and output error against the budget, which is the step."""
    for budget in sorted({cell.budget for cell in record.cells if cell.budget}) if run else ():
        cells = [cell for cell in record.cells if cell.budget == budget]
        found = {f"{record.metric}/{cell.approximation}": cell.value for cell in cells}
        found |= {
            f"relative output error/{cell.approximation}": cell.error.relative
            for cell in cells
            if cell.error and cell.error.relative is not None
        }
        run.log(found, step=int(budget))
    if run:
        run.summary["exact"] = record.cells[0].value


def cells(
    cfg: DictConfig, contender: Contender, call: Call, budgets: list[int]
) -> Iterator[tuple[Setting, float, float]]:
    """A method near every budget, once for each seed if it is random; the budget and its cost."""
    for budget in budgets:
        found = contender.near(budget, call, cfg.within)
        if found is None:
            continue
        given = contender.method | contender.given(found.parameter)
        for seed in cfg.seeds if "seed" in given else [None]:
            seeded = given if seed is None else given | {"seed": seed}
            yield setting(contender.name, seeded), budget, rounded(found.cost)


def usable(method: nn.Module, call: Call) -> bool:
    """Whether the method approximates this kernel, under this mask."""
    kernels = getattr(method, "kernels", ())
    fits = not kernels or isinstance(call.kernel, kernels)
    return fits and (getattr(method, "supports_causal", True) or not call.is_causal)


def picture(cfg: DictConfig, contenders: list[Contender], task: Task, call: Call) -> Picture:
    """The weights of every method on a text's first tokens, in the first layer and head."""
    shown = first_head(call, cfg.picture.tokens)
    tokenizer = saved_tokenizer(cfg.tokenizer, AGAIN)
    text = (
        str(tokenizer.decode([token])).strip() for token in task.first_tokens(cfg.picture.tokens)
    )
    exact = matrix(effective_weights(Exact(), shown))
    panels = [Panel(approximation="exact", parameters={}, cost=None, weights=exact)]
    for contender in contenders:
        found = contender.near(cfg.picture.budget, shown, within=math.inf)
        if found is None:
            continue
        weights = effective_weights(contender.build(found.parameter), shown)
        panels.append(
            Panel(
                approximation=contender.name,
                parameters=contender.given(found.parameter),
                cost=rounded(found.cost),
                weights=matrix(weights),
            )
        )
    return Picture(tokens=tuple(text), panels=tuple(panels))


def matrix(weights: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """As plain numbers, three digits after the point."""
    return tuple(tuple(round(number, 3) for number in row) for row in weights.tolist())


if __name__ == "__main__":
    main()
