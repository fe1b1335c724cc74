"""The schema of params.yaml and conf/: one rule a value, checked as soon as a config is composed.

Arguments of a `_target_` are checked by its signature instead. This module imports nothing that
takes long, so that a wrong value is refused at once.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from yaml import YAMLError

from value_aware_study.cards import cards
from value_aware_study.paths import inside

AMBIGUOUS = re.compile(r"[-+]?(0\d+|0[xob]\w+|\d+(_\d+)+|\d+(:\d+)+)|yes|no|on|off", re.IGNORECASE)
CONF = Path(__file__).parents[2] / "conf"
PARAMS_FILE = "params.yaml"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The values that a key may have, in words and as a test.

    `words` are suggested for misspelt ones. With `different`, no value of a list comes twice.
    """

    allowed: str
    holds: Callable[[Any], bool]
    words: tuple[str, ...] = ()
    different: bool = False

    def check(self, key: str, value: Any) -> None:
        """Raises ValueError for a value that is not allowed."""
        if not self.holds(value):
            given = value if isinstance(value, list) else [value]
            near = [close for one in given for close in near_words(one, self.words)]
            raise ValueError(f"{key} is {shown(value)}; it must be {self.allowed}{asked(near)}")
        if self.different and isinstance(value, list) and len(set(value)) < len(value):
            raise ValueError(f"{key} is {shown(value)}; it must be a list of different values")


