"""Method cards: one file per method, conf/approximation/<name>.yaml, with everything to say of it.

A file holds the arguments of an approximation, which apps compose, and under `card` the facts that
apps and the report need. Only a checkout has these files; the library itself reads none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CARDS = Path(__file__).parents[2] / "conf" / "approximation"


@dataclass(frozen=True, kw_only=True)
class Card:
    """Describes one method: `target` called with `arguments`, how it is shown and varied."""

    name: str
    """The option's name."""
    path: str
    """Its file, as messages name it."""
    target: str
    arguments: Mapping[str, Any]
    label: str
    """Its name in tables and figures."""
    place: float = math.inf
    """Where it stands in tables, legends and records, smallest first."""
    kernels: Sequence[str] = ()
    """The kernels that it approximates, as its class says; none = all."""
    causal: bool = True
    """Whether it can attend causally, as its class says."""
    keeps: str = ""
    """The part of attention that it keeps, in words, for the table of methods."""
    oracle: bool = False
    """Whether it needs the exact weights or outputs, which a practical method would predict."""
    mark: Mapping[str, Any] = field(default_factory=dict)
    """`colour` and `shape`; `shades` in place of `colour` where curves have none of their own."""
    curves: Mapping[str, Mapping[Any, Mapping[str, str]]] = field(default_factory=dict)
    """Argument -> value -> `label` (and mark) of the curve: settings that no line connects."""
    size: str = ""
    """Format of a setting's size after the label; empty = its r, such as "65"."""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Axes of `evaluate`'s grid: argument -> its values, or the config key that has them."""
    survey: Mapping[str, Any] | None = None
    """`vary`, the argument that meets a budget (null: it has none), and others that differ there;
    None = not in the survey."""
    benchmark: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Entries of the benchmark, as conf/benchmark.yaml describes them."""
    train: Mapping[str, Any] | None = field(default_factory=dict)
    """Arguments that differ in a model trained with it; None = it gives no gradients."""

    def build(self, **changes: Any) -> dict[str, Any]:
        """Returns the config that Hydra instantiates: target and arguments, with `changes`."""
        return {"_target_": self.target, **self.arguments, **changes}

    def curve(self, setting: Mapping[str, Any]) -> str:
        """Names the curve that a setting belongs to: "LSH, 4 rounds"."""
        parts = [self.label]
        for argument, known in self.curves.items():
            value = setting[argument]
            parts.append(known.get(value, {}).get("label", f"{value} {argument}"))
        return ", ".join(parts)

    def marks(self) -> dict[str, Mapping[str, str]]:
        """Collects the marks of the curves that have one of their own."""
        own = {self.label: self.mark} if "colour" in self.mark else {}
        for argument, known in self.curves.items():
            for value, mark in known.items():
                if "colour" in mark:
                    own[self.curve({argument: value})] = mark
        return own


@cache
def cards(folder: Path = CARDS) -> Mapping[str, Card]:
    """Reads the cards of a folder, by option name, in the order of their places.

    Raises ValueError, naming file and key, for a card without a label, with a key that is none of
    `Card`, or with the label of another; FileNotFoundError where there are no cards.
    """
    read = sorted(map(_read, folder.glob("*.yaml")), key=lambda card: (card.place, card.name))
    if not read:
        raise FileNotFoundError(f"{folder} holds no method cards; run from a checkout")
    first: dict[str, Card] = {}
    for card in read:
        other = first.setdefault(card.label, card)
        if other is not card:
            raise ValueError(f"{card.path}: card.label is {card.label!r}, as in {other.path}")
    return {card.name: card for card in read}


GIVEN = ("name", "path", "target", "arguments")
KEYS = tuple(f.name for f in fields(Card) if f.name not in GIVEN)


def _read(file: Path) -> Card:
    """Reads the card of one file."""
    path = "/".join(file.parts[-3:])  # wherever the checkout is
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    arguments = content if isinstance(content, dict) else {}
    target, card = arguments.pop("_target_", None), arguments.pop("card", None)
    card = card if isinstance(card, dict) else {}
    for key, value in (("_target_", target), ("card.label", card.get("label"))):
        if not value:
            raise ValueError(f"{path}: {key} is missing")
    for key in card:
        if key not in KEYS:
            raise ValueError(f"{path}: card.{key} is unknown; a card has {', '.join(KEYS)}")
    return Card(name=file.stem, path=path, target=target, arguments=arguments, **card)
