"""What is allowed one by one and not together, and keys that are added with `+`.

As `pipelines.values` it is asked as soon as a config is composed, before an app's imports.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipelines.values import CONF, rule_of, shown, unknown, word
from value_aware_study.cards import Card, cards
from value_aware_study.data.text_paths import text_paths

LARGEST = 10**12
"""Weights of a model: four terabytes"""
ADDED = (
    *("trainer.*", "corpus.sources.*", "*.texts.*", "*.methods.*"),
    *("evaluate.axes.*", "survey.vary.*", "caches.only.*"),
)
"""Sections of names that users add to; of `trainer` they are arguments of Lightning's Trainer."""
KERNELS, MIXING = "value_aware_attention.kernels.", "value_aware_attention.models.mixing."
READ = {"corpus": ("corpus.path", "corpus.evaluation_path"), "probe": ("probe.text",)}
"""App -> keys of files that the user gives it"""


def check_together(cfg: DictConfig, app: str = "") -> None:
    """Raises ValueError for values of a config that do not go together.

    With an app also for what only that app reads: files, and its batches on the devices given.
    """
    check_sizes(cfg)
    check_corpus(cfg)
    check_in_context(cfg)
    check_attention(cfg, app)
    if app.startswith("train_"):
        check_shares(cfg, app)
    if app == "caches":
        for key in ("gaps_of", "only"):
            for name in cfg.caches[key]:
                word(*cfg.caches.methods).check(f"caches.{key}", name)
    check_files(cfg, READ.get(app, ()))


def check_attention(cfg: DictConfig, app: str) -> None:
    """The method that a model is trained with, or that approximates its attention."""
    if app == "train_causal":
        check_method(cfg, "attention.method", cfg.kernel.function._target_, is_causal=True)
    elif app == "train_masked":  # it takes the kernel of the method
        check_method(cfg, "attention.method", "", is_causal=False)
    elif "model" in cfg:
        is_causal = cfg.model.task._target_.endswith(".CausalTask")
        kernel = cfg.kernel.function._target_ if is_causal else f"{KERNELS}Exponential"
        check_method(cfg, "approximation", kernel, is_causal=is_causal)


def check_files(cfg: DictConfig, keys: Sequence[str]) -> None:
    """That there is text where the user says."""
    for key in keys:
        if (path := OmegaConf.select(cfg, key)) is not None:
            try:
                next(text_paths(Path(path)))  # the others are looked at when they are read
            except (ValueError, OSError) as error:
                raise ValueError(f"{key} is {shown(path)}; {error}") from None


def check_sizes(cfg: DictConfig) -> None:
    """Sizes of models, and of their windows and sequences."""
    for model in ("causal", "masked", "in_context", "benchmark.layer"):
        size = OmegaConf.select(cfg, model)
        if size.width % size.heads:
            raise ValueError(
                f"{model}.width is {size.width}; {model}.heads, which is {size.heads}, must "
                f"divide it"
            )
        layers = size.get("layers", 1)
        weights = layers * size.width * (4 * size.width + 2 * size.feedforward)
        if weights > LARGEST:
            raise ValueError(
                f"{model}.width is {size.width}; with {model}.feedforward, which is "
                f"{size.feedforward}, {layers} layers have {weights:.1e} weights, and "
                f"{LARGEST:.0e} is the most"
            )
    if cfg.causal.context >= cfg.causal.length:
        raise ValueError(
            f"causal.context is {cfg.causal.context}; it must be below causal.length, which is "
            f"{cfg.causal.length}"
        )
    if cfg.masked.block > cfg.masked.long.length:
        raise ValueError(
            f"masked.block is {cfg.masked.block}; it must be at most masked.long.length, which is "
            f"{cfg.masked.long.length}"
        )


def check_corpus(cfg: DictConfig) -> None:
    """Shares and sources of the text."""
    held_out, validated = cfg.corpus.evaluation_fraction, cfg.corpus.validation_fraction
    if held_out + validated >= 1:
        raise ValueError(
            f"corpus.validation_fraction is {validated}; together with corpus.evaluation_fraction, "
            f"which is {held_out}, it must be below 1"
        )
    for key in ("causal_sources", "masked_sources"):
        for name in cfg.tokens[key] or ():
            word(*cfg.corpus.sources).check(f"tokens.{key}", name)


