"""The values of params.yaml and command lines: which are allowed, checked once they are composed.

A value must be of the type of the one in conf/. `VALUE_RULES` covers params.yaml, and values whose
mistakes would cost hours or change a number silently. Everything else is checked by the object that
receives it. This module imports nothing that takes long.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from value_aware_attention.named_models import named_models

AMBIGUOUS = re.compile(r"[-+]?(0\d+|0[xob]\w+|\d+(_\d+)+|\d+(:\d+)+)|yes|no|on|off", re.IGNORECASE)
OmegaConf.register_new_resolver(
    "named_model", lambda name: named_models()[name]["model"], replace=True
)
CONF_FOLDER = Path(__file__).parents[2] / "conf"
CONFIG_GROUPS = [folder.name for folder in CONF_FOLDER.iterdir() if folder.is_dir()]
PARAMS_FILE = "params.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TARGETS = (
    "value_aware_attention.", "value_aware_study.", "pipelines.app.", "torch.nn.", "torch.optim.",
    "pathlib.Path",
)  # fmt: skip
"""Beginnings of the names that a `_target_` may have, beside modules in the current folder"""


class Rule(NamedTuple):
    """The values that a key may have, in words and as a test."""

    allowed: str
    holds: Callable[[Any], bool]

    def check(self, key: str, value: object) -> None:
        """Raises ValueError for a value that is not allowed."""
        if not self.holds(value):
            raise ValueError(f"{key} is {shown(value)}; it must be {self.allowed}")


def number(
    allowed: str, within: Callable[[float], bool], kinds: tuple[type, ...] = (int, float)
) -> Rule:
    return Rule(allowed, lambda v: type(v) in kinds and abs(v) < math.inf and within(v))


def whole(least: int, most: float = math.inf) -> Rule:
    words = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    return number(f"a whole number {words}", lambda v: least <= v <= most, (int,))


def null_or(rule: Rule) -> Rule:
    return Rule(f"{rule.allowed}, or null", lambda v: v is None or rule.holds(v))


def many(rule: Rule, least: int = 1) -> Rule:
    """Allows lists of different values."""
    words = "different values" if least else "no or different values"
    return Rule(
        f"a list of {words}, each {rule.allowed}",
        lambda v: (
            isinstance(v, list)
            and len(v) >= least
            and all(map(rule.holds, v))
            and len(set(v)) == len(v)
        ),
    )


def word(*words: str) -> Rule:
    return Rule(f"one of {', '.join(words)}", lambda v: v in words)


def option(group: str) -> Rule:
    """Allows the options of a config group, those that a user added included."""
    return word(*sorted(file.stem for file in (CONF_FOLDER / group).glob("*.yaml")))


COUNT, COUNT_OR_ZERO = whole(1), whole(0)
POSITIVE = number("above 0 and at most 1e+18", lambda v: 0 < v <= 1e18)
NOT_NEGATIVE = number("at least 0", lambda v: v >= 0)
SHARE_RULE = number("from 0 to 1", lambda v: 0 <= v <= 1)
BELOW_ONE = number("at least 0 and below 1", lambda v: 0 <= v < 1)
INNER_SHARE = number("between 0 and 1, neither of them", lambda v: 0 < v < 1)
SWITCH = Rule("true or false", lambda v: isinstance(v, bool))
TEXT = Rule("text", lambda v: isinstance(v, str) and bool(v.strip()))
LIST = Rule("a list", lambda v: isinstance(v, list))
KEYS_RULE = Rule(f"{COUNT.allowed} or all", lambda v: v == "all" or COUNT.holds(v))
FOLDER = Rule(
    "a folder, or what can become one: no file, and in none",
    lambda v: (
        TEXT.holds(v)
        and all(path.is_dir() or not path.exists() for path in (Path(v), *Path(v).parents))
    ),
)
PROMPTS = word("running_text", "needles", "recalled_list")
TRAINER = (
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
    "inference_mode",
    "detect_anomaly",
    "sync_batchnorm",
    "profiler",
    "enable_progress_bar",
)
"""The Trainer's arguments that may be added: costs, numerics, and their display.