def whole(least: int = 1, most: int | None = None) -> Rule:
    upper = "" if most is None else f" and at most {most}"

    def holds(value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and least <= value and (most is None or value <= most)

    return Rule(allowed=f"a whole number of at least {least}{upper}", holds=holds)


def number(range_: str, within: Callable[[float], bool]) -> Rule:
    def holds(value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and within(value)

    return Rule(allowed=range_, holds=holds)


def word(*words: str) -> Rule:
    return Rule(allowed=f"one of {', '.join(words)}", holds=lambda v: v in words, words=words)


def option(*groups: str) -> Rule:
    """Allows the options of config groups, those that a user added included."""
    return word(*sorted({file.stem for group in groups for file in (CONF / group).glob("*.yaml")}))


def null_or(rule: Rule) -> Rule:
    allowed = f"{rule.allowed}, or null"
    return replace(rule, allowed=allowed, holds=lambda v: v is None or rule.holds(v))


def is_name(value: Any) -> bool:
    """Tells whether a value can name a file or folder."""
    try:
        inside("", value)
    except ValueError:
        return False
    return TEXT.holds(value) or (isinstance(value, int) and not isinstance(value, bool))


def either(rule: Rule, *words: str) -> Rule:
    allowed = f"{rule.allowed} or {', '.join(words)}"
    return Rule(allowed=allowed, holds=lambda v: v in words or rule.holds(v), words=words)


def many(rule: Rule, least: int = 1) -> Rule:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and len(value) >= least and all(map(rule.holds, value))

    allowed = f"a list{' with something in it' if least else ''}, each {rule.allowed}"
    return replace(rule, allowed=allowed, holds=holds, different=True)


COUNT, COUNT_OR_ZERO = whole(1), whole(0)
LAYERS, BATCH, WIDTH = whole(1, 1000), whole(1, 2**16), whole(1, 2**20)
VOCABULARY = whole(261, 2**24)  # the 256 bytes and 5 tokens with a meaning
LENGTH, STEPS, WORKERS = whole(1, 2**24), whole(1, 10**9), whole(0, 1024)
"""Limits above what any machine takes, so that a slip of the keyboard costs no day of work."""
SEED = whole(0, 2**32 - 1)  # what numpy takes
POSITIVE = number("above 0 and at most 1e+15", lambda v: 0 < v <= 1e15)
RATE = number("above 0 and at most 1000", lambda v: 0 < v <= 1000)  # of learning
DECAY = number("at least 0 and at most 1000", lambda v: 0 <= v <= 1000)
MEMORY = number("above 0 and at most 1048576", lambda v: 0 < v <= 2**20)  # GiB: a pebibyte
SPEED = number("above 0 and at most 1e+24", lambda v: 0 < v <= 1e24)  # operations a second
NOT_NEGATIVE = number("at least 0", lambda v: v >= 0)
SHARE = number("from 0 to 1", lambda v: 0 <= v <= 1)
PART = number("between 0 and 1, neither of them", lambda v: 0 < v < 1)
BELOW_ONE = number("at least 0 and below 1", lambda v: 0 <= v < 1)
SWITCH = Rule(allowed="true or false", holds=lambda v: isinstance(v, bool))
TEXT = Rule(allowed="text", holds=lambda v: isinstance(v, str) and bool(v.strip()))
LIST = Rule(allowed="a list", holds=lambda v: isinstance(v, list))
NAME = Rule(
    allowed=(
        "a name of 1 to 200 bytes, all printable, none of them / or \\, and not . or .. or spaces"
    ),
    holds=is_name,
)
SUFFIX = Rule(
    allowed=f"the end of a name, which may be empty; {NAME.allowed}",
    holds=lambda v: v == "" or is_name(v),
)
FOLDER = Rule(
    allowed="a folder, or what can become one: no file, and in none",
    holds=lambda v: (
        TEXT.holds(v)
        and all(one.is_dir() or not one.exists() for one in (Path(v), *Path(v).parents))
    ),
)
CODE = Rule(
    allowed="a list, each {_target_: ...} with arguments",
    holds=lambda v: (
        isinstance(v, list) and all(isinstance(one, dict) and "_target_" in one for one in v)
    ),
)
ARGUMENT = Rule(
    allowed="a finite number, true, false or a list of numbers",
    holds=lambda v: all(
        isinstance(one, (int, float)) and math.isfinite(one)
        for one in (v if isinstance(v, list) else [v])
    ),
)
POSITIONS = replace(
    many(COUNT_OR_ZERO, least=0),
    allowed=f"a list of positions, each {COUNT_OR_ZERO.allowed}",
)
DEVICE = Rule(
    allowed="auto, cpu, cuda or cuda:<number>",
    holds=lambda v: isinstance(v, str) and bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", v)),
)
COUNTS, ANY_COUNTS = many(COUNT), many(COUNT, least=0)
LENGTHS = many(LENGTH)
KEYS, ANY_KEYS = many(either(COUNT, "all")), many(either(COUNT, "all"), least=0)
WAY = word("last", "causal", "noncausal", "continued", "repeat", "hindsight")
OBSERVED = replace(
    WAY,
    allowed=f"{WAY.allowed}, which a number of rows may follow",
    holds=lambda v: (
        isinstance(v, str) and bool(re.fullmatch(rf"({'|'.join(WAY.words)})( [1-9]\d{{0,8}})?", v))
    ),
)
NORM = replace(whole(1, 2), allowed="1 or 2")
SEARCH = word("fast", "default", "best")
PRECISION = word(
    *("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true", "transformer-engine"),
    *("transformer-engine-float16", "16", "32", "64", "bf16"),
)
DTYPES = ("float32", "bfloat16", "float16")


def table(rules: dict[str, Rule]) -> dict[str, Rule]:
    """Expands the keys of rules: "{a,b}.{c,d}" stands for four of them."""
    found: dict[str, Rule] = {}
    for pattern, rule in rules.items():
        parts = re.split(r"[{}]", pattern)  # every second one is a choice
        choices = [part.split(",") if at % 2 else [part] for at, part in enumerate(parts)]
        found |= {"".join(key): rule for key in product(*choices)}
    return found


PARAMS = table(
    {
        "seed": SEED,
        "scale": option("scale"),
        "overrides": many(TEXT, least=0),
        "grid.kernel": many(option("kernel")),
        "grid.length": many(option("length")),
        "grid.keys": KEYS,
        "grid.value_aware_keys": COUNTS,
        "grid.window_keys": ANY_KEYS,
        "grid.{baseline_keys,sampled_keys,lsh_keys,lsh_rounds,orf_features}": ANY_COUNTS,
        "grid.norms": many(NORM, least=0),
        "grid.orf_scaling": many(word("paper", "performer"), least=0),
        "grid.random_seeds": many(SEED),
        "in_context.replicates": many(option("replicate"), least=0),
        "grid.replicates": many(word(*sorted({*option("replicate").words} - {"deep"})), least=0),
        "corpus.evaluation_fraction": PART,
        "corpus.validation_fraction": BELOW_ONE,
        "tokens.vocabulary_size": VOCABULARY,
        "tokens.training_characters": COUNT,
        "tokens.{causal_sources,masked_sources}": null_or(many(TEXT)),
        "tokens.{score_first,rearrange}": SWITCH,
        "{causal,masked,in_context}.layers": LAYERS,
        "{causal,masked,in_context}.{width,heads,feedforward}": WIDTH,
        "{causal,masked}.dropout": BELOW_ONE,
        "causal.length": LENGTH,
        "causal.context": COUNT_OR_ZERO,
        "{causal,masked.short,masked.long}.batch_size": BATCH,
        "{causal,masked.short,masked.long}.steps": STEPS,
        "{causal,masked.short,masked.long}.learning_rate": RATE,
        "{causal,masked.short,masked.long,in_context}.warmup_proportion": SHARE,
        "{causal,masked.short,masked.long}.warmup_steps": COUNT_OR_ZERO,
        "{causal,masked,in_context}.adamw_rate": RATE,
        "{causal,masked,in_context}.weight_decay": DECAY,
        "masked.block": whole(3, 2**24),  # two of its tokens say where it starts and ends
        "masked.warm_start": null_or(TEXT),
        "masked.fraction": PART,
        "masked.{short,long}.length": LENGTH,
        "in_context.task": many(option("task")),
        "in_context.key_value_heads": WIDTH,
        "in_context.{recall,markov,copying}.batch_size": BATCH,
        "in_context.{recall,markov,copying}.steps": STEPS,
        "in_context.{recall,markov,copying}.prefix": LENGTH,
        "in_context.{recall,markov}.length": LENGTH,
        "in_context.{recall,markov,copying}.growing": SHARE,
        "in_context.{recall,markov,copying}.{initializer_range,learning_rate}": RATE,
        "in_context.{recall.pairs,markov.states,copying.symbols}": whole(2, 4096),
        "cache_study.parts": COUNTS,
        "cache_study.more_parts": ANY_COUNTS,
        "cache_study.units": COUNT,
        "cache_study.seeds": many(SEED),
        "training.{evaluate_every,evaluation_batches,checkpoint_every,log_every}": COUNT,
        "survey.budgets": COUNTS,
        "survey.within": NOT_NEGATIVE,
        "survey.trained": many(option("attention", "approximation"), least=0),
        "evaluation.{causal_units,masked_units.short,masked_units.long}": null_or(COUNT),
        "evaluation.recorded_units": COUNT,
        "evaluation.batch_size": BATCH,
        "evaluation.memory_gib": MEMORY,
        "benchmark.{lengths,attention_lengths}": LENGTHS,
        "benchmark.{seconds,slowest}": POSITIVE,
        "benchmark.layer.{width,heads,feedforward}": WIDTH,
        "benchmark.layer.batch": BATCH,
        "benchmark.layer.dtype": word(*DTYPES, "float64"),
    }
)
"""The rules of params.yaml, one for every key."""

OF_CONF = table(
    {
        "corpus.{path,description}": TEXT,
        "corpus.evaluation_path": null_or(TEXT),
        "corpus.remove_copies": SWITCH,
        "{corpus,tokens,benchmark.layer}.seed": SEED,
        "{corpus,tokens}.folder": FOLDER,
        "{corpus,tokens}.metrics": TEXT,
        "tokens.{corpus,corpus_metrics}": TEXT,
        "tokens.{instance_length,long_length}": COUNT,
        "corpus.sources.*.{train_instances,evaluation_instances}": null_or(COUNT),
        "tokens.{causal,masked}_tokenizer.vocabulary_size": VOCABULARY,
        "tokens.{causal,masked}_tokenizer.{training_characters,padding_multiple}": COUNT,
        "tokens.{causal,masked}_tokenizer.path": TEXT,
        "{length,task}.batch_size": BATCH,
        "{length,task}.steps": STEPS,
        "{length,task}.learning_rate": RATE,
        "{length,task}.warmup_proportion": SHARE,
        "length.warmup_steps": COUNT_OR_ZERO,
        "length.{length,compressed}": LENGTH,
        "length.evaluation_units": null_or(COUNT),
        "length.warm_start": null_or(TEXT),
        "{length,model}.{baseline_keys,sampled_keys}": ANY_COUNTS,
        "model.{lsh_keys,orf_features}": ANY_COUNTS,
        "task.growing": SHARE,
        "task.initializer_range": RATE,
        "task.adamw_rate": RATE,
        "task.weight_decay": DECAY,
        "{causal,masked,task}.optimizer.{lr,eps}": RATE,
        "{causal,masked,task}.optimizer.betas": replace(many(BELOW_ONE, least=2), different=False),
        "{causal,masked,task}.optimizer.momentum": BELOW_ONE,
        "{causal,masked}.optimizer.max_grad_norm": NOT_NEGATIVE,
        "{causal,masked}.optimizer.fused": SWITCH,
        "{causal,masked,task}.optimizer._target_": TEXT,
        "{causal,masked,task}.optimizer.*": ARGUMENT,
        "{kernel,length,attention,task,model,survey,evaluate,caches}.name": NAME,
        "{train_causal,train_masked,train_in_context}.name": NAME,
        "model.kernel": option("kernel"),
        "model.{checkpoint,tokens,training}": TEXT,
        "{attention,replicate}.suffix": SUFFIX,
        "replicate.seed": SEED,
        "replicate.layers": LAYERS,
        "{attention.method,approximation}.seed": SEED,
        "{attention.method,approximation}.{r,stride,window,random,summary,dilation}": COUNT,
        "{attention.method,approximation}.{features,landmarks,rank,rounds}": COUNT,
        "{attention.method,approximation}.{iterations,length}": null_or(COUNT),
        "{attention.method,approximation}.global_positions": POSITIONS,
        "{attention.method,approximation}.norm": NORM,
        "{attention.method,approximation}.scaling": word("performer", "paper"),
        "{attention.method,approximation}.search": SEARCH,
        "{attention.method,approximation}.share_query_key": SWITCH,
        "kernel.function.degree": Rule(
            allowed="an even number of at least 0",
            holds=lambda v: COUNT_OR_ZERO.holds(v) and v % 2 == 0,
        ),
        "logger.{project,group,dir}": TEXT,
        "logger.mode": word("online", "offline", "shared", "disabled", "dryrun", "run"),
        "train_masked.card.kernel": TEXT,
        "trainer.accelerator": word("auto", "cpu", "gpu", "cuda", "mps", "tpu"),
        "trainer.{devices,nodes,accumulate}": BATCH,
        "trainer.strategy": TEXT,
        "trainer.precision": PRECISION,
        "trainer.workers": WORKERS,
        "trainer.{compile,checkpoint_activations}": SWITCH,
        "trainer.peak_flops": null_or(SPEED),
        "paths.{root,outputs,corpus,tokens,models,records,trained,metrics}": FOLDER,
        "paths.{report,results,seeds,cache,logs}": FOLDER,
        "publish.trainings": SWITCH,
        "publish.caches": SWITCH,
        "survey.kernel": option("kernel"),
        "survey.{checkpoint,tokens,tokenizer,scale,data,cache,records}": TEXT,
        "survey.seeds": many(SEED),
        "survey.memory_gib": MEMORY,
        "survey.picture.{tokens,budget}": COUNT,
        "benchmark.{cache,record,metrics,scale}": TEXT,
        "benchmark.layer.device": DEVICE,
        "benchmark.layer.threads": null_or(whole(1, 1024)),
        "benchmark.methods.*.{label,order}": TEXT,
        "benchmark.methods.*.exponent": RATE,
        "benchmark.methods.*.mixes_hidden": SWITCH,
        "benchmark.methods.*.by_length.*": LIST,
        "caches.{units,rows}": COUNT,
        "caches.parts": COUNTS,
        "caches.curve.parts": ANY_COUNTS,
        "caches.curve.methods": many(TEXT, least=0),
        "caches.{curve.observed,pools.*.*}": many(OBSERVED),
        "caches.profiles.*.method": TEXT,
        "caches.profiles.*.by": word("layer", "head"),
        "caches.profiles.*.observed": WAY,
        "caches.seeds": many(SEED),
        "caches.r": null_or(COUNT),
        "caches.gaps_of": many(TEXT, least=0),
        "caches.only.*": many(OBSERVED, least=0),
        "caches.observed": many(OBSERVED),
        "caches.after.*.{sinks,recent,rows,floor}": NOT_NEGATIVE,
        "caches.description": TEXT,
        "decode.{model,text,tokenizer}": null_or(TEXT),
        "decode.name": null_or(NAME),
        "decode.description": TEXT,
        "decode.{windows,tokens,units,rows}": COUNT,
        "decode.length": null_or(COUNT),
        "decode.dtype": null_or(word(*DTYPES)),
        "decode.seeds": many(SEED),
        "decode.observed": many(OBSERVED, least=0),
        "decode.caches.*.observed": WAY,
        "decode.caches.*.rows": COUNT,
        "decode.caches.*budget.pool": word("layer", "model"),
        "decode.results": FOLDER,
        "plan.vocabulary.{causal,masked}": null_or(COUNT),
        "plan.operations_per_second": SPEED,
        "plan.one_step": SWITCH,
        "probe.{model,text,tokenizer}": null_or(TEXT),
        "probe.name": null_or(NAME),
        "probe.search": SEARCH,
        "probe.{windows,length}": null_or(COUNT),
        "probe.rows": COUNT,
        "probe.sizes": null_or(COUNTS),
        "probe.kernels": CODE,
        "probe.results": FOLDER,
        "probe.{draw,between,skewness_gap,caches,control}": SWITCH,
        "probe.dtype": null_or(word(*DTYPES)),
        "pretrained.{requirement,package,folder,description}": TEXT,
        "pretrained.model": NAME,
        "workspace.entity": null_or(TEXT),
        "workspace.project": TEXT,
    }
)
"""The rules of conf/, for the keys that people may vary; `*` stands for any name."""

RULES = PARAMS | OF_CONF
SECTIONS = {key.rpartition(".")[0] for key in PARAMS} - {""}
"""Sections that hold nothing but values: a key without a rule there is read by nobody."""
PATTERNS = [key for key in RULES if "*" in key]


def check(cfg: DictConfig, app: str = "") -> None:
    """Raises ValueError for the first value of a composed config that is not allowed.

    Arguments of a `_target_` are checked by its signature, values against each other by
    `check_together`. `app` is the section in which nothing may be missing.
    """
    found = dict(leaves(OmegaConf.to_container(cfg)))
    for key, value in found.items():
        if value == "???":
            if key.startswith(f"{app}."):
                raise ValueError(f"{key} is missing: give {key}=<value>")
        elif not is_interpolation(value):
            check_value(key, value)
    for key in PARAMS:
        if key not in found:
            raise ValueError(f"{key} is missing; it must be {PARAMS[key].allowed}")
    for key, value in found.items():  # after the values that they are read from
        check_interpolation(cfg, key, value)


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def check_interpolation(cfg: DictConfig, key: str, text: Any) -> None:
    """Raises ValueError for an interpolation that resolves to no allowed value."""
    rule = rule_of(key)
    if rule is None or not is_interpolation(text):
        return
    try:
        found = OmegaConf.select(cfg, key)
        rule.check(key, list(found) if OmegaConf.is_list(found) else found)
    except InterpolationToMissingValueError:
        return  # of another app's section
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{key} is {text}, which cannot be read: {reason}") from None


def check_value(key: str, value: Any) -> None:
    """Raises ValueError for a value that its rule does not allow, or a key that nobody reads."""
    if rule := rule_of(key):
        rule.check(key, value)
    elif below := rules_below(key, PARAMS if value is None else RULES):  # null is no option taken
        raise ValueError(f"{key} is {shown(value)}; it must hold {', '.join(below)}")
    elif key.rpartition(".")[0] in SECTIONS:
        raise ValueError(unknown(key))


def rules_below(key: str, rules: Iterable[str]) -> list[str]:
    return [one for one in rules if one.startswith(f"{key}.") and one not in PATTERNS]


def leaves(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key that has a rule, or no keys below it, with its value."""
    if isinstance(content, dict) and content and not (key and rule_of(key)):
        for name, value in content.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, content


def rule_of(key: str) -> Rule | None:
    """Returns the rule of a key; None where it has none."""
    matching = (RULES[pattern] for pattern in PATTERNS if fnmatchcase(key, pattern))
    return RULES.get(key) or next(matching, None)


def read_params() -> dict[str, Any]:
    """Reads params.yaml; ValueError where it is missing, no YAML, or has other keys than PARAMS."""
    try:
        return params_of(Path(PARAMS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"no {PARAMS_FILE} in the current folder; run from the repository's root"
        ) from None
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{PARAMS_FILE} cannot be read: {error}") from None


def edited_params() -> dict[str, Any]:
    """Returns the values of params.yaml that a scale replaces and that were edited.

    An edited value differs from the shipped one, which conf/scale/laptop.yaml holds, and from the
    one that the scale of params.yaml sets. Raises ValueError for one that is not allowed.
    """
    given, shipped = dict(leaves(read_params())), values_of_scale("laptop")
    own = shipped | values_of_scale(given["scale"])
    for key in shipped:
        PARAMS[key].check(key, given[key])
    return {key: given[key] for key in shipped if given[key] not in (shipped[key], own[key])}


@cache
def values_of_scale(scale: str) -> dict[str, Any]:
    """Returns the values that a scale sets by their keys; none for a scale that is not in conf/."""
    file = CONF / "scale" / f"{scale}.yaml"
    content: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.exists() else {}
    return {key: value for key, value in leaves(content) if key not in ("defaults", "scale")}


@cache
def params_of(text: str) -> dict[str, Any]:
    """Parses and checks the text of params.yaml, which every composition asks for."""
    check_plain(text)
    content: Any = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    if not content or not isinstance(content, dict):
        raise ValueError(f"{PARAMS_FILE} cannot be read: it is empty, or no keys with values")
    check_params(content)
    PARAMS["scale"].check("scale", content["scale"])
    return content


def check_params(content: dict[str, Any]) -> None:
    """Raises ValueError where the keys are not those of PARAMS, or a value is interpolated."""
    found = dict(leaves(content))
    for key, value in found.items():
        if below := rules_below(key, PARAMS):
            raise ValueError(f"{PARAMS_FILE}: {key} must hold {', '.join(below)}")
        if key not in PARAMS:
            raise ValueError(f"{PARAMS_FILE}: {unknown(key, PARAMS)}")
        if "${" in str(value):  # DVC would paste it into a command line
            raise ValueError(f"{PARAMS_FILE}: {key} is {shown(value)}; it must be a plain value")
    for key in PARAMS:
        if key not in found:
            raise ValueError(f"{PARAMS_FILE} lacks {key}; it must be {PARAMS[key].allowed}")


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


def unknown(key: str, known: Iterable[str] | None = None) -> str:
    """Words the refusal of a key that nothing reads, with the keys that may have been meant."""
    known = [*(known or known_keys())]
    near = get_close_matches(key, known, n=1, cutoff=0.8)
    if not near:  # the right name in the wrong place, or without one
        by_name: dict[str, list[str]] = {}
        for other in known:
            by_name.setdefault(other.rpartition(".")[2], []).append(other)
        names = get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=0.75)
        near = [other for name in names for other in by_name[name]][:3]
    given = key if key == key.strip() else repr(key)
    return f"{given} is no key that is read here{asked([one for one in near if one != key])}"


def known_keys() -> list[str]:
    """Lists what a command line may give: keys, groups, and the arguments of every method."""
    arguments = {name for card in cards().values() for name in card.arguments}
    methods = [
        f"{where}.{name}" for where in ("approximation", "attention.method") for name in arguments
    ]
    return [*RULES, *(folder.name for folder in CONF.iterdir() if folder.is_dir()), *methods]


def near_words(given: Any, words: Iterable[str]) -> list[str]:
    """Returns the word that a misspelt one may have meant, or none."""
    misspelt = isinstance(given, str) and given not in words
    return get_close_matches(given, words, n=1) if misspelt else []


def asked(near: list[str]) -> str:
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


def shown(value: Any) -> str:
    """Writes a value as it is typed, in quotes where it could be taken for another type."""
    if isinstance(value, str) and (not value[:1].isalpha() or value in ("true", "false", "null")):
        return repr(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
