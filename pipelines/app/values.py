"""Defines the allowed values of params.yaml and command lines; checks them after composing.

A value must be of the type of the one in conf/. `VALUE_RULES` covers params.yaml, and values whose
mistakes would cost hours or change a number silently. Everything else is checked by the object that
receives it. This module imports nothing slow.
"""

import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.app.method_cards import check_targets

AMBIGUOUS = re.compile(r"[-+]?(0\d+|0[xob]\w+|\d+(_\d+)+|\d+(:\d+)+)|yes|no|on|off", re.IGNORECASE)
CONF_FOLDER = Path(__file__).parents[2] / "conf"
CONFIG_GROUPS = [folder.name for folder in CONF_FOLDER.iterdir() if folder.is_dir()]
PARAMS_FILE = "params.yaml"


class Rule(NamedTuple):
    """The values that a key may have, in words and as a test."""

    allowed: str
    holds: Callable[[Any], bool]

    def check(self, key: str, value: object) -> None:
        """Raises ValueError for a value that is not allowed."""
        if not self.holds(value):
            raise ValueError(f"{key} is {shown(value)}; it must be {self.allowed}")


def number(allowed: str, within: Callable[[float], bool]) -> Rule:
    return Rule(allowed, lambda v: type(v) in (int, float) and abs(v) < math.inf and within(v))


def whole(least: int, most: float = math.inf) -> Rule:
    words = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    return Rule(f"a whole number {words}", lambda v: type(v) is int and least <= v <= most)


def null_or(rule: Rule) -> Rule:
    return Rule(f"{rule.allowed}, or null", lambda v: v is None or rule.holds(v))


