"""The values of params.yaml and conf/: which are allowed, checked as soon as a config is composed.

A value that somebody gives must have the type of the shipped one. `RULES` says more about those of
which a wrong one would cost hours of work, or change a number unnoticed; every other is refused by
what is built of it. This module imports nothing that takes long.
"""

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from yaml import YAMLError

from value_aware_attention.texts import text_paths
from value_aware_study.cards import cards

AMBIGUOUS = re.compile(r"[-+]?(0\d+|0[xob]\w+|\d+(_\d+)+|\d+(:\d+)+)|yes|no|on|off", re.IGNORECASE)
CONF = Path(__file__).parents[2] / "conf"
GROUPS = [folder.name for folder in CONF.iterdir() if folder.is_dir()]
PARAMS_FILE = "params.yaml"
TARGETS = (
    "value_aware_attention.", "value_aware_study.", "pipelines.app.", "torch.nn.", "torch.optim.",
    "pathlib.Path",
)  # fmt: skip
"""Beginnings of the names that a `_target_` may have, beside modules in the current folder"""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The values that a key may have, in words and as a test.

    `words` are suggested for misspelt ones. With `different`, no value of a list comes twice.
    """

    allowed: str
    holds: Callable[[Any], bool]
    words: tuple[str, ...] = ()
    different: bool = False

    def check(self, key: str, value: object) -> None:
        """Raises ValueError for a value that is not allowed."""
        values = value if isinstance(value, list) else [value]
        if not self.holds(value):
            near = [word for text in values for word in near_words(text, self.words)]
            raise ValueError(f"{key} is {shown(value)}; it must be {self.allowed}{asked(near)}")
        if self.different and len(set(values)) < len(values):
            raise ValueError(f"{key} is {shown(value)}; it must be a list of different values")


def number(
    allowed: str, within: Callable[[float], bool], kinds: tuple[type, ...] = (int, float)
) -> Rule:
    def holds(value: Any) -> bool:
        return type(value) in kinds and abs(value) < math.inf and within(value)

    return Rule(allowed=allowed, holds=holds)


def whole(least: int, most: float = math.inf) -> Rule:
    upper = "" if most == math.inf else f" and at most {most}"
    allowed = f"a whole number of at least {least}{upper}"
    return number(allowed, lambda value: least <= value <= most, kinds=(int,))


def word(*words: str) -> Rule:
    return Rule(allowed=f"one of {', '.join(words)}", holds=lambda v: v in words, words=words)


def option(*groups: str) -> Rule:
    """Allows the options of config groups, those that a user added included."""
    return word(*sorted({file.stem for group in groups for file in (CONF / group).glob("*.yaml")}))


def null_or(rule: Rule) -> Rule:
    allowed = f"{rule.allowed}, or null"
    return replace(rule, allowed=allowed, holds=lambda v: v is None or rule.holds(v))


def many(rule: Rule, least: int = 1) -> Rule:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and len(value) >= least and all(map(rule.holds, value))

    allowed = f"a list{' with something in it' if least else ''}, each {rule.allowed}"
    return replace(rule, allowed=allowed, holds=holds, different=True)


COUNT, COUNT_OR_ZERO, COUNT_OR_NULL = whole(1), whole(0), null_or(whole(1))
LAYERS, BATCH, WIDTH = whole(1, 1000), whole(1, 2**16), whole(1, 2**20)
LENGTH, STEPS = whole(1, 2**24), whole(1, 10**9)
"""Limits above what any machine takes, so that a slip of the keyboard costs no day of work."""
SEED = whole(0, 2**32 - 1)  # what numpy takes
POSITIVE = number("above 0 and at most 1e+15", lambda v: 0 < v <= 1e15)
RATE = number("above 0 and at most 1000", lambda v: 0 < v <= 1000)  # of learning
SPEED = number("above 0 and at most 1e+24", lambda v: 0 < v <= 1e24)  # operations a second
NOT_NEGATIVE = number("at least 0", lambda v: v >= 0)
SHARE = number("from 0 to 1", lambda v: 0 <= v <= 1)
INNER_SHARE = number("between 0 and 1, neither of them", lambda v: 0 < v < 1)
BELOW_ONE = number("at least 0 and below 1", lambda v: 0 <= v < 1)
SWITCH = Rule(allowed="true or false", holds=lambda v: isinstance(v, bool))
TEXT = Rule(allowed="text", holds=lambda v: isinstance(v, str) and bool(v.strip()))
LIST = Rule(allowed="a list", holds=lambda v: isinstance(v, list))
COUNTS, ANY_COUNTS = many(COUNT), many(COUNT, least=0)
KEYS = Rule(
    allowed=f"{COUNT.allowed} or all", holds=lambda v: v == "all" or COUNT.holds(v), words=("all",)
)
CODE = Rule(
    allowed="a list, each {_target_: ...} with arguments",
    holds=lambda v: isinstance(v, list) and all(map(is_code, v)),
)
FOLDER = Rule(
    allowed="a folder, or what can become one: no file, and in none",
    holds=lambda v: (
        TEXT.holds(v)
        and all(path.is_dir() or not path.exists() for path in (Path(v), *Path(v).parents))
    ),
)
PROMPTS = word("running_text", "needles", "recalled_list")
DTYPES = "float32", "bfloat16", "float16"

TRAINER = {
    "gradient_clip_val": null_or(POSITIVE),
    "gradient_clip_algorithm": null_or(word("norm", "value")),
    "deterministic": Rule(
        allowed="true or false or warn, or null", holds=lambda v: v in (True, False, "warn", None)
    ),
    "benchmark": null_or(SWITCH),
    "inference_mode": SWITCH,
    "detect_anomaly": SWITCH,
    "sync_batchnorm": SWITCH,
    "profiler": null_or(word("simple", "advanced", "pytorch", "xla")),
    "enable_progress_bar": SWITCH,
}
"""Rules of the Trainer's arguments that may be added: costs, numerics, and their display.

