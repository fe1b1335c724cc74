"""Checks between config values, and of keys added with `+`.

They run as soon as a config is composed, before an app imports what takes long.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipelines.app.values import (
    CONF,
    POSITIVE,
    SWITCH,
    TEXT,
    Rule,
    asked,
    either,
    leaves,
    near_words,
    null_or,
    option,
    rule_of,
    shown,
    unknown,
    word,
)
from value_aware_attention.texts import text_paths
from value_aware_study.cards import Card, cards

LARGEST = 10**12
"""Largest number of weights of a model, which take four terabytes."""
ADDED = (
    *("trainer.*", "corpus.sources.*", "*.texts.*", "*.methods.*"),
    *("evaluate.axes.*", "survey.vary.*", "caches.only.*", "caches.after.*.*"),
    *("caches.pools.*", "caches.profiles.*"),
)
"""Patterns of the keys that users may add, by names of their own."""
TRAINER = {
    "gradient_clip_val": null_or(POSITIVE),
    "gradient_clip_algorithm": null_or(word("norm", "value")),
    "deterministic": null_or(either(SWITCH, "warn")),
    "benchmark": null_or(SWITCH),
    "inference_mode": SWITCH,
    "detect_anomaly": SWITCH,
    "sync_batchnorm": SWITCH,
    "profiler": null_or(word("simple", "advanced", "pytorch", "xla")),
    "enable_progress_bar": SWITCH,
}
"""Rules of the Trainer's arguments that may be added: costs, numerics, and their display.

All others say for how long, on which batches and with which files to train, which `fit` decides."""
OWN_NAMES = ("causal_", "masked_", "in_context_")
"""Prefixes of the model names that are made of kernel, length, task and attention."""
EVALUATING = ("evaluate", "survey")
"""Apps that read a trained model and its evaluation text."""
NAMED = (*EVALUATING, "train_causal", "train_masked", "train_in_context")
"""Apps that write a model or a record by its name."""
OF_HYDRA = {
    "hydra.job.chdir": Rule(allowed="false: paths are read from here", holds=lambda v: not v),
    "hydra.mode": Rule(allowed="left out: -m starts a sweep", holds=lambda v: False),
    "hydra.searchpath": Rule(
        allowed="a list with file://. in it, where params.yaml is",
        holds=lambda v: isinstance(v, list) and "file://." in v,
    ),
}
"""Rules of Hydra's options that would break an app."""
GROUPS = [folder.name for folder in CONF.iterdir() if folder.is_dir()]
KERNELS, MIXING = (
    "value_aware_attention.kernels.",
    "value_aware_attention.models.mixing.",
)
READ = {"corpus": ("corpus.path", "corpus.evaluation_path"), "probe": ("probe.text",)}
"""App -> keys of the files that the user gives it."""


def check_together(cfg: DictConfig, app: str = "") -> None:
    """Raises ValueError for values of a config that do not go together.

    With an app it also checks what only that app reads: files, and its batches on the devices.
    """
    check_sizes(cfg)
    check_corpus(cfg)
    check_attention(cfg, app)
    check_trainer(cfg)
    if (CONF / f"{app}.yaml").exists():
        check_shared(cfg, app)
    if app in NAMED:
        check_names(cfg, app)
    if app in EVALUATING:
        check_evaluated(cfg, app)
    if app.startswith("train_"):
        check_shares(cfg, app)
    if app == "caches":
        check_cache_names(cfg.caches)
    check_files(cfg, READ.get(app, ()))


def check_cache_names(given: DictConfig) -> None:
    """Raises ValueError for a cache method or profile that is named and not among them."""
    known = word(*given.methods)
    for key in ("gaps_of", "only", "after", "pools", "curve.methods"):
        for name in OmegaConf.select(given, key):
            known.check(f"caches.{key}", name)
    for name, pools in given.pools.items():
        for pool in pools:
            word("layer", "model", "checked", *given.profiles).check(f"caches.pools.{name}", pool)
    for name, one in given.profiles.items():
        known.check(f"caches.profiles.{name}.method", one.method)


def check_trainer(cfg: DictConfig) -> None:
    """Checks arguments that were added to Lightning's Trainer, on a command line or in a file."""
    for name, value in cfg.trainer.items():
        if name in TRAINER:
            TRAINER[name].check(f"trainer.{name}", value)
        elif not rule_of(f"trainer.{name}"):
            raise ValueError(
                f"trainer.{name} cannot be added: a training takes all of its steps on all of its "
                f"batches, and evaluates as training.evaluate_every says; what can be added is "
                f"{', '.join(TRAINER)}{asked(near_words(name, TRAINER))}"
            )


