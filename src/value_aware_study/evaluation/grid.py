"""The grid of approximations that replace a model's attention, one setting a cell."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from hydra.utils import instantiate

from value_aware_attention.approximations import Approximation
from value_aware_attention.measurement import Setting
from value_aware_attention.models.trained_attention import SEEDS_PER_LAYER


def grid(
    methods: Mapping[str, Mapping[str, Any]],
    axes: Mapping[str, Mapping[str, Sequence[Any]]],
    length: int,
) -> list[Setting]:
    """Combines every method that has axes with every combination of their values.

    `methods` are configs with a `_target_`; an axis holds an argument's values, of which "all"
    stands for `length` keys.
    """
    return [
        setting(name, {**methods[name], **parameters})
        for name, own in axes.items()
        for parameters in expand_axes(own, length)
    ]


def expand_axes(axes: Mapping[str, Sequence[Any]], length: int) -> Iterator[dict[str, Any]]:
    """Yields every combination of the axes' values, without those of more than `length` keys."""
    values = [
        dict.fromkeys(length if value == "all" else value for value in axis)
        for axis in axes.values()
    ]
    for combination in product(*values):
        cell = dict(zip(axes, combination, strict=True))
        if cell.get("r", 0) <= length:
            yield cell


def setting(name: str, option: Mapping[str, Any]) -> Setting:
    """Makes a cell of a configured method, whose seed, if it has one, differs between layers.

    Its `build` raises ValueError where the config makes no approximation.
    """
    method = {key: value for key, value in option.items() if key != "card"}

    def build(layer: int) -> Approximation:
        seeded = {"seed": method["seed"] * SEEDS_PER_LAYER + layer} if "seed" in method else {}
        built = instantiate(method | seeded)
        if not isinstance(built, Approximation):
            raise ValueError(f"{name}: {method['_target_']} makes no approximation of attention")
        return built

    parameters = {key: value for key, value in method.items() if key not in ("_target_", "search")}
    return Setting(name, parameters, build)