All others say for how long, on which batches and with which files to train, which `fit` decides."""

RULES_OF_KEYS: dict[tuple[str, ...], Rule] = {
    ("scale",): TEXT,
    ("overrides", "survey.trained"): many(TEXT, 0),
    ("grid.kernel",): many(option("kernel"), 0),
    ("grid.length",): many(option("length")),
    ("grid.replicates",): many(option("replicate"), 0),
    ("grid.pretrained",): many(option("pretrained"), 0),
    ("grid.extent",): many(option("extent"), 0),
    ("grid.*prompts",): many(PROMPTS, 0),
    ("caches.kind",): PROMPTS,
    ("grid.keys",): many(KEYS_RULE),
    ("grid.window_keys",): many(KEYS_RULE, 0),
    ("grid.value_aware_keys", "survey.budgets"): many(COUNT),
    ("grid.random_seeds",): many(COUNT_OR_ZERO),
    ("grid.*_keys", "grid.norms", "grid.lsh_rounds", "grid.orf_features"): many(COUNT, 0),
    ("grid.orf_scaling",): many(TEXT, 0),
    ("caches.keep",): many(SHARE_RULE),
    ("tokens.*_sources",): null_or(many(TEXT)),
    ("tokens.score_first", "tokens.rearrange"): SWITCH,
    ("tokens.vocabulary_size",): whole(261),  # the 256 bytes and 5 tokens with a meaning
    ("tokens.training_characters", "training.*"): COUNT,
    ("causal.length", "masked.*.length", "*.steps"): COUNT,
    ("masked.block",): whole(3),  # two of its tokens say where it starts and ends
    ("*.batch_size",): whole(1, 2**16),  # a slip would fill the memory
    ("*.layers", "*.width", "*.heads", "*.feedforward", "*.recorded_units"): COUNT,
    ("trainer.devices", "trainer.nodes", "trainer.accumulate"): COUNT,
    ("*_units", "*_units.*", "*_instances", "plan.vocabulary.*"): null_or(COUNT),
    ("seed", "*.seed", "*.context", "*.warmup_steps", "*.degree", "caches.skip"): COUNT_OR_ZERO,
    ("masked.fraction", "corpus.evaluation_fraction"): INNER_SHARE,
    ("corpus.validation_fraction", "*.dropout", "*.momentum"): BELOW_ONE,
    ("*.warmup_proportion",): SHARE_RULE,
    ("*.weight_decay", "*.within", "*.max_grad_norm"): NOT_NEGATIVE,
    ("*_rate", "*.lr", "*.eps", "*.memory_gib"): POSITIVE,
    ("trainer.peak_flops", "trainer.gradient_clip_val"): null_or(POSITIVE),
    ("*.betas",): LIST,
    ("masked.warm_start", "probe.name", "probe.tokenizer", "*.text_name"): null_or(TEXT),
    ("*.dtype",): null_or(word("float32", "bfloat16", "float16")),
    ("corpus.path", "probe.model", "probe.text", "*.name", "*.description"): TEXT,
    ("pretrained.model",): TEXT,
    ("paths.*", "*.results", "*.published"): FOLDER,
    ("*.suffix",): Rule("the end of a name", lambda v: isinstance(v, str)),
    ("hydra.job.chdir",): Rule("false: paths are read from here", lambda v: v is False),
}
"""Rules by patterns of keys, `*` for any text; the first that matches holds."""
VALUE_RULES = {pattern: rule for patterns, rule in RULES_OF_KEYS.items() for pattern in patterns}

RULES_OF_TYPES = {bool: SWITCH, float: NOT_NEGATIVE, str: TEXT, list: LIST}
"""Rules of values that `VALUE_RULES` does not name, by the type of the one in conf/"""
ADDED = (
    *("corpus.sources.*", "caches.compared.*", "evaluate.axes.*", "survey.vary.*"),
    *(f"trainer.{name}" for name in TRAINER),
)
"""Patterns of the keys that users may add, beside arguments of code"""
REFERENCE = re.compile(r"\$\{((?!paths\.)\w[\w.]*)\}")
"""A value that is that of another key; the folders of an app are its own"""
MODEL_NAMES = ("causal_", "masked_")
"""Prefixes of the model names that are made of kernel, length and attention."""


@cache
def rule_of(key: str) -> Rule | None:
    """Returns the rule of a key; None where its type is all that is asked for."""
    return next((rule for pattern, rule in VALUE_RULES.items() if fnmatchcase(key, pattern)), None)


def check(cfg: DictConfig, overrides: Sequence[Override], app: str = "") -> list[str]:
    """Raises ValueError for the first value of a composed config that is not allowed.

    Checked are the values of params.yaml, those that overrides give, and every `_target_`. `app` is
    the section in which nothing may be missing. Returns the keys that overrides add to arguments of
    code.
    """
    is_new: dict[str, bool] = {}
    for override in overrides:
        key = str(override.key_or_group)
        if not (is_group(override) or override.is_delete() or key.startswith("hydra.")):
            names = (name for name, _ in leaves(value_of(cfg, key), key))
            is_new |= dict.fromkeys(names, override.is_add() or override.is_force_add())
    check_params(cfg, is_new)
    added = [key for key in is_new if check_given(cfg, key, is_new[key]) and is_new[key]]
    for key, value in leaves(OmegaConf.to_container(cfg[app]), app) if app else ():
        if value == "???":
            raise ValueError(f"{key} is missing: give {key}=<value>")
    context, length = cfg.causal.context, cfg.causal.length
    if context >= length:  # which nothing would refuse before the trained model is evaluated
        raise ValueError(
            f"causal.context is {context}; it must be below causal.length, which is {length}"
        )
    check_targets(OmegaConf.to_container(cfg))
    return added


def check_params(cfg: DictConfig, given: Collection[str]) -> None:
    """Checks the values of params.yaml that are used; none that was edited may be replaced.

    The scale's file replaces values that are not given. Raises ValueError for one that differs from
    git's HEAD; without git, a line on stderr counts those that are replaced.
    """
    params, of_scale = dict(leaves(read_params())), values_of_scale(cfg.scale)
    for key in params.keys() - {"scale", "overrides"}:
        rule = rule_of(key)
        assert rule, "read_params has refused keys without a rule"
        rule.check(key, value_of(cfg, key))
    replaced = [key for key in of_scale.keys() - given if params.get(key) != of_scale[key]]
    file, head = f"conf/scale/{cfg.scale}.yaml", committed(Path.cwd()) if replaced else {}
    if head is None:
        return say_uncompared(file, len(replaced))
    by_command = values_of_scale(params["scale"])  # lists of the scale that was run last
    for key in sorted(replaced):
        if params[key] not in (head.get(key), by_command.get(key, head.get(key))):
            raise ValueError(
                f"{key} is {shown(params[key])} in {PARAMS_FILE}, edited, and scale={cfg.scale} "
                f"sets {shown(of_scale[key])}: edit {file}, or give it on the command line"
            )


@cache
def committed(folder: Path) -> dict[str, object] | None:
    """Returns the values of a folder's params.yaml in git's HEAD by key; None if git has none."""
    from pygit2 import GitError, Repository, discover_repository  # no app at scale=laptop needs it

    try:
        repository = Repository(discover_repository(str(folder)))
        file = (folder / PARAMS_FILE).resolve().relative_to(Path(repository.workdir).resolve())
        blob: Any = repository.revparse_single(f"HEAD:{file.as_posix()}")
    except (KeyError, TypeError, GitError):
        return None
    return dict(leaves(OmegaConf.to_container(OmegaConf.load(StringIO(blob.data.decode())))))


@cache
def say_uncompared(file: str, count: int) -> None:
    """Prints, once, that values of params.yaml are replaced whether they were edited or not."""
    print(
        f"{file} replaces {count} values of {PARAMS_FILE}; without git nobody can tell whether "
        f"they were edited",
        file=sys.stderr,
    )


def check_given(cfg: DictConfig, key: str, is_new: bool) -> bool:
    """Checks a value that was given; returns whether it is an argument of code.

    Raises ValueError for one that its rule or type does not allow, and for a new key that nothing
    reads.
    """
    value, names = value_of(cfg, key), key.split(".")
    parents = [OmegaConf.select(cfg, ".".join(names[:end])) for end in range(1, len(names))]
    of_code = [isinstance(parent, DictConfig) and "_target_" in parent for parent in parents]
    conf, is_argument = written() | written(names[0]), any(of_code)
    for depth in (depth for depth, is_code in enumerate(of_code) if is_code and depth):
        package = ".".join(names[:depth])  # of an option, as causal.optimizer has
        conf |= {f"{package}.{name}": values for name, values in written(names[depth]).items()}
    below = [k for k in (*conf, *dict(leaves(read_params()))) if k.startswith(f"{key}.")]
    if below and not isinstance(value, dict):
        raise ValueError(f"{key} is {shown(value)}; it must hold {', '.join(below[:4])}")
    if rule := rule_of(key):
        rule.check(key, value)
    if key in conf:
        check_written(cfg, key, value, conf[key])
    elif is_new and not is_argument and not any(fnmatchcase(key, pattern) for pattern in ADDED):
        what = f"{key} cannot be added; what can be is {', '.join(TRAINER)}"
        raise ValueError(what if names[0] == "trainer" else unknown(key))
    return is_argument


def check_written(cfg: DictConfig, key: str, value: object, before: Sequence[object]) -> None:
    """Raises ValueError for a value of another type than conf/ has, or for another one's name.

    A record would else say that it is of another scale, kernel or model. Amounts may vary.
    """
    section, _, name = key.rpartition(".")
    first: Any = next((other for other in before if other is not None), value)
    is_made, checkpoint = "${" in str(first), OmegaConf.select(cfg, f"{section}.checkpoint")
    if reference := REFERENCE.fullmatch(str(first)):
        first = value_of(cfg, reference[1])
        if value != first and isinstance(first, (str, dict)):
            which = f", which is {first}" if isinstance(first, str) else ""
            raise ValueError(f"{key} is {shown(value)}; it must be that of {reference[1]}{which}")
    elif name == "name" and (
        (CONF_FOLDER / section / f"{value}.yaml").exists()
        or (is_made and str(value).startswith(MODEL_NAMES) and Path(str(checkpoint)).name != value)
    ):
        raise ValueError(
            f"{key} is {value}; that is another option's or model's: choose that one, or give a "
            f"name that is no other's"
        )
    if repr(value) not in map(repr, before) and "${" not in str(first) and not rule_of(key):
        rule = whole(min(first, 1)) if type(first) is int else RULES_OF_TYPES.get(type(first))
        if rule:
            rule.check(key, value)


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
        VALUE_RULES[key].check(key, value)
    elif key in CONFIG_GROUPS and not isinstance(value, (str, list) if key == "corpus" else str):
        raise ValueError(f"{key} is {shown(value)}; it must be the name of an option")


def is_group(override: Override) -> bool:
    return override.package is not None or str(override.key_or_group) in CONFIG_GROUPS


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


def value_of(cfg: DictConfig, key: str) -> Any:
    """Returns the value of a key, sections and lists as Python's; interpolations are followed."""
    try:
        value = OmegaConf.select(cfg, key)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{key} cannot be read: {reason}") from None


