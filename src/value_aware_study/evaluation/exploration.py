"""The token explorer's record: what each head of a model does with a short text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import nan
from statistics import median
from typing import Any, NamedTuple

from value_aware_attention.files import without_checksum

WHOLE = 100
"""Sum of a query's weights, up to rounding: weights are stored in hundredths."""


class Kept(NamedTuple):
    """The vectors that a method keeps for one query: keys, and the mean if it may be one.

    In JSON it is an array of four, or of three in records from before the mean.

    Attributes:
        weights: Weights of the keys.
        error: ||o - o~||^2 / ||o||^2; None if only o is zero.
        mean: Weight of the mean of the values that the query sees, of 1; 0 = not used, None = the
            method keeps keys only. Beside the weights, not spread over them.
    """

    keys: tuple[int, ...]
    weights: tuple[int, ...]
    error: float | None
    mean: float | None = None


class Query(NamedTuple):
    """One query; in JSON an array of two.

    Attributes:
        weights: Exact attention weights. Keys after the last are hidden or have weight 0.
        kept: By size, then by method; a model recorded with fewer methods lacks the last ones.
    """

    weights: tuple[int, ...]
    kept: tuple[tuple[Kept, ...], ...]


@dataclass(frozen=True)
class Head:
    """One head of one layer, with a query per token."""

    layer: int
    head: int
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Model:
    """A text as a model reads it, and the queries of some heads.

    Attributes:
        tokens: A token that begins a word begins with a space.
        label: Name for the reader; empty = `name`.
    """

    name: str
    tokens: tuple[str, ...]
    heads: tuple[Head, ...]
    label: str = ""

    def median_errors(self, size: int) -> list[float]:
        """Returns the median error over all queries, by method; `size` is an index of `sizes`.

        The result has the methods that the model was recorded with.
        """
        queries = [query.kept[size] for head in self.heads for query in head.queries]
        errors = (
            [keys.error for keys in column if keys.error is not None]
            for column in zip(*queries, strict=True)
        )
        return [median(column) if column else nan for column in errors]


@dataclass(frozen=True)
class Exploration:
    """All data of the explorer: about 0.4 KB per query of each head.

    Attributes:
        sizes: Numbers of keys that a query may keep.
    """

    sizes: tuple[int, ...]
    methods: tuple[str, ...]
    models: tuple[Model, ...]

    def labelled(self, labels: Mapping[str, str]) -> "Exploration":
        """Keeps the models with a label, in the order of the labels."""
        by_name = {model.name: model for model in self.models}
        return replace(
            self,
            models=tuple(
                replace(by_name[name], label=label)
                for name, label in labels.items()
                if name in by_name
            ),
        )

    def joins(self, other: "Exploration") -> bool:
        """Tells whether sizes are equal, and the methods of one begin with the other's."""
        common = min(len(self.methods), len(other.methods))
        return (self.sizes, self.methods[:common]) == (other.sizes, other.methods[:common])

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @classmethod
    def of(cls, explorations: Sequence["Exploration"]) -> "Exploration":
        """Joins explorations. Raises ValueError if neither of two `joins` the other."""
        longest = max(explorations, key=lambda exploration: len(exploration.methods))
        for other in explorations:
            if not longest.joins(other):
                raise ValueError(
                    f"explorations join with equal sizes and methods; these have "
                    f"{longest.sizes} of {longest.methods} and {other.sizes} of {other.methods}"
                )
        return replace(
            longest,
            models=tuple(model for exploration in explorations for model in exploration.models),
        )

    @classmethod
    def from_json(cls, text: str) -> "Exploration":
        """Inverts `to_json`. Raises ValueError if a displayed part is missing."""
        content = without_checksum(json.loads(text))
        models = tuple(
            Model(model["name"], tuple(model["tokens"]), tuple(map(_head, model["heads"])))
            for model in content["models"]
        )
        exploration = cls(tuple(content["sizes"]), tuple(content["methods"]), models)
        if not (exploration.sizes and exploration.methods and models):
            raise ValueError("it has no sizes, no methods or no models")
        for model in models:
            if not model.tokens or not model.heads:
                raise ValueError(f"{model.name} has no tokens or no heads")
            if {len(head.queries) for head in model.heads} != {len(model.tokens)}:
                raise ValueError(f"{model.name} has not a query for every token")
        return exploration


def _head(content: Mapping[str, Any]) -> Head:
    queries = (
        Query(
            tuple(weights),
            tuple(
                tuple(Kept(tuple(keys), tuple(shares), *rest) for keys, shares, *rest in methods)
                for methods in sizes
            ),
        )
        for weights, sizes in content["queries"]
    )
    return Head(content["layer"], content["head"], tuple(queries))