def check_shared(cfg: DictConfig, app: str) -> None:
    """Checks that keys which conf/<app>.yaml reads from other keys still equal them.

    An app's own paths and amounts may vary.
    """
    given = dict(leaves(OmegaConf.to_container(cfg[app])))
    shipped: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{app}.yaml"))
    for key, text in leaves(shipped.get(app, {})):
        other, name = re.fullmatch(r"\$\{((?!paths)[\w.]+)\}", str(text)), f"{app}.{key}"
        if other is None or given.get(key, text) == text or rule_of(name) not in (None, TEXT):
            continue
        if (found := OmegaConf.select(cfg, name)) != (own := OmegaConf.select(cfg, other[1])):
            which = "" if OmegaConf.is_config(own) else f", which is {shown(own)}"
            raise ValueError(f"{name} is {shown(found)}; it must be that of {other[1]}{which}")


def check_names(cfg: DictConfig, app: str) -> None:
    """Checks that no model and no record takes the place of another's."""
    check_option_names(cfg)
    name, method = cfg[app].name, cfg.attention.name if cfg.attention.method else "exact"
    if method != "exact" and not cfg.attention.suffix:
        raise ValueError(f"attention.suffix is ''; models trained with {method} need a name")
    own = {
        "causal": f"causal_{cfg.kernel.name}{cfg.attention.suffix}{cfg.replicate.suffix}",
        "masked": f"masked_{cfg.length.name}{cfg.attention.suffix}{cfg.replicate.suffix}",
    }
    if "model" in cfg:
        known = [own["causal" if is_causal(cfg) else "masked"], Path(cfg.model.checkpoint).name]
    elif app == "train_in_context":
        known = [f"in_context_{cfg.task.name}{cfg.replicate.suffix}"]
    else:
        known = [own[app.removeprefix("train_")]]
    if name not in known and str(name).startswith(OWN_NAMES):
        raise ValueError(
            f"{app}.name is {name}; the model is {known[0]}, and other names that begin with "
            f"{' or '.join(OWN_NAMES)} are those of other models: give one that does not"
        )


def check_option_names(cfg: DictConfig) -> None:
    """Checks that a kernel and a length, which name models, do not bear another's name."""
    file, built = CONF / f"kernel/{cfg.kernel.name}.yaml", cfg.kernel.function._target_
    if file.exists() and OmegaConf.load(file).function._target_ != built:
        raise ValueError(
            f"kernel.name is {cfg.kernel.name}; the kernel is {built.removeprefix(KERNELS)}: give "
            f"kernel={cfg.kernel.name}, or a name that is no other kernel's"
        )
    name, length = cfg.length.name, OmegaConf.to_container(cfg.length)
    other = {f"${{masked.{one}.length}}" for one in ("short", "long") if one != name}
    if name in ("short", "long") and isinstance(length, dict) and length["length"] in other:
        raise ValueError(
            f"length.name is {name}; the length is another: give length={name}, or a name that is "
            f"no other length's"
        )


def check_evaluated(cfg: DictConfig, app: str) -> None:
    """Checks the kernel of the evaluated model, and that the survey's windows hold its picture."""
    causal, task = is_causal(cfg), cfg.model.task
    kernel = cfg.kernel.name if causal else "exponential"
    if cfg.model.kernel != kernel:
        raise ValueError(f"model.kernel is {cfg.model.kernel}; the model's is {kernel}")
    tokens = cfg.survey.picture.tokens if app == "survey" else 0
    if causal and tokens > task.length:  # of a masked model whole sequences are shown
        raise ValueError(
            f"survey.picture.tokens is {tokens}; it must be at most causal.length, which is "
            f"{task.length}"
        )


def is_causal(cfg: DictConfig) -> bool:
    return str(cfg.model.task._target_).endswith(".causal_task")


def check_attention(cfg: DictConfig, app: str) -> None:
    """Checks the method that a model is trained with, or that approximates its attention."""
    if app == "train_causal":
        check_method(cfg, "attention.method", cfg.kernel.function._target_, is_causal=True)
    elif app == "train_masked":  # it takes the kernel of the method
        check_method(cfg, "attention.method", "", is_causal=False)
    elif "model" in cfg:
        causal = is_causal(cfg)
        kernel = cfg.kernel.function._target_ if causal else f"{KERNELS}Exponential"
        check_method(cfg, "approximation", kernel, is_causal=causal)


def check_files(cfg: DictConfig, keys: Sequence[str]) -> None:
    """Checks that there is text at the paths that the user gave; a data set is checked later."""
    for key in keys:
        path = OmegaConf.select(cfg, key)
        if path is not None and not path.startswith("hub:"):
            try:
                next(text_paths(Path(path)))  # the others are looked at when they are read
            except (ValueError, OSError) as error:
                raise ValueError(f"{key} is {shown(path)}; {error}") from None