def leaves(content: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key that has no keys below it, with its value."""
    if isinstance(content, dict) and (content or not key):
        for name, value in content.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, content


def read_params() -> dict[str, Any]:
    """Reads params.yaml; ValueError where it is missing, no YAML, or has an unknown key."""
    try:
        return params_of(Path(PARAMS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"no {PARAMS_FILE} in the current folder; run from the repository's root"
        ) from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{PARAMS_FILE} cannot be read: {error}") from None


@cache
def params_of(text: str) -> dict[str, Any]:
    """Parses and checks the text of params.yaml, which every composition asks for."""
    check_plain(text)
    content: Any = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    if not content or not isinstance(content, dict):
        raise ValueError(f"{PARAMS_FILE} cannot be read: it is empty, or no keys with values")
    values = dict(leaves(content))
    for key in ("scale", "overrides"):
        VALUE_RULES[key].check(f"{PARAMS_FILE}: {key}", values.pop(key, None))
    scales = (values_of_scale(file.stem) for file in CONF_FOLDER.glob("scale/*.yaml"))
    if lacking := set().union(*scales) - values.keys():
        raise ValueError(f"{PARAMS_FILE} lacks {', '.join(sorted(lacking))}")
    for key, value in values.items():
        if not rule_of(key) or key in written() | written(key.partition(".")[0]):
            raise ValueError(f"{PARAMS_FILE}: {unknown(key)}")
        if "${" in str(value):  # DVC would paste it into a command line
            raise ValueError(f"{PARAMS_FILE}: {key} is {shown(value)}; it must be a plain value")
    return content


def check_plain(text: str) -> None:
    """Raises ValueError for a number or a switch that DVC and Hydra read as different values.

    12:30 is 750 to one of them, 017 is 15, and `on` is true. So does an alias, of which a few
    lines can stand for more than a machine holds.
    """
    for token in yaml.scan(text):
        alias = f"the alias *{token.value}" if isinstance(token, yaml.AliasToken) else ""
        is_plain = isinstance(token, yaml.ScalarToken) and token.plain
        if alias or (is_plain and AMBIGUOUS.fullmatch(token.value)):
            raise ValueError(
                f"{PARAMS_FILE}: line {token.start_mark.line + 1} has {alias or token.value}; "
                f"write the value itself, in plain digits, or true or false"
            )


@cache
def values_of_scale(scale: str) -> dict[str, object]:
    """Returns the values that conf/scale/<scale>.yaml sets, by key; none for scale laptop."""
    file = CONF_FOLDER / "scale" / f"{scale}.yaml"
    content = OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {}
    return {key: value for key, value in leaves(content) if key not in ("defaults", "scale")}


@cache
def written(group: str = "") -> dict[str, list[object]]:
    """Reads the keys of conf/*.yaml, or of a group's options, with their values as written."""
    values: dict[str, list[object]] = {}
    for file in sorted((CONF_FOLDER / group).glob("*.yaml")):
        content = yaml.load(file.read_text(encoding="utf-8"), LOADER)
        for key, value in leaves(content, group if group != "scale" else ""):
            values.setdefault(key, []).append(value)
    return values


def unknown(key: str, keys: Iterable[str] | None = None) -> str:
    """Words the refusal of a key that nothing reads, with the keys that may have been meant."""
    groups = ("scale", "", *CONFIG_GROUPS)
    keys = [*(keys or ())] or [*CONFIG_GROUPS, *(key for group in groups for key in written(group))]
    names = {other: other.rpartition(".")[2] for other in keys}
    near = get_close_matches(key, keys, n=1, cutoff=0.8)
    if not near:  # the right name in the wrong place, or without one
        meant = get_close_matches(key.rpartition(".")[2], names.values(), n=1, cutoff=0.75)
        near = [other for other in keys if names[other] in meant][:3]
    hint, group = asked([other for other in near if other != key]), key.partition(".")[0]
    if not hint and group in CONFIG_GROUPS:
        hint = f"; another option of {group} may have it: choose one first, {group}=<option>"
    return f"{key} is no key that is read here{hint}"


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
