"""Composes the method cards of conf/approximation into the configs of the apps that use them.

Hydra finds what is stored here as it finds a file of conf: `evaluate_methods`, `survey_methods` and
`benchmark_methods`, which those apps name in their defaults, and the options of `attention`.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from pipelines.together import is_added_value, is_code
from value_aware_study.cards import CARDS, Card, cards

__all__ = ["check_added_arguments", "check_methods", "register_methods"]

VAR_KEYWORD = Parameter.VAR_KEYWORD


def register_methods(folder: Path = CARDS) -> None:
    """Stores what the cards of a folder say of the apps; it imports none of their classes."""
    known = cards(folder)
    store = ConfigStore.instance()
    for app, section in (("evaluate", evaluate), ("survey", survey), ("benchmark", benchmark)):
        store.store(f"{app}_methods", {app: section(known.values())})
    for name, card in known.items():
        # models attend with exact attention by default (conf/attention/exact.yaml)
        if name != "exact" and card.train is not None:
            store.store(name, attention(card), group="attention")


def check_methods(folder: Path = CARDS) -> None:
    """Raises ValueError, naming file and key, for a card's argument that its class has not."""
    for card in cards(folder).values():
        check_arguments(card)


def evaluate(known: Iterable[Card]) -> dict[str, Any]:
    """The methods of the grid and their axes, as interpolations where these are named."""
    used = [card for card in known if card.axes]
    axes = {
        card.name: {
            argument: f"${{{values}}}" if isinstance(values, str) else values
            for argument, values in card.axes.items()
        }
        for card in used
    }
    return {"methods": {card.name: card.build() for card in used}, "axes": axes}


def survey(known: Iterable[Card]) -> dict[str, Any]:
    """The methods at equal budgets, and the argument of each that meets one."""
    used = [(card, dict(card.survey)) for card in known if card.survey is not None]
    vary = {card.name: changes.pop("vary", None) for card, changes in used}
    return {"methods": {card.name: card.build(**changes) for card, changes in used}, "vary": vary}


def benchmark(known: Iterable[Card]) -> dict[str, Any]:
    """The methods that are timed, each by the name of its entry."""
    entries = {
        name: {"label": card.label} | dict(entry) | {"build": card.build(**entry.get("build", {}))}
        for card in known
        for name, entry in card.benchmark.items()
    }
    return {"methods": entries}


def attention(card: Card) -> dict[str, Any]:
    """The option of `attention` that trains a model with the method."""
    method = card.build(**(card.train or {}))
    return {"method": method, "name": card.name, "suffix": "_${attention.name}"}


def method_class(card: Card) -> Any:
    """The class that the card's `_target_` names; ValueError where there is none."""
    module, _, name = card.target.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(f"{card.path}: _target_ is {card.target}, which is no class") from None


def check_arguments(card: Card) -> None:
    """Raises ValueError for the first key of a card that names an argument its class has not."""
    built = method_class(card)
    known = signature(built).parameters
    for key, argument in named_arguments(card):
        if argument not in known:
            raise ValueError(
                f"{card.path}: {key}: {built.__name__} takes no {argument!r}; it takes "
                f"{', '.join(known)}"
            )


def check_added_arguments(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raises ValueError for an argument added with + that the code it is for does not take."""
    for given in OverridesParser.create().parse_overrides(list(overrides)):
        section, _, name = str(given.key_or_group).rpartition(".")
        code: Any = OmegaConf.select(cfg, section) if section and is_added_value(given) else {}
        if not is_code(code):
            continue
        known = signature(get_method(code._target_)).parameters
        if name not in known and not any(one.kind is VAR_KEYWORD for one in known.values()):
            raise ValueError(
                f"{section}.{name}: {code._target_.rpartition('.')[2]} takes no {name!r}; it takes "
                f"{', '.join(known)}"
            )


def named_arguments(card: Card) -> Iterator[tuple[str, str]]:
    """Key in the file and argument of the class, for every argument that a card names."""
    survey = dict(card.survey or {})
    if vary := survey.pop("vary", None):
        yield "card.survey.vary", vary
    named = {"": card.arguments, "card.axes.": card.axes, "card.curves.": card.curves}
    named |= {"card.survey.": survey, "card.train.": card.train or {}}
    for entry, settings in card.benchmark.items():
        for part in ("build", "by_length"):
            named[f"card.benchmark.{entry}.{part}."] = settings.get(part, {})
    yield from ((f"{prefix}{name}", name) for prefix, names in named.items() for name in names)