All others say for how long, on which batches and with which files to train, which `fit` decides."""

RULES = {
    "evaluate.axes.*": LIST,
    "scale": option("scale"),
    "overrides": many(TEXT, least=0),
    "grid.kernel": many(option("kernel"), least=0),
    "grid.length": many(option("length")),
    "grid.replicates": many(option("replicate"), least=0),
    "grid.pretrained": many(option("pretrained"), least=0),
    "grid.extent": many(option("extent"), least=0),
    "grid.*prompts": many(PROMPTS, least=0),
    "survey.trained": many(option("attention", "approximation"), least=0),
    "grid.keys": many(KEYS),
    "grid.window_keys": many(KEYS, least=0),
    "*.value_aware_keys": COUNTS,
    "*_keys": ANY_COUNTS,
    "*.lsh_rounds": ANY_COUNTS,
    "*.orf_features": ANY_COUNTS,
    "grid.norms": many(replace(whole(1, 2), allowed="1 or 2"), least=0),
    "paths.*": FOLDER,
    "*.results": FOLDER,
    "publish.seeds": FOLDER,
    "*seeds": many(SEED),
    "*seed": SEED,
    "*.budgets": COUNTS,
    "probe.sizes": null_or(COUNTS),
    "*method*.length": COUNT_OR_NULL,
    "approximation.length": COUNT_OR_NULL,
    "*.iterations": COUNT_OR_NULL,
    "probe.length": COUNT_OR_NULL,
    "caches.skip": COUNT_OR_ZERO,
    "caches.kind": PROMPTS,
    "caches.keep": many(number("above 0 and at most 1", lambda v: 0 < v <= 1)),
    "*.length": LENGTH,
    "probe.windows": COUNT_OR_NULL,
    "*.recorded_units": COUNT,
    "*_units*": COUNT_OR_NULL,
    "*_instances": COUNT_OR_NULL,
    "plan.vocabulary.*": COUNT_OR_NULL,
    "*.vocabulary_size": whole(261, 2**24),  # the 256 bytes and 5 tokens with a meaning
    "tokens.*_sources": null_or(many(TEXT)),
    "*.validation_fraction": BELOW_ONE,
    "*fraction": INNER_SHARE,
    "*.dropout": BELOW_ONE,
    "*.momentum": BELOW_ONE,
    "*.betas": Rule(
        allowed="two numbers, each at least 0 and below 1",
        holds=lambda v: isinstance(v, list) and len(v) == 2 and all(map(BELOW_ONE.holds, v)),
    ),
    "*.layers": LAYERS,
    "*.width": WIDTH,
    "*heads": WIDTH,
    "*.feedforward": WIDTH,
    "*.batch_size": BATCH,
    "trainer.devices": BATCH,
    "trainer.nodes": BATCH,
    "trainer.accumulate": BATCH,
    "trainer.workers": whole(0, 1024),
    "trainer.peak_flops": null_or(SPEED),
    "plan.operations_per_second": SPEED,
    "*.warmup_steps": COUNT_OR_ZERO,
    "*.steps": STEPS,
    "*_rate": RATE,
    "*.lr": RATE,
    "*.eps": RATE,
    "*.weight_decay": number("at least 0 and at most 1000", lambda v: 0 <= v <= 1000),
    "*.max_grad_norm": NOT_NEGATIVE,
    "*.warmup_proportion": SHARE,
    "*.context": COUNT_OR_ZERO,
    "*.degree": COUNT_OR_ZERO,
    "masked.block": whole(3, 2**24),  # two of its tokens say where it starts and ends
    "*.memory_gib": number("above 0 and at most 1048576", lambda v: 0 < v <= 2**20),  # a pebibyte
    "*.within": NOT_NEGATIVE,
    "*.dtype": null_or(word(*DTYPES)),
    "logger.mode": word("online", "offline", "shared", "disabled", "dryrun", "run"),
    "probe.kernels": CODE,
    **{f"trainer.{name}": rule for name, rule in TRAINER.items()},
    "hydra.job.chdir": Rule(allowed="false: paths are read from here", holds=lambda v: not v),
    "*.suffix": Rule(allowed="the end of a name", holds=lambda v: isinstance(v, str)),
}
"""Rules by patterns of keys, `*` for any text; the first that matches holds."""

TOGETHER: tuple[tuple[str, str, Callable[[Any, Any], bool], str], ...] = (
    *(
        (
            f"{model}.width",
            f"{model}.heads",
            lambda width, heads: width % heads == 0,
            "{}, must divide it",
        )
        for model in ("causal", "masked")
    ),
    ("causal.context", "causal.length", operator.lt, "it must be below {}"),
    ("masked.block", "masked.long.length", operator.le, "it must be at most {}"),
    (
        "corpus.validation_fraction",
        "corpus.evaluation_fraction",
        lambda validation, evaluation: validation + evaluation < 1,
        "together with {}, it must be below 1",
    ),
)
"""Two keys, whether their values go together, and what is allowed, with {} for the second one"""

RULES_OF_TYPES = {
    bool: SWITCH,
    float: NOT_NEGATIVE,
    str: TEXT,
    list: LIST,
    dict: Rule(allowed="keys with values", holds=lambda v: isinstance(v, dict)),
    type(None): null_or(TEXT),
}
"""Rules of values that `RULES` does not name, by the type of the shipped one."""
ADDED = (
    *("trainer.*", "corpus.sources.*", "*.texts.*", "*.methods.*"),
    *("caches.compared.*", "evaluate.axes.*", "survey.vary.*"),
)
"""Patterns of the keys that users may add, by names of their own."""
REFERENCE = re.compile(r"\$\{((?!paths\.)\w[\w.]*)\}")
"""A value that is that of another key; the folders of an app are its own"""
MODEL_NAMES = ("causal_", "masked_")
"""Prefixes of the model names that are made of kernel, length and attention."""


@cache
def rule_of(key: str) -> Rule | None:
    """Returns the rule of a key; None where its type is all that is asked for."""
    return next((rule for pattern, rule in RULES.items() if fnmatchcase(key, pattern)), None)


def rule_of_type(shipped: object) -> Rule:
    """Returns the rule of a value that has none: to be of the type of the shipped one."""
    if type(shipped) is int:
        return whole(min(shipped, 1))
    if isinstance(shipped, list) and shipped:
        return replace(many(rule_of_type(shipped[0]), least=0), different=False)
    return RULES_OF_TYPES[type(shipped)]


def check(cfg: DictConfig, shipped: DictConfig, app: str = "") -> list[str]:
    """Raises ValueError for the first value of a composed config that is not allowed.

    `shipped` has the same options and none of the given values. `app` is the section in which
    nothing may be missing. Returns the keys that were added to arguments of code.
    """
    before = dict(leaves(OmegaConf.to_container(shipped)))
    values = leaves(OmegaConf.to_container(cfg), before)
    after = {key: value for key, value in values if not key.startswith("hydra.")}
    added = [key for key in after if key not in before]
    for key in sorted(after, key=lambda key: "${" in str(after[key])):  # last what reads others
        if after[key] == "???":
            if key.startswith(f"{app}."):
                raise ValueError(f"{key} is missing: give {key}=<value>")
        elif key in added:
            check_added(cfg, key, after[key], before)
        else:
            check_value(cfg, shipped, key, before[key], after[key])
    check_targets(OmegaConf.to_container(cfg))
    check_together(cfg)
    check_files(cfg, app)
    return [key for key in added if is_code(OmegaConf.select(cfg, key.rpartition(".")[0]))]


def check_value(
    cfg: DictConfig, shipped: DictConfig, key: str, before: object, now: object
) -> None:
    """Raises ValueError for a value of a shipped key that its rule or type does not allow."""
    changed = repr(before) != repr(now)  # 1 is no true
    if not changed and key not in values_of_scale("laptop"):
        return
    try:
        value = plain_value(cfg, key)
        of_type = before if before == "???" else plain_value(shipped, key)
        (rule_of(key) or rule_of_type(of_type)).check(key, value)
    except InterpolationToMissingValueError:
        return  # of another app's section
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{key} is {now}, which cannot be read: {reason}") from None
    if changed:
        check_replaced(cfg, key, before, value)


def check_replaced(cfg: DictConfig, key: str, before: object, value: object) -> None:
    """Raises ValueError for text in place of another key's value, or for another one's name.

    A record would else say that it is of another scale, kernel or model. Amounts may vary.
    """
    section, _, name = key.rpartition(".")
    checkpoint = Path(str(OmegaConf.select(cfg, f"{section}.checkpoint"))).name
    if reference := REFERENCE.fullmatch(str(before)):
        other = plain_value(cfg, reference[1])
        if value != other and isinstance(other, (str, dict)):
            which = f", which is {shown(other)}" if isinstance(other, str) else ""
            raise ValueError(f"{key} is {shown(value)}; it must be that of {reference[1]}{which}")
    elif name == "name" and value == checkpoint:
        return  # of another model, by the name of its folder
    elif name == "name" and "${" in str(before) and str(value).startswith(MODEL_NAMES):
        raise ValueError(
            f"{key} is {value}; names that begin with {' or '.join(MODEL_NAMES)} are made of the "
            f"options of a model: give one that does not"
        )
    elif name == "name" and (CONF / section / f"{value}.yaml").exists():
        raise ValueError(
            f"{key} is {value}; that is another option: give {section}={value}, or a name that is "
            f"no other's"
        )


def check_added(cfg: DictConfig, key: str, value: object, shipped: Mapping[str, object]) -> None:
    """Raises ValueError for a key that is new and that nothing reads.

    Arguments of code may be added, and names where there are names of the user's.
    """
    if below := [other for other in shipped if other.startswith(f"{key}.")]:
        raise ValueError(f"{key} is {shown(value)}; it must hold {', '.join(below[:4])}")
    names = key.split(".")
    if rule := rule_of(key):
        rule.check(key, value)
    elif names[0] == "trainer":
        raise ValueError(
            f"{key} cannot be added: a training takes all of its steps on all of its batches, and "
            f"evaluates as training.evaluate_every says; what can be added is "
            f"{', '.join(TRAINER)}{asked(near_words(names[-1], TRAINER))}"
        )
    parents = [OmegaConf.select(cfg, ".".join(names[:end])) for end in range(1, len(names))]
    if any(map(is_code, parents)):
        return
    if fnmatchcase(key, "*.methods.*") and len(names) == 3:
        raise ValueError(f"{key} is {shown(value)}; it must be {{_target_: ...}} with arguments")
    if not any(fnmatchcase(key, pattern) for pattern in ADDED):
        raise ValueError(unknown(key))


def check_targets(content: object, key: str = "") -> None:
    """Raises ValueError for a `_target_`, at any depth, that runs code of neither us nor the user.

    The user's own modules lie in the current folder. Hydra 1.3 itself knows only a list of what it
    refuses, and 1.5 will want one of what is allowed.
    """
    if isinstance(content, list):
        content = dict(enumerate(content))
    for name, entry in content.items() if isinstance(content, dict) else ():
        below = f"{key}.{name}" if key else str(name)
        if name == "_target_" and not is_allowed(str(entry)):
            raise ValueError(
                f"{below} is {shown(entry)}; it must begin with {', '.join(TARGETS)} or a module "
                f"in the current folder"
            )
        if below != "hydra":  # its own sweeper, launcher and callbacks
            check_targets(entry, below)


def is_allowed(target: str) -> bool:
    """Tells whether a config may call a target: one of `TARGETS`, or of the current folder."""
    module = target.partition(".")[0]
    return target.startswith(TARGETS) or Path(f"{module}.py").is_file() or Path(module).is_dir()


def check_together(cfg: DictConfig) -> None:
    """Raises ValueError for values that do not go together, which only hours later would show."""
    for key, other, holds, allowed in TOGETHER:
        first, second = OmegaConf.select(cfg, key), OmegaConf.select(cfg, other)
        if not holds(first, second):
            rule = allowed.format(f"{other}, which is {second}")
            raise ValueError(f"{key} is {first}; {rule}")


def check_files(cfg: DictConfig, app: str) -> None:
    """Checks that there is text at the paths that an app reads; a data set is checked later."""
    files = {"corpus": ("corpus.path", "corpus.evaluation_path"), "probe": ("probe.text",)}
    for key in files.get(app, ()):
        path = OmegaConf.select(cfg, key)
        if path is not None and not path.startswith("hub:"):
            try:
                next(text_paths(Path(path)))  # the others are looked at when they are read
            except (ValueError, OSError) as error:
                raise ValueError(f"{key} is {shown(path)}; {error}") from None


def check_override(override: Override) -> None:
    """Raises ValueError for an override that Hydra takes, and fails at without naming it."""
    key = str(override.key_or_group)
    if key.startswith("hydra.sweeper.params"):
        raise ValueError(
            f"{key} is read from a config file alone; on the command line each key has its values, "
            f"as in -m approximation.r=1,4"
        )
    if override.is_delete() or override.is_sweep_override():
        return
    value = override.value()
    if key == "hydra.job.chdir":
        RULES[key].check(key, value)
    elif key in GROUPS and not isinstance(value, (str, list) if key == "corpus" else str):
        trained = [card.name for card in cards().values() if card.train is not None]
        names = option(key).words + (tuple(trained) if key == "attention" else ())
        word(*names).check(key, value)


def is_group(override: Override) -> bool:
    return override.package is not None or str(override.key_or_group) in GROUPS


def with_group(overrides: Sequence[Override]) -> list[str]:
    """Writes overrides as they were given, those of keys of a swept group with ++ before them.

    Hydra composes once without all that is swept, and every job before the first one runs. It would
    end the sweep for a key that the default option or one of the swept ones lacks.
    """
    groups = tuple(
        f"{override.package or override.key_or_group}."
        for override in overrides
        if is_group(override) and override.is_sweep_override()
    )
    return [
        f"++{str(override.input_line).lstrip('+')}"
        if str(override.key_or_group).startswith(groups) and not override.is_delete()
        else str(override.input_line)
        for override in overrides
    ]


def is_code(section: object) -> bool:
    """Tells whether a section holds the arguments of a `_target_`."""
    return isinstance(section, (DictConfig, dict)) and "_target_" in section


def plain_value(cfg: DictConfig, key: str) -> object:
    """Returns the value of a key, sections and lists as Python's; interpolations are followed."""
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def leaves(
    content: object, shipped: Mapping[str, object] | None = None, key: str = ""
) -> Iterator[tuple[str, object]]:
    """Yields every key that has no keys below it, or is one of `shipped`, with its value."""
    if isinstance(content, dict) and content and key not in (shipped or ()):
        for name, value in content.items():
            yield from leaves(value, shipped, f"{key}.{name}" if key else str(name))
    else:
        yield key, content


