"""Method cards. Each file of conf/approximation is one card; no other list names the methods.

A file holds a method's arguments, which apps compose, and under `card` the facts that apps and the
report need. Only a checkout has these files; the library reads none. Every app imports this module,
so cards of cache methods live in `cache_cards`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra.utils import instantiate

CONF = Path(__file__).parents[2] / "conf"
APPROXIMATIONS = CONF / "approximation"

C = TypeVar("C", bound="MethodCard")


@dataclass(frozen=True, kw_only=True)
class MethodCard:
    """Describes a method: `target` is called with `arguments`.

    Attributes:
        name: The option's name.
        path: Its file, for messages.
        label: Its name in tables and figures.
        place: Its place in tables, legends and records, smallest first.
    """

    name: str
    path: str
    target: str
    arguments: Mapping[str, Any]
    label: str
    place: float = math.inf

    def build(self, **changes: Any) -> dict[str, Any]:
        """Returns what Hydra instantiates: the target and its arguments, with `changes`."""
        return {"_target_": self.target, **self.arguments, **changes}


@dataclass(frozen=True, kw_only=True)
class Card(MethodCard):
    """Describes an approximation, and how it is shown, measured and varied.

    Attributes:
        kernels: The kernels that it approximates, from its class; none = all.
        causal: Whether it can attend causally, from its class.
        keeps: The part of attention that it keeps, in words, for the table of methods.
        oracle: Whether it needs the exact weights or outputs. A practical method would predict
            them.
        mark: `colour` and `shape`. `shades` replaces `colour` for curves without a colour.
        curves: Argument -> value -> `label` (and mark) of the curve. For settings that no line
            connects.
        size: Format of a setting's size after the label; empty = its r, such as "65".
        axes: Axes of `evaluate`'s grid: argument -> its values, or the config key of the values.
        decoder: `axes` for a pretrained decoder; None = not measured there.
        survey: `vary`, the argument that meets a budget (null: none), and arguments that differ in
            the survey; None = not in the survey.
        explored: Its name in the token explorer, which shows methods with r keys; empty = not
            shown.
        train: Arguments that differ in a model trained with it; None = it has no gradients.
    """

    kernels: Sequence[str] = ()
    causal: bool = True
    keeps: str = ""
    oracle: bool = False
    mark: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Mapping[Any, Mapping[str, str]]] = field(default_factory=dict)
    size: str = ""
    axes: Mapping[str, Any] = field(default_factory=dict)
    decoder: Mapping[str, Any] | None = None
    survey: Mapping[str, Any] | None = None
    explored: str = ""
    train: Mapping[str, Any] | None = field(default_factory=dict)

    def method(self, r: int) -> Any:
        return instantiate(self.build(r=r))

    def curve(self, setting: Mapping[str, Any]) -> str:
        """Names the curve that a setting belongs to: "LSH, 4 rounds"."""
        return ", ".join(
            [
                self.label,
                *(
                    marks.get(setting[argument], {}).get("label", f"{setting[argument]} {argument}")
                    for argument, marks in self.curves.items()
                ),
            ]
        )

    def marks(self) -> dict[str, Mapping[str, str]]:
        """Collects the curves that have marks of their own, with these marks."""
        return ({self.label: self.mark} if "colour" in self.mark else {}) | {
            self.curve({argument: value}): mark
            for argument, marks in self.curves.items()
            for value, mark in marks.items()
            if "colour" in mark
        }


def cards(folder: Path = APPROXIMATIONS) -> Mapping[str, Card]:
    """Reads the cards of approximations as `read_cards` does."""
    return read_cards(Card, folder)


@cache
def read_cards(kind: type[C], folder: Path) -> Mapping[str, C]:
    """Reads the cards of a folder, by option name, in the order of their places.

    Raises ValueError, naming file and key, for a missing label, an unknown key, or a label that
    another card has; FileNotFoundError if there are no cards.
    """
    if not (found := [_read(kind, file) for file in folder.glob("*.yaml")]):
        raise FileNotFoundError(f"{folder} holds no method cards; run from a checkout")
    first: dict[str, C] = {}
    for card in sorted(found, key=lambda card: (card.place, card.name)):
        if (other := first.setdefault(card.label, card)) is not card:
            raise ValueError(f"{card.path}: card.label is {card.label!r}, as in {other.path}")
    return {card.name: card for card in first.values()}


def _read(kind: type[C], file: Path) -> C:
    path = "/".join(file.parts[-3:])  # the same in every checkout
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
    of_file = ("name", "path", "target", "arguments")
    allowed = [field.name for field in fields(kind) if field.name not in of_file]
    for key in card:
        if key not in allowed:
            raise ValueError(f"{path}: card.{key} is unknown; a card has {', '.join(allowed)}")
    return kind(name=file.stem, path=path, target=target, arguments=arguments, **card)
