"""Composes the method cards of conf/ into the configs of apps, and checks the code they call.

Hydra finds the stored configs like files of conf/: `<app>_methods`, which an app names in its
defaults, the options of `attention`, and `scale=laptop`, which sets no value. Two resolvers serve
conf/: `own_keys` and `named_model`.
"""

from collections.abc import Iterable, Mapping
from inspect import signature
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from value_aware_attention.named_models import named_models
from value_aware_study.cards import APPROXIMATIONS, Card, cards

OmegaConf.register_new_resolver(
    # the section of an app with its comments, for the app's help, which is a template with $
    "own_keys",
    lambda app: (
        (APPROXIMATIONS.parent / f"{app}.yaml")
        .read_text(encoding="utf-8")
        .partition(f"\n{app}:\n")[2]
        .replace("$", "$$")
    ),
    replace=True,
)
OmegaConf.register_new_resolver(
    "named_model", lambda name: named_models()[name]["model"], replace=True
)
TARGETS = (
    "value_aware_attention.", "value_aware_study.", "pipelines.app.", "torch.nn.", "torch.optim.",
    "pathlib.Path",
)  # fmt: skip
"""Beginnings of the names that a `_target_` may have, beside modules in the current folder"""


def register_methods(app: str, folder: Path = APPROXIMATIONS) -> None:
    """Stores the part of a folder's cards that an app uses, without importing their classes.

    Hydra copies everything that is stored, for its help once per group.
    """
    methods = cards(folder)
    store = ConfigStore.instance()
    sections = {
        "evaluate": grid_section((card, card.axes) for card in methods.values() if card.axes),
        "evaluate_pretrained": grid_section(
            (card, card.decoder) for card in methods.values() if card.decoder is not None
        ),
        "survey": survey(methods.values()),
    }
    store.store("laptop", {"scale": "laptop"}, group="scale", package="_global_")
    if app in sections:
        store.store(f"{app}_methods", {app: sections[app]})
    for name, card in methods.items():
        # models attend with exact attention by default (conf/attention/exact.yaml)
        if name != "exact" and card.train is not None:
            store.store(name, attention(card), group="attention")


def grid_section(used: Iterable[tuple[Card, Mapping[str, object]]]) -> dict[str, object]:
    """Composes a grid's methods with their axes; named values become interpolations."""
    pairs = list(used)
    axes = {
        card.name: {
            argument: f"${{{values}}}" if isinstance(values, str) else values
            for argument, values in values_of.items()
        }
        for card, values_of in pairs
    }
    return {"methods": {card.name: card.build() for card, _ in pairs}, "axes": axes}


def survey(methods: Iterable[Card]) -> dict[str, object]:
    """Composes the methods at equal budgets, and the argument of each that meets one."""
    used = [(card, dict(card.survey)) for card in methods if card.survey is not None]
    vary = {card.name: changes.pop("vary", None) for card, changes in used}
    return {"methods": {card.name: card.build(**changes) for card, changes in used}, "vary": vary}


def attention(card: Card) -> dict[str, object]:
    """Composes the option of `attention` that trains a model with the method."""
    return {
        "method": card.build(**(card.train or {})),
        "name": card.name,
        "suffix": "_${attention.name}",
    }


def check_arguments(cfg: DictConfig, added: Iterable[str]) -> None:
    """Raises ValueError for an added argument that its function or class does not take."""
    for key in added:
        section, _, name = key.rpartition(".")
        target = OmegaConf.select(cfg, section)._target_
        parameters = signature(get_method(target)).parameters
        takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in parameters.values())
        if name not in parameters and not takes_all and not name.startswith("_"):
            raise ValueError(
                f"{key}: {target.rpartition('.')[2]} takes no {name!r}; it takes "
                f"{', '.join(parameters)}"
            )


def check_targets(content: object, key: str = "") -> None:
    """Raises ValueError for a `_target_`, at any depth, of code that is neither ours nor the
    user's.

    The user's own modules lie in the current folder. Hydra 1.3 only has a list of refused targets;
    1.5 will need a list of allowed ones.
    """
    if isinstance(content, list):
        content = dict(enumerate(content))
    for name, entry in content.items() if isinstance(content, dict) else ():
        below = f"{key}.{name}" if key else str(name)
        if name == "_target_" and not str(entry).startswith(TARGETS):
            module = Path(str(entry).partition(".")[0])
            if not (module.is_dir() or module.with_suffix(".py").is_file()):
                raise ValueError(
                    f"{below} is {entry}; it must begin with {', '.join(TARGETS)} or a module in "
                    f"the current folder"
                )
        if below != "hydra":  # its own sweeper, launcher and callbacks
            check_targets(entry, below)
