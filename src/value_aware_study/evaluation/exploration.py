"""The record behind the token explorer: what each head of a model does with one short text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import nan
from statistics import median
from typing import Any, NamedTuple

from value_aware_attention.files import without_checksum

WHOLE = 100
"""Sum of the weights of a query, up to rounding, because they are kept in hundredths."""


class Kept(NamedTuple):
    """Holds the keys that a method keeps for one query; in JSON an array of three."""

    keys: tuple[int, ...]
    weights: tuple[int, ...]
    error: float | None
    """||o - o~||^2 / ||o||^2; None where only o is zero."""


class Query(NamedTuple):
    """Holds one query; in JSON an array of two."""

    weights: tuple[int, ...]
    """Exact attention weights; keys after the last are not seen, or have weight 0."""
    kept: tuple[tuple[Kept, ...], ...]
    """For each size, each method."""


@dataclass(frozen=True)
class Head:
    """Holds one head of one layer, with a query for every token."""

    layer: int
    head: int
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Model:
    """Holds a text as a model reads it, and the queries of some heads."""

    name: str
    tokens: tuple[str, ...]
    """One that begins a word begins with a space."""
    heads: tuple[Head, ...]
    label: str = ""
    """What a reader sees in place of the name"""

    def median_errors(self, size: int) -> list[float]:
        """Returns the median error over all queries, by method; `size` is a place in `sizes`."""
        every = [query.kept[size] for head in self.heads for query in head.queries]
        errors = (
            [one.error for one in kept if one.error is not None]
            for kept in zip(*every, strict=True)
        )
        return [median(known) if known else nan for known in errors]


@dataclass(frozen=True)
class Exploration:
    """Holds everything that the explorer shows: some 0.3 KB for each query of each head."""

    sizes: tuple[int, ...]
    """Keys a query may keep."""
    methods: tuple[str, ...]
    models: tuple[Model, ...]

    def labelled(self, labels: Mapping[str, str]) -> "Exploration":
        """Keeps the models that have a label, in the order of the labels."""
        known = {model.name: model for model in self.models}
        models = [replace(known[name], label=labels[name]) for name in labels if name in known]
        return replace(self, models=tuple(models))

    def to_json(self) -> str:
        """Returns as compact JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @classmethod
    def of(cls, explorations: Sequence["Exploration"]) -> "Exploration":
        """Joins explorations; ValueError where their sizes or methods differ."""
        first = explorations[0]
        for other in explorations:
            for name in ("sizes", "methods"):
                given, known = getattr(other, name), getattr(first, name)
                if given != known:
                    raise ValueError(f"the {name} of explorations are {known} and {given}, not one")
        models = tuple(model for exploration in explorations for model in exploration.models)
        return cls(first.sizes, first.methods, models)

    @classmethod
    def from_json(cls, text: str) -> "Exploration":
        """Returns the inverse of `to_json`; ValueError where a part is missing that is shown."""
        read = without_checksum(json.loads(text))
        models = tuple(
            Model(model["name"], tuple(model["tokens"]), tuple(map(_head, model["heads"])))
            for model in read["models"]
        )
        found = cls(tuple(read["sizes"]), tuple(read["methods"]), models)
        if not (found.sizes and found.methods and found.models):
            raise ValueError("it has no sizes, no methods or no models")
        for model in found.models:
            if not model.tokens or not model.heads:
                raise ValueError(f"{model.name} has no tokens or no heads")
            if {len(head.queries) for head in model.heads} != {len(model.tokens)}:
                raise ValueError(f"{model.name} has not a query for every token")
        return found


def _head(read: dict[str, Any]) -> Head:
    queries = (
        Query(
            tuple(weights),
            tuple(
                tuple(Kept(tuple(keys), tuple(kept), error) for keys, kept, error in methods)
                for methods in sizes
            ),
        )
        for weights, sizes in read["queries"]
    )
    return Head(read["layer"], read["head"], tuple(queries))