def many(rule: Rule, least: int = 1) -> Rule:
    """Allows lists of different values."""
    return Rule(
        f"a list of {'' if least else 'no or '}different values, each {rule.allowed}",
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
    """Allows the options of a config group, including those that a user added."""
    return word(*sorted(file.stem for file in (CONF_FOLDER / group).glob("*.yaml")))


COUNT, COUNT_OR_ZERO = whole(1), whole(0)
POSITIVE = number("above 0 and at most 1e+18", lambda v: 0 < v <= 1e18)
NOT_NEGATIVE = number("at least 0", lambda v: v >= 0)
SHARE_RULE = number("from 0 to 1", lambda v: 0 <= v <= 1)
SWITCH = Rule("true or false", lambda v: isinstance(v, bool))
TEXT = Rule("text", lambda v: isinstance(v, str) and bool(v.strip()))
KEYS_RULE = Rule(f"{COUNT.allowed} or all", lambda v: v == "all" or COUNT.holds(v))
PROMPTS = word("running_text", "needles", "recalled_list")
ANYTHING = Rule("anything", lambda v: True)
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

All others determine length, batches and files of the training; `fit` sets them."""

VALUE_RULES = {
    pattern: rule
    for patterns, rule in {
        ("scale",): TEXT,
        ("overrides", "survey.trained", "grid.orf_scaling"): many(TEXT, 0),
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
        ("caches.keep",): many(SHARE_RULE),
        ("tokens.*_sources",): null_or(many(TEXT)),
        ("tokens.score_first", "tokens.rearrange"): SWITCH,
        ("tokens.vocabulary_size",): whole(261),  # the 256 bytes and 5 tokens with a meaning
        ("tokens.training_characters", "training.*"): COUNT,
        ("causal.length", "masked.*.length", "*.steps"): COUNT,
        ("masked.block",): whole(3),  # two of its tokens say where it starts and ends
        ("*.batch_size",): whole(1, 2**16),  # a typing error would fill the memory
        ("*.layers", "*.width", "*.heads", "*.feedforward", "*.recorded_units"): COUNT,
        ("trainer.devices", "trainer.nodes", "trainer.accumulate"): COUNT,
        ("*_units", "*_units.*", "*_instances", "plan.vocabulary.*"): null_or(COUNT),
        ("seed", "*.seed", "*.context", "*.warmup_steps", "*.degree", "caches.skip"): COUNT_OR_ZERO,
        ("masked.fraction", "corpus.evaluation_fraction"): number(
            "between 0 and 1, neither of them", lambda v: 0 < v < 1
        ),
        ("corpus.validation_fraction", "*.dropout", "*.momentum"): number(
            "at least 0 and below 1", lambda v: 0 <= v < 1
        ),
        ("*.warmup_proportion",): SHARE_RULE,
        ("*.weight_decay", "*.within", "*.max_grad_norm"): NOT_NEGATIVE,
        ("*_rate", "*.lr", "*.eps", "*.memory_gib"): POSITIVE,
        ("trainer.peak_flops", "trainer.gradient_clip_val"): null_or(POSITIVE),
        ("masked.warm_start", "probe.name", "probe.tokenizer", "*.text_name"): null_or(TEXT),
        ("*.dtype",): null_or(word("float32", "bfloat16", "float16")),
        ("corpus.path", "probe.model", "probe.text", "*.name", "*.description"): TEXT,
        ("pretrained.model",): TEXT,
        ("paths.*", "*.results", "*.published"): Rule(
            "a folder, or what can become one: no file, and in none",
            lambda v: (
                TEXT.holds(v)
                and all(path.is_dir() or not path.exists() for path in (Path(v), *Path(v).parents))
            ),
        ),
        ("*.suffix",): Rule("the end of a name", lambda v: isinstance(v, str)),
        ("hydra.job.chdir",): Rule("false: paths are read from here", lambda v: v is False),
    }.items()
    for pattern in patterns
}
"""Rules by patterns of keys, `*` for any text; the first that matches holds."""
ADDED = (
    *("corpus.sources.*", "caches.compared.*", "evaluate.axes.*", "survey.vary.*"),
    *(f"trainer.{name}" for name in TRAINER),
)


@cache
def rule_of(key: str) -> Rule:
    """Returns the rule of a key; `ANYTHING` if only its type is checked."""
    return next(
        (rule for pattern, rule in VALUE_RULES.items() if fnmatchcase(key, pattern)), ANYTHING
    )


def check(cfg: DictConfig, overrides: Sequence[Override], app: str = "") -> list[str]:
    """Raises ValueError for the first value of a composed config that is not allowed.

    Checked are the values of params.yaml, those that overrides give, and every `_target_`. `app` is
    the section in which no value may be missing. Returns the keys that overrides add to arguments
    of code.
    """
    is_new: dict[str, bool] = {}
    for override in overrides:
        key = str(override.key_or_group)
        if not (is_group(override) or override.is_delete() or key.startswith("hydra.")):
            for name, _ in leaves(value_of(cfg, key), key):
                is_new[name] = override.is_add() or override.is_force_add()
    check_params(cfg, is_new)
    added = [key for key in is_new if check_given(cfg, key, is_new[key]) and is_new[key]]
    for key, value in leaves(OmegaConf.to_container(cfg[app]), app) if app else ():
        if value == "???":
            raise ValueError(f"{key} is missing: give {key}=<value>")
    if cfg.causal.context >= cfg.causal.length:  # else only its evaluation refuses it
        raise ValueError(
            f"causal.context is {cfg.causal.context}; it must be below causal.length, which is "
            f"{cfg.causal.length}"
        )
    check_targets(OmegaConf.to_container(cfg))
    return added


def check_params(cfg: DictConfig, given: Collection[str]) -> None:
    """Checks the values of params.yaml that are used; no edited value may be replaced.

    The scale's file replaces values that are not given. Raises ValueError if a replaced value
    differs from git's HEAD.
    """
    params, of_scale = dict(leaves(read_params())), values_of_scale(cfg.scale)
    for key in params.keys() - {"scale", "overrides"}:
        rule_of(key).check(key, value_of(cfg, key))
    replaced = [key for key in of_scale.keys() - given if params.get(key) != of_scale[key]]
    file = f"conf/scale/{cfg.scale}.yaml"
    head = committed(Path.cwd(), file, len(replaced)) if replaced else {}
    by_command = values_of_scale(params["scale"])  # lists of the last scale that was run
    for key in sorted(replaced if head else ()):
        if params[key] not in (head.get(key), by_command.get(key, head.get(key))):
            raise ValueError(
                f"{key} is {shown(params[key])} in {PARAMS_FILE}, edited, and scale={cfg.scale} "
                f"sets {shown(of_scale[key])}: edit {file}, or give it on the command line"
            )


@cache
def committed(folder: Path, file: str, count: int) -> dict[str, object]:
    """Returns the values of a folder's params.yaml in git's HEAD by key.

    Without git it returns none, and prints that `file` replaces `count` values, edited or not.
    """
    from pygit2 import GitError, Repository, discover_repository  # no app at scale=laptop needs it

    try:
        repository = Repository(discover_repository(str(folder)))
        path = (folder / PARAMS_FILE).resolve().relative_to(Path(repository.workdir).resolve())
        blob: Any = repository.revparse_single(f"HEAD:{path.as_posix()}")
        return dict(leaves(OmegaConf.to_container(OmegaConf.create(blob.data.decode()))))
    except (KeyError, TypeError, GitError):
        print(
            f"{file} replaces {count} values of {PARAMS_FILE}; without git nobody can tell whether "
            f"they were edited",
            file=sys.stderr,
        )
        return {}


def check_given(cfg: DictConfig, key: str, is_new: bool) -> bool:
    """Checks a given value; returns whether it is an argument of code.

    Raises ValueError for one that its rule or type does not allow, and for a new key that nothing
    reads: users may add arguments of code, and keys of the patterns `ADDED`.
    """
    value, names = value_of(cfg, key), key.split(".")
    parents = [OmegaConf.select(cfg, ".".join(names[:end])) for end in range(1, len(names))]
    is_argument = any(isinstance(parent, DictConfig) and "_target_" in parent for parent in parents)
    conf = written() | written(names[0])
    below = [k for k in (*conf, *dict(leaves(read_params()))) if k.startswith(f"{key}.")]
    if below and not isinstance(value, dict):
        raise ValueError(f"{key} is {shown(value)}; it must hold {', '.join(below[:4])}")
    rule_of(key).check(key, value)
    # an option may be below another key, as optimizer's in causal.optimizer.betas
    options = (written(name).get(".".join(names[at:])) for at, name in enumerate(names) if at)
    if before := conf.get(key) or next(filter(None, options), None):
        check_written(cfg, key, value, before)
    elif is_new and not is_argument and not any(fnmatchcase(key, pattern) for pattern in ADDED):
        what = f"{key} cannot be added; what can be is {', '.join(TRAINER)}"
        raise ValueError(what if names[0] == "trainer" else unknown(key))
    return is_argument


def check_written(cfg: DictConfig, key: str, value: object, before: Sequence[object]) -> None:
    """Raises ValueError for a value of another type than in conf/, or with the name of another.

    Otherwise a record would name the wrong scale, kernel or model. Amounts may vary.
    """
    section, _, name = key.rpartition(".")
    first: Any = next((other for other in before if other is not None), value)
    # a value that equals another key's; the folders of an app are its own
    if reference := re.fullmatch(r"\$\{((?!paths\.)\w[\w.]*)\}", str(first)):
        first = value_of(cfg, reference[1])
        if value != first and isinstance(first, (str, dict)):
            raise ValueError(
                f"{key} is {shown(value)}; it must be that of {reference[1]}"
                f"{f', which is {first}' if isinstance(first, str) else ''}"
            )
    elif name == "name" and (
        (CONF_FOLDER / section / f"{value}.yaml").exists()
        or (
            "${" in str(first)  # made of kernel, length and attention
            and str(value).startswith(("causal_", "masked_"))
            and Path(str(OmegaConf.select(cfg, f"{section}.checkpoint"))).name != value
        )
    ):
        raise ValueError(
            f"{key} is {value}; that is another option's or model's: choose that one, or give a "
            f"name that is no other's"
        )
    is_other = repr(value) not in map(repr, before) and "${" not in str(first)
    if is_other and rule_of(key) is ANYTHING:
        rules = {
            **{bool: SWITCH, float: NOT_NEGATIVE, str: TEXT, int: whole(0 if first == 0 else 1)},
            list: Rule("a list", lambda v: isinstance(v, list)),
        }
        rules.get(type(first), ANYTHING).check(key, value)


def check_override(override: Override) -> None:
    """Raises ValueError for an override that Hydra accepts, and fails at without naming it."""
    if (key := str(override.key_or_group)).startswith("hydra.sweeper.params"):
        raise ValueError(
            f"{key} is read from a config file alone; on the command line each key has its values, "
            f"as in -m approximation.r=1,4"
        )
    is_plain = not (override.is_delete() or override.is_sweep_override())
    if is_plain and key == "hydra.job.chdir":
        rule_of(key).check(key, override.value())
    kinds = (str, list) if key == "corpus" else str
    if is_plain and key in CONFIG_GROUPS and not isinstance(override.value(), kinds):
        raise ValueError(f"{key} is {shown(override.value())}; it must be the name of an option")


def is_group(override: Override) -> bool:
    return override.package is not None or str(override.key_or_group) in CONFIG_GROUPS


def value_of(cfg: DictConfig, key: str) -> Any:
    """Returns the value of a key, sections and lists as Python's; interpolations are followed."""
    try:
        value = OmegaConf.select(cfg, key)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise ValueError(f"{key} cannot be read: {str(error).splitlines()[0]}") from None


def leaves(content: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key that has no keys below it, with its value."""
    if isinstance(content, dict) and (content or not key):
        for name, value in content.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, content


def read_params() -> dict[str, Any]:
    """Reads params.yaml; ValueError if it is missing, not YAML, or has an unknown key."""
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
    content: Any = OmegaConf.to_container(OmegaConf.create(text))
    if not content or not isinstance(content, dict):
        raise ValueError(f"{PARAMS_FILE} cannot be read: it is empty, or no keys with values")
    values = dict(leaves(content))
    for key in ("scale", "overrides"):
        rule_of(key).check(f"{PARAMS_FILE}: {key}", values.pop(key, None))
    if lacking := written("scale").keys() - values.keys() - {"scale", "defaults"}:
        raise ValueError(f"{PARAMS_FILE} lacks {', '.join(sorted(lacking))}")
    for key in values:
        if rule_of(key) is ANYTHING or key in written() | written(key.partition(".")[0]):
            raise ValueError(f"{PARAMS_FILE}: {unknown(key)}")
    return content


def check_plain(text: str) -> None:
    """Raises ValueError for a number or a switch that DVC and Hydra read as different values.

    One of them reads 12:30 as 750, 017 as 15, and `on` as true. Aliases are refused too, because a
    few lines can expand to more than a machine holds, and so is `${}`, which DVC would paste into a
    command.
    """
    for token in yaml.scan(text):
        alias = "the alias *" if isinstance(token, yaml.AliasToken) else ""
        scalar = token.value if isinstance(token, yaml.ScalarToken) else ""
        if alias or "${" in scalar or (AMBIGUOUS.fullmatch(scalar) and token.plain):
            raise ValueError(
                f"{PARAMS_FILE}: line {token.start_mark.line + 1} has {alias}{token.value}; "
                f"write the value itself, in plain digits, or true or false"
            )


@cache
def values_of_scale(scale: str) -> dict[str, object]:
    """Returns the values that conf/scale/<scale>.yaml sets, by key; none for scale laptop."""
    return {
        key: value
        for file in CONF_FOLDER.glob(f"scale/{scale}.yaml")
        for key, value in leaves(OmegaConf.to_container(OmegaConf.load(file)))
        if key not in ("defaults", "scale")
    }


@cache
def written(group: str = "") -> dict[str, list[object]]:
    """Reads the keys of conf/*.yaml, or of a group's options, with their values as written."""
    values: dict[str, list[object]] = {}
    for file in sorted((CONF_FOLDER / group).glob("*.yaml")):
        content = yaml.load(file.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for key, value in leaves(content, group if group != "scale" else ""):
            values.setdefault(key, []).append(value)
    return values


def unknown(key: str, keys: Iterable[str] = ()) -> str:
    """Writes the error for a key that nothing reads, with similar keys.

    These have a similar name, or else the same name in another section.
    """
    written_keys = (
        other
        for group in ("scale", "", *CONFIG_GROUPS)
        if group != "experiment"  # a preset repeats keys of others
        for other in written(group)
    )
    others = [other for other in [*keys] or [*CONFIG_GROUPS, *written_keys] if other != key]
    names = {other: other.rpartition(".")[2] for other in others}
    alike = get_close_matches(key.rpartition(".")[2], names.values(), n=1, cutoff=0.75)
    near = get_close_matches(key, names, n=1, cutoff=0.8) or [k for k in names if names[k] in alike]
    return f"{key} is no key that is read here{asked(near[:3])}"


def asked(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


def shown(value: object) -> str:
    """Writes a value as a user types it, in quotes if it could be read as another type."""
    if isinstance(value, str) and (not value[:1].isalpha() or value in ("true", "false", "null")):
        return repr(value)
    text = str(value)
    return "null" if value is None else text.lower() if isinstance(value, bool) else text