def read_params() -> dict[str, Any]:
    """Reads params.yaml; ValueError where it is missing, no YAML, or has other keys."""
    try:
        return params_of(Path(PARAMS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"no {PARAMS_FILE} in the current folder; run from the repository's root"
        ) from None
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{PARAMS_FILE} cannot be read: {error}") from None


def edited_params() -> dict[str, object]:
    """Returns the values of params.yaml that were edited, by their keys.

    An edited value differs from the shipped one, which conf/scale/laptop.yaml holds, and from the
    one that the scale of params.yaml sets. Raises ValueError for one that is not allowed.
    """
    shipped, params = values_of_scale("laptop"), read_params()
    values = dict(leaves(params, shipped))
    of_scale = shipped | values_of_scale(str(params["scale"]))
    for key, value in shipped.items():
        (rule_of(key) or rule_of_type(value)).check(key, values[key])
    return {key: values[key] for key in shipped if values[key] not in (shipped[key], of_scale[key])}


@cache
def values_of_scale(scale: str) -> dict[str, object]:
    """Returns the values that a scale sets by their keys; none for a scale that is not in conf/."""
    file = CONF / "scale" / f"{scale}.yaml"
    content = OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {}
    return {key: value for key, value in leaves(content) if key not in ("defaults", "scale")}


@cache
def params_of(text: str) -> dict[str, Any]:
    """Parses and checks the text of params.yaml, which every composition asks for."""
    check_plain(text)
    content = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    if not content or not isinstance(content, dict):
        raise ValueError(f"{PARAMS_FILE} cannot be read: it is empty, or no keys with values")
    shipped = {"scale", "overrides", *values_of_scale("laptop")}
    values = dict(leaves(content, dict.fromkeys(shipped)))
    for key, value in values.items():
        if key not in shipped:
            raise ValueError(f"{PARAMS_FILE}: {unknown(key, shipped)}")
        if "${" in str(value):  # DVC would paste it into a command line
            raise ValueError(f"{PARAMS_FILE}: {key} is {shown(value)}; it must be a plain value")
    if lacking := sorted(shipped - set(values)):
        raise ValueError(f"{PARAMS_FILE} lacks {', '.join(lacking)}")
    for key in ("scale", "overrides"):
        RULES[key].check(key, values[key])
    return {str(key): value for key, value in content.items()}


def check_plain(text: str) -> None:
    """Raises ValueError for a number or a switch that DVC and Hydra read as different values.

    12:30 is 750 to one of them, 017 is 15, and `on` is true. So does an alias, of which a few
    lines can stand for more than a machine holds.
    """
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise ValueError(
                f"{PARAMS_FILE}: line {token.start_mark.line + 1} has the alias *{token.value}; "
                f"write the value itself"
            )
        if isinstance(token, yaml.ScalarToken) and token.plain and AMBIGUOUS.fullmatch(token.value):
            raise ValueError(
                f"{PARAMS_FILE}: line {token.start_mark.line + 1} has {token.value}, which is read "
                f"in two ways; write plain digits, true or false"
            )


def unknown(key: str, keys: Iterable[str] | None = None) -> str:
    """Words the refusal of a key that nothing reads, with the keys that may have been meant."""
    keys = [*(keys or all_keys())]
    names = {other: other.rpartition(".")[2] for other in keys}
    near = get_close_matches(key, keys, n=1, cutoff=0.8)
    if not near:  # the right name in the wrong place, or without one
        meant = get_close_matches(key.rpartition(".")[2], names.values(), n=1, cutoff=0.75)
        near = [other for other in keys if names[other] in meant][:3]
    typed, group = key if key == key.strip() else repr(key), key.partition(".")[0]
    hint = asked([other for other in near if other != key])
    if not hint and group in GROUPS:
        hint = f"; another option of {group} may have it: choose one first, {group}=<option>"
    return f"{typed} is no key that is read here{hint}"


def all_keys() -> list[str]:
    """Lists what a command line may give: keys of params.yaml, of the apps, and of the options."""
    keys = ["scale", *GROUPS, *values_of_scale("laptop")]
    for file in CONF.glob("*.yaml"):
        keys += [key for key, _ in leaves(OmegaConf.to_container(OmegaConf.load(file)))]
    for file in CONF.glob("*/*.yaml"):
        keys += [f"{file.parent.name}.{name!s}" for name in OmegaConf.load(file)]
    return list(dict.fromkeys(keys))


def near_words(text: object, words: Iterable[str]) -> list[str]:
    """Returns the word that a misspelt one may have meant, or none."""
    misspelt = isinstance(text, str) and text not in words
    return get_close_matches(str(text), words, n=1) if misspelt else []


def asked(near: list[str]) -> str:
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


def shown(value: object) -> str:
    """Writes a value as it is typed, in quotes where it could be taken for another type."""
    if isinstance(value, str) and (not value[:1].isalpha() or value in ("true", "false", "null")):
        return repr(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