def check_in_context(cfg: DictConfig) -> None:
    """Heads of the small decoders, and the rows that they are trained on."""
    size = cfg.in_context
    if size.heads % size.key_value_heads:
        raise ValueError(
            f"in_context.key_value_heads is {size.key_value_heads}; it must divide "
            f"in_context.heads, which is {size.heads}"
        )
    if size.width // size.heads % 2:
        raise ValueError(
            f"in_context.width is {size.width}; rotary positions need an even share of it for each "
            f"of in_context.heads, which is {size.heads}"
        )
    for task in ("recall", "markov"):
        prefix, length = size[task].prefix, size[task].length
        if prefix >= length:
            raise ValueError(
                f"in_context.{task}.prefix is {prefix}; it must be below "
                f"in_context.{task}.length, which is {length}"
            )
    recall = size.recall
    for key in ("prefix", "length"):
        if recall[key] % 2:
            raise ValueError(f"in_context.recall.{key} is {recall[key]}; it must be even")
    if 2 * recall.pairs > recall.prefix:
        raise ValueError(
            f"in_context.recall.pairs is {recall.pairs}; in_context.recall.prefix, which is "
            f"{recall.prefix}, must hold two tokens of each"
        )


def check_shares(cfg: DictConfig, app: str) -> None:
    """Every device takes its share of a batch, in micro-batches."""
    trainer, batch = cfg.trainer, cfg[app].batches.batch_size
    shares = trainer.devices * trainer.nodes * trainer.accumulate
    if batch % shares:
        raise ValueError(
            f"the batch_size of {cfg[app].name} is {batch}; trainer.devices x trainer.nodes x "
            f"trainer.accumulate, which is {shares}, must divide it"
        )


def check_method(cfg: DictConfig, key: str, kernel: str, *, is_causal: bool) -> None:
    """A method against what its card says, and arguments that do not go together."""
    method, option = OmegaConf.select(cfg, key), key.partition(".")[0]
    target = method.get("_target_", "") if method else ""
    if is_causal and target.startswith(MIXING):
        raise ValueError(
            f"{option} is {target.removeprefix(MIXING)}, which mixes every position with all "
            f"others and does not support causal models"
        )
    known = {card.target: card for card in reversed(list(cards().values()))}
    if card := known.get(target):
        check_arguments(card, method, key)
        check_use(card, option, kernel, is_causal=is_causal)


def check_arguments(card: Card, method: DictConfig, key: str) -> None:
    """Arguments of a method that do not go together."""
    if card.name == "lsh" and method.r % 2:
        raise ValueError(f"{key}.r is {method.r}; it must be even: LSH looks at halves of it")
    if card.name == "fixed" and method.summary > method.stride:
        raise ValueError(
            f"{key}.summary is {method.summary}; it must be at most {key}.stride, which is "
            f"{method.stride}"
        )


def check_use(card: Card, option: str, kernel: str, *, is_causal: bool) -> None:
    """What a method is for, as its card says."""
    method = card.target.rpartition(".")[2]
    if is_causal and not card.causal:
        raise ValueError(
            f"{option} is {method}, which does not support causal attention (its choice of keys "
            f"would leak the future), and the model is causal"
        )
    name = kernel.removeprefix(KERNELS).lower()
    if card.kernels and kernel.startswith(KERNELS) and name not in card.kernels:
        raise ValueError(
            f"{option} is {method}, which approximates the kernel {' and '.join(card.kernels)}; "
            f"the model has {name}"
        )


def check_added(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raises ValueError for a key added with + or ++ that nothing reads.

    Arguments of code may be added, and names where there are names of the user's.
    """
    for given in OverridesParser.create().parse_overrides(list(overrides)):
        if is_added_value(given):
            check_added_key(cfg, given.key_or_group)


def is_added_value(given: Override) -> bool:
    key = given.key_or_group
    is_group = given.package is not None or (CONF / key).is_dir()
    added = given.is_add() or given.is_force_add()
    return added and not is_group and not key.startswith("hydra")


def check_added_key(cfg: DictConfig, key: str) -> None:
    """Raises ValueError for a key that is new and that nothing reads."""
    shipped = CONF / f"{key.partition('.')[0]}.yaml"
    if rule_of(key) or (shipped.exists() and is_key_of(OmegaConf.load(shipped), key)):
        return
    value, parents = OmegaConf.select(cfg, key, throw_on_missing=False), parents_of(cfg, key)
    if fnmatchcase(key, "*.methods.*") and key.count(".") == 2 and not is_code(value):
        raise ValueError(f"{key} is {shown(value)}; it must be {{_target_: ...}} with arguments")
    if not any(map(is_code, parents)) and not any(fnmatchcase(key, one) for one in ADDED):
        raise ValueError(unknown(key))


def is_key_of(cfg: Any, key: str) -> bool:
    section, _, name = key.rpartition(".")
    found = OmegaConf.select(cfg, section) if section else cfg
    return isinstance(found, DictConfig) and name in found


def parents_of(cfg: DictConfig, key: str) -> list[Any]:
    """The sections that a key lies in, the root apart."""
    names = key.split(".")
    return [OmegaConf.select(cfg, ".".join(names[:end])) for end in range(1, len(names))]


def is_code(section: Any) -> bool:
    """Whether a section is arguments of code."""
    return isinstance(section, (DictConfig, ListConfig, dict)) and "_target_" in section