def check_sizes(cfg: DictConfig) -> None:
    """Checks the sizes of models, and of their windows and sequences."""
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
    """Checks the shares and the sources of the text."""
    held_out, validated = cfg.corpus.evaluation_fraction, cfg.corpus.validation_fraction
    if held_out + validated >= 1:
        raise ValueError(
            f"corpus.validation_fraction is {validated}; together with corpus.evaluation_fraction, "
            f"which is {held_out}, it must be below 1"
        )
    for key in ("causal_sources", "masked_sources"):
        for name in cfg.tokens[key] or ():
            word(*cfg.corpus.sources).check(f"tokens.{key}", name)


def check_shares(cfg: DictConfig, app: str) -> None:
    """Checks that a batch divides into the devices' micro-batches."""
    trainer, batch = cfg.trainer, cfg[app].batches.batch_size
    shares = trainer.devices * trainer.nodes * trainer.accumulate
    if batch % shares:
        raise ValueError(
            f"the batch_size of {cfg[app].name} is {batch}; trainer.devices x trainer.nodes x "
            f"trainer.accumulate, which is {shares}, must divide it"
        )


def check_method(cfg: DictConfig, key: str, kernel: str, *, is_causal: bool) -> None:
    """Checks a method against its card, and its arguments against each other."""
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
    """Raises ValueError for arguments of a method that do not go together."""
    if card.name == "lsh" and method.r % 2:
        raise ValueError(f"{key}.r is {method.r}; it must be even: LSH looks at halves of it")
    if card.name == "fixed" and method.summary > method.stride:
        raise ValueError(
            f"{key}.summary is {method.summary}; it must be at most {key}.stride, which is "
            f"{method.stride}"
        )


def check_use(card: Card, option: str, kernel: str, *, is_causal: bool) -> None:
    """Raises ValueError where a card says that its method does not fit the model."""
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


def check_given(overrides: Sequence[str]) -> None:
    """Raises ValueError for overrides that Hydra would refuse without naming them, or fail at."""
    for given in OverridesParser.create().parse_overrides(list(overrides)):
        key = given.key_or_group
        if given.is_delete() or given.is_sweep_override():
            continue
        value = given.value()
        if key in OF_HYDRA:
            OF_HYDRA[key].check(key, value)
        if key in GROUPS and not (isinstance(value, str) or (key == "corpus" and value)):
            of_cards = [one.name for one in cards().values() if one.train is not None]
            word(*option(key).words, *(of_cards if key == "attention" else ())).check(key, value)


def check_added(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Raises ValueError for a key added with + or ++ that nothing reads.

    Arguments of code may be added, and names where there are names of the user's.
    """
    for given in OverridesParser.create().parse_overrides(list(overrides)):
        key, added = given.key_or_group, given.is_add() or given.is_force_add()
        if added and is_group(given):
            check_added_group(given)
        elif added and key.startswith("hydra."):
            check_key_of_hydra(key)
        elif added:
            check_added_key(cfg, key)


def is_group(given: Override) -> bool:
    return given.package is not None or (CONF / given.key_or_group).is_dir()


def is_added_value(given: Override) -> bool:
    added = given.is_add() or given.is_force_add()
    return added and not is_group(given) and not given.key_or_group.startswith("hydra")


def check_added_group(given: Override) -> None:
    """Raises ValueError for an option that is added where nothing reads it.

    An option may go where users add names, or, if its first line says so, into the whole config.
    """
    group, place = given.key_or_group, given.package
    text = CONF / group / f"{given.value()}.yaml"
    is_global = text.exists() and "@package _global_" in text.read_text(encoding="utf-8")
    if not (is_global if place is None else any(fnmatchcase(place, one) for one in ADDED)):
        raise ValueError(unknown(f"{group}@{place}" if place else f"+{group}"))


def check_key_of_hydra(key: str) -> None:
    """Raises ValueError for a key that Hydra does not have."""
    section: Any = OmegaConf.to_container(OmegaConf.structured(HydraConf))
    for name in key.split(".")[1:]:
        if not isinstance(section, dict) or not section:
            return  # users choose these names, or a plugin its arguments
        if name not in section:
            raise ValueError(unknown(key))
        section = section[name]


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
    """Lists the sections that a key lies in, without the root."""
    names = key.split(".")
    return [OmegaConf.select(cfg, ".".join(names[:end])) for end in range(1, len(names))]


def is_code(section: Any) -> bool:
    """Tells whether a section holds the arguments of a `_target_`."""
    return isinstance(section, (DictConfig, ListConfig, dict)) and "_target_" in section
