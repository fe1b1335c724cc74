"""Composes the method cards of conf/ into the configs of the apps that use them.

Hydra finds the stored configs like files of conf/: `evaluate_methods`, `survey_methods`,
`benchmark_methods` and `caches_methods`, which these apps name in their defaults, and the options
of `attention`.
"""

from collections.abc import Collection, Iterable, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from pipelines.app.cross_checks import is_added_value, is_code
from value_aware_study.cards import APPROXIMATIONS, CacheCard, Card, cache_cards, cards

VAR_KEYWORD = Parameter.VAR_KEYWORD


def register_methods(folder: Path = APPROXIMATIONS) -> None:
    """Stores each app's part of the cards of a folder, without importing their classes."""
    known = cards(folder)
    store = ConfigStore.instance()
    for app, section in (("evaluate", evaluate), ("survey", survey), ("benchmark", benchmark)):
        store.store(f"{app}_methods", {app: section(known.values())})
    store.store("caches_methods", {"caches": caches(cache_cards().values())})
    for name, card in known.items():
        # models attend with exact attention by default (conf/attention/exact.yaml)
        if name != "exact" and card.train is not None:
            store.store(name, attention(card), group="attention")


def evaluate(known: Iterable[Card]) -> dict[str, Any]:
    """Composes the grid's methods with their axes; named values become interpolations."""
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
    """Composes the methods at equal budgets, and the argument of each that meets one."""
    used = [(card, dict(card.survey)) for card in known if card.survey is not None]
    vary = {card.name: changes.pop("vary", None) for card, changes in used}
    return {"methods": {card.name: card.build(**changes) for card, changes in used}, "vary": vary}


def benchmark(known: Iterable[Card]) -> dict[str, Any]:
    """Composes the methods that are timed, each by the name of its entry."""
    entries = {
        name: {"label": card.label} | dict(entry) | {"build": card.build(**entry.get("build", {}))}
        for card in known
        for name, entry in card.benchmark.items()
    }
    return {"methods": entries}


def caches(known: Collection[CacheCard]) -> dict[str, Any]:
    """Composes the cache methods, with the queries and the budgets that are their own."""
    return {
        "methods": {card.name: card.build() for card in known},
        "only": {card.name: list(card.only) for card in known if card.only is not None},
        "pools": {card.name: dict(card.pools) for card in known if card.pools},
    }


def attention(card: Card) -> dict[str, Any]:
    """Composes the option of `attention` that trains a model with the method."""
    method = card.build(**(card.train or {}))
    return {"method": method, "name": card.name, "suffix": "_${attention.name}"}


def check_added_arguments(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raises ValueError for an argument added with + that its function or class does not take."""
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
