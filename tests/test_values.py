"""Values of params.yaml, of conf/ and of the command line: what is refused, in which words."""

import copy
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from pipelines.app import composed
from pipelines.start import check_start, check_sweep
from pipelines.values import OF_CONF, PARAMS, PARAMS_FILE, PATTERNS, check, leaves, rule_of
from tests.test_conf import APPS, ASKED
from value_aware_study.cards import cards

ROOT = Path(__file__).parents[1]

COUNT = "it must be a whole number of at least 1"
REFUSED = [
    # types
    ("corpus", "corpus.evaluation_fraction=abc", "must be between 0 and 1"),
    ("corpus corpus=local", "corpus.path=[1,2]", "corpus.path is [1, 2]; it must be text"),
    ("corpus corpus=local", "corpus.path=", "corpus.path is ''; it must be text"),
    ("corpus corpus=local", "corpus.path=null", "it must be text"),
    ("corpus corpus=local corpus.path=x", "corpus.evaluation_path=5", "text, or null"),
    ("corpus", "corpus.remove_copies=yes", "it must be true or false"),
    ("corpus", "corpus.remove_copies=1", "it must be true or false"),
    ("tokens", "tokens.vocabulary_size=1e9", COUNT),
    ("tokens", "tokens.vocabulary_size=abc", COUNT),
    ("tokens", "tokens.vocabulary_size=4096.0", COUNT),
    ("tokens", "tokens.training_characters=0", COUNT),
    ("tokens", "tokens.rearrange=maybe", "it must be true or false"),
    ("tokens", "tokens.score_first=null", "it must be true or false"),
    ("tokens", "masked.block=abc", COUNT),
    ("train_causal", "causal.learning_rate=abc", "it must be above 0"),
    ("train_causal", "causal.steps=1.5", COUNT),
    ("train_causal", "causal.steps=abc", COUNT),
    ("train_causal", "causal.steps=true", "causal.steps is true; " + COUNT),
    ("train_causal", "causal.steps='12'", "causal.steps is '12'; " + COUNT),
    ("train_causal", "causal.steps=null", "causal.steps is null; " + COUNT),
    ("train_causal", "causal.steps=", "causal.steps is ''; " + COUNT),
    ("train_causal", "causal.steps=[5]", "causal.steps is [5]; " + COUNT),
    ("train_causal", "causal.steps={a:5}", COUNT),
    ("train_causal", "causal.steps=1e3", COUNT),
    ("train_causal", "causal.width=abc", COUNT),
    ("train_causal", "causal.dropout=abc", "at least 0 and below 1"),
    ("train_causal", "causal.weight_decay=abc", "at least 0"),
    ("train_causal", "trainer.workers=abc", "whole number of at least 0"),
    ("train_causal", "seed=1.5", "whole number of at least 0 and at most 4294967295"),
    ("train_causal", "seed=abc", "seed is abc; "),
    ("train_causal", "seed=null", "seed is null; "),
    ("train_causal", "seed=true", "seed is true; "),
    ("train_causal", "trainer.devices=auto", COUNT),
    ("train_causal", "trainer.compile=2", "it must be true or false"),
    ("train_causal", "trainer.strategy=3", "it must be text"),
    ("train_causal", "causal.optimizer.betas=0.9", "it must be a list"),
    ("train_causal", "causal.optimizer.betas=[0.9]", "it must be a list"),
    ("train_causal", "causal.optimizer.momentum=high", "at least 0 and below 1"),
    ("train_masked", "masked.fraction=abc", "must be between 0 and 1"),
    ("train_masked", "masked.warm_start=5", "text, or null"),
    ("evaluate approximation=lsh", "approximation.seed=abc", "approximation.seed is abc"),
    ("evaluate approximation=lsh", "approximation.seed=1.5", "approximation.seed is 1.5"),
    ("evaluate approximation=lsh", "approximation.seed=-1", "approximation.seed is -1"),
    ("evaluate approximation=lsh", "approximation.r=abc", "approximation.r is abc"),
    ("evaluate approximation=lsh", "approximation.rounds=[1]", "approximation.rounds is [1]"),
    ("train_masked attention=lsh", "attention.method.seed=abc", "attention.method.seed is abc"),
    ("evaluate", "evaluation.batch_size=abc", COUNT),
    ("evaluate", "evaluation.memory_gib=abc", "it must be above 0"),
    ("evaluate", "evaluation.causal_units=abc", COUNT),
    ("evaluate", "evaluation.masked_units=5", "evaluation.masked_units is 5"),
    ("evaluate", "grid.keys=[abc]", "grid.keys is ['abc']; it must be a list"),
    ("evaluate", "grid.keys=all", "grid.keys is all; it must be a list"),
    ("evaluate", "grid.keys=5", "grid.keys is 5; it must be a list"),
    ("evaluate", "grid.keys=[[1,2]]", "it must be a list"),
    ("evaluate", "grid.keys=[1,null]", "it must be a list"),
    ("evaluate", "grid.keys={a:1}", "grid.keys is {'a': 1}; it must be a list"),
    ("survey", "survey.budgets=[abc]", "survey.budgets is ['abc']; it must be a list"),
    ("survey", "survey.budgets=8", "survey.budgets is 8; it must be a list"),
    ("survey", "survey.within=abc", "it must be at least 0"),
    ("survey", "survey.picture.tokens=few", COUNT),
    ("benchmark", "benchmark.lengths=128", "it must be a list"),
    ("benchmark", "benchmark.layer.device=0", "it must be text"),
    ("probe", "probe.windows=abc", COUNT),
    ("probe", "probe.length=abc", COUNT),
    ("probe", "probe.rows=abc", COUNT),
    ("probe", "probe.sizes=[abc]", "it must be a list"),
    ("probe", "probe.sizes=5", "it must be a list"),
    ("probe", "probe.sizes=[1.5]", "it must be a list"),
    ("probe", "probe.draw=maybe", "it must be true or false"),
    ("probe", "probe.between=no", "it must be true or false"),
    ("probe", "probe.model=5", "it must be text, or null"),
    ("probe", "probe.kernels=elu", "it must be a list"),
    ("plan", "causal.width=abc", COUNT),
    ("plan", "plan.one_step=abc", "it must be true or false"),
    ("plan", "plan.operations_per_second=fast", "it must be above 0"),
    ("caches", "caches.rows=abc", COUNT),
    ("train_in_context", "task.steps=abc", COUNT),
    ("train_in_context", "in_context.recall.steps=abc", COUNT),
    # ranges
    ("corpus", "corpus.evaluation_fraction=0", "between 0 and 1"),
    ("corpus", "corpus.evaluation_fraction=1.5", "between 0 and 1"),
    ("corpus", "corpus.evaluation_fraction=nan", "between 0 and 1"),
    ("corpus", "corpus.validation_fraction=-0.1", "at least 0 and below 1"),
    ("corpus", "corpus.validation_fraction=0.96", "together with corpus.evaluation_fraction"),
    ("corpus", "corpus.sources.networkx.train_instances=-1", COUNT),
    ("train_causal", "causal.layers=0", COUNT),
    ("train_causal", "causal.layers=-1", COUNT),
    ("train_causal", "causal.heads=0", COUNT),
    ("train_causal", "causal.heads=3", "causal.width is 64; causal.heads, which is 3, must divide"),
    ("train_causal", "causal.length=0", COUNT),
    ("train_causal", "causal.steps=0", COUNT),
    ("train_causal", "causal.batch_size=0", COUNT),
    ("train_causal", "causal.batch_size=-4", COUNT),
    (
        "train_causal",
        "causal.learning_rate=-1",
        "causal.learning_rate is -1; it must be a",
    ),
    ("train_causal", "causal.learning_rate=0", "above 0"),
    ("train_causal", "causal.learning_rate=nan", "causal.learning_rate is nan; it must be"),
    ("train_causal", "causal.learning_rate=inf", "causal.learning_rate is inf; it must be"),
    ("train_causal", "causal.learning_rate=-inf", "causal.learning_rate is -inf; it must be"),
    ("train_causal", "causal.adamw_rate=0", "above 0"),
    ("train_causal", "causal.warmup_steps=-1", "whole number of at least 0"),
    ("train_causal", "causal.warmup_proportion=1.1", "from 0 to 1"),
    ("train_causal", "causal.warmup_proportion=-0.1", "from 0 to 1"),
    ("train_causal", "causal.dropout=1", "below 1"),
    ("train_causal", "causal.dropout=-0.1", "at least 0"),
    ("train_causal", "causal.weight_decay=-0.01", "at least 0"),
    ("train_causal", "causal.weight_decay=inf", "at least 0"),
    ("train_causal", "causal.context=-1", "whole number of at least 0"),
    ("train_causal", "causal.context=1000000", "must be below causal.length, which is 96"),
    ("train_causal", "causal.optimizer.lr=-1", "above 0"),
    ("train_causal", "causal.optimizer.eps=nan", "above 0"),
    ("train_causal", "causal.optimizer.betas=[0.9,1]", "below 1"),
    ("train_causal", "causal.optimizer.momentum=1", "below 1"),
    ("train_causal", "training.evaluation_batches=0", COUNT),
    ("train_causal", "training.evaluate_every=-1", COUNT),
    ("train_causal", "training.checkpoint_every=0", COUNT),
    ("train_causal", "training.log_every=0", COUNT),
    ("train_causal", "trainer.peak_flops=-1", "above 0, or null"),
    ("train_causal", "trainer.peak_flops=nan", "above 0, or null"),
    ("train_causal", "trainer.accumulate=0", COUNT),
    ("train_causal", "trainer.devices=0", COUNT),
    ("train_causal", "trainer.nodes=-1", COUNT),
    ("train_causal", "trainer.workers=-1", "whole number of at least 0"),
    ("train_causal", "seed=-1", "seed is -1; "),
    ("train_causal", "seed=4294967296", "at most 4294967295"),
    ("train_causal attention=sliding_window", "attention.name=", "attention.name is ''"),
    ("train_masked", "masked.block=0", COUNT),
    ("train_masked", "masked.layers=0", COUNT),
    ("train_masked", "masked.long.batch_size=0", COUNT),
    ("train_masked", "masked.short.steps=-5", COUNT),
    ("train_masked", "masked.short.learning_rate=0", "above 0"),
    ("train_masked", "masked.fraction=0", "between 0 and 1"),
    ("train_masked", "masked.fraction=1", "between 0 and 1"),
    ("train_masked", "masked.heads=5", "masked.heads, which is 5, must divide"),
    ("train_masked", "length.steps=0", COUNT),
    (
        "train_masked optimizer@masked.optimizer=bert_adam",
        "masked.optimizer.max_grad_norm=-1",
        "at least 0",
    ),
    (
        "train_masked optimizer@masked.optimizer=bert_adam",
        "masked.optimizer.max_grad_norm=nan",
        "at least 0",
    ),
    ("train_in_context", "in_context.recall.growing=2", "from 0 to 1"),
    ("train_in_context", "in_context.recall.pairs=1", "whole number of at least 2"),
    ("train_in_context", "in_context.key_value_heads=0", COUNT),
    ("train_in_context", "in_context.recall.initializer_range=0", "above 0"),
    ("tokens", "tokens.causal_sources=[]", "a list with something in it"),
    ("evaluate", "evaluation.causal_units=0", COUNT),
    ("evaluate", "evaluation.causal_units=-1", COUNT),
    ("evaluate", "evaluation.recorded_units=0", COUNT),
    ("evaluate", "evaluation.masked_units.long=0", "evaluation.masked_units.long is 0"),
    ("evaluate", "evaluation.batch_size=0", COUNT),
    ("evaluate", "evaluation.batch_size=1.5", COUNT),
    ("evaluate", "evaluation.memory_gib=0", "above 0"),
    ("evaluate", "evaluation.memory_gib=inf", "above 0"),
    ("evaluate", "grid.keys=[]", "a list with something in it"),
    ("evaluate", "grid.keys=[0]", "grid.keys is [0]; it must be a list"),
    ("evaluate", "grid.value_aware_keys=[]", "a list with something in it"),
    ("evaluate", "grid.value_aware_keys=[all]", "it must be a list"),
    ("evaluate", "grid.random_seeds=[]", "a list with something in it"),
    ("evaluate", "grid.random_seeds=[-1]", "it must be a list"),
    ("evaluate", "grid.norms=[3]", "each 1 or 2"),
    ("evaluate", "grid.baseline_keys=[-4]", "it must be a list"),
    ("evaluate", "evaluate.explored.sizes=[]", "a list with something in it"),
    ("survey", "survey.budgets=[]", "a list with something in it"),
    ("survey", "survey.budgets=[0]", "it must be a list"),
    ("survey", "survey.budgets=[-5]", "it must be a list"),
    ("survey", "survey.budgets=[1.5]", "it must be a list"),
    ("survey", "survey.within=-1", "at least 0"),
    ("survey", "survey.within=inf", "at least 0"),
    ("benchmark", "benchmark.layer.batch=0", COUNT),
    ("benchmark", "benchmark.layer.threads=-1", "a whole number of at least 1, or null"),
    ("benchmark", "benchmark.layer.heads=3", "benchmark.layer.heads, which is 3, must divide"),
    ("benchmark", "benchmark.lengths=[]", "a list with something in it"),
    ("benchmark", "benchmark.lengths=[128,0]", "it must be a list"),
    ("benchmark", "benchmark.seconds=0", "above 0"),
    ("benchmark", "benchmark.slowest=-1", "above 0"),
    ("probe", "probe.length=0", COUNT),
    ("probe", "probe.windows=0", COUNT),
    ("probe", "probe.sizes=[]", "a list with something in it"),
    ("probe", "probe.sizes=[0]", "a list"),
    ("plan", "causal.heads=0", COUNT),
    ("plan", "causal.batch_size=0", COUNT),
    ("plan", "plan.vocabulary.causal=0", COUNT),
    ("caches", "caches.rows=0", COUNT),
    ("caches", "cache_study.parts=[]", "a list with something in it"),
    ("caches", "cache_study.parts=[0]", "it must be a list"),
    ("caches", "cache_study.seeds=[0.5]", "it must be a list"),
    ("caches", "cache_study.units=0", COUNT),
    # words
    ("train_causal", "grid.kernel=[elu,exponental]", "did you mean exponential?"),
    ("train_causal", "grid.kernel=[]", "a list with something in it"),
    ("train_causal", "grid.length=[medium]", "each one of long, short"),
    ("train_causal", "grid.replicates=[fourth]", "each one of first, second, third"),
    ("train_causal", "in_context.task=[recal]", "did you mean recall?"),
    ("train_causal", "trainer.precision=bf16-mxed", "did you mean bf16-mixed?"),
    ("train_causal", "trainer.accelerator=gpus", "did you mean gpu?"),
    ("tokens", "tokens.causal_sources=[networks]", "did you mean networkx?"),
    ("evaluate", "grid.orf_scaling=[papers]", "did you mean paper?"),
    ("survey", "survey.trained=[linformr]", "did you mean linformer?"),
    ("benchmark", "benchmark.layer.dtype=float31", "did you mean float32?"),
    ("probe", "probe.search=fsat", "did you mean fast?"),
    ("probe", "probe.dtype=float46", "did you mean float16?"),
    ("caches", "caches.observed=[lst]", "did you mean last?"),
    ("caches", "caches.observed=last", "it must be a list"),
]
COMPOSED = [
    # options of groups
    (
        "train_causal",
        "kernel=exponental",
        "it must be one of elu, exponential, polynomial; did you",
    ),
    ("train_causal", "scale=smok", "did you mean smoke?"),
    ("train_causal", "scale=huge", "it must be one of gpu, hours, laptop, paper, smoke"),
    ("train_causal", "optimizer@causal.optimizer=adam", "did you mean adamw?"),
    ("train_masked", "attention=linear_mixin", "did you mean linear_mixing?"),
    ("evaluate", "approximation=sliding_windw", "did you mean sliding_window?"),
    # keys
    ("train_causal", "causal.wdith=64", "no key that is read here; did you mean causal.width?"),
    ("train_causal", "causl.width=64", "did you mean causal.width?"),
    ("train_causal", "stepz=3", "did you mean "),
    ("train_causal", "sed=3", "did you mean seed?"),
    ("corpus", "corpus.sed=3", "corpus.sed is no key"),
    ("train_causal", "kernal=elu", "did you mean kernel?"),
    ("train_causal", "+causal.stepz=3", "did you mean causal.steps?"),
    ("train_causal", "++causal.stepz=3", "did you mean causal.steps?"),
    ("train_causal", "+grid.kees=[3]", "did you mean grid.keys?"),
    ("train_causal", "~causal.steps", "causal.steps is missing"),
    ("train_causal", "optimizer@causal.optimiser=adamw", "optimizer@causal.optimizer"),
    ("evaluate approximation=lsh", "approximation.round=3", "did you mean approximation.rounds?"),
    ("evaluate", "approximation.r=3", "approximation.r is no key that is read here"),
    ("evaluate", "evaluation.batchsize=3", "did you mean evaluation.batch_size?"),
    ("survey", "survey.budget=[8]", "did you mean survey.budgets?"),
    ("benchmark", "benchmark.length=[8]", "did you mean benchmark.lengths?"),
    ("probe", "probe.serach=fast", "did you mean probe.search?"),
    ("plan", "paths.outptus=x", "did you mean paths.outputs?"),
    ("corpus corpus=local", "", "corpus.path is missing: give corpus.path=<value>"),
    ("probe-without-arguments", "", "probe.model is missing"),
]


def refusal(app: str, *given: str) -> str:
    with pytest.raises(SystemExit) as stop:
        check_start(app, [*given])
    message = str(stop.value.code)
    assert message.startswith("error: ") and "\n" not in message and "+" not in message
    return message


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@cache
def as_shipped(command: str) -> DictConfig:
    app, *given = command.split()
    return composed(app, ["scale=smoke", *ASKED.get(app, []), *given])


@pytest.mark.parametrize(("command", "given", "said"), REFUSED)
def test_a_value_that_is_not_allowed_is_said_with_its_key(
    command: str, given: str, said: str
) -> None:
    key, parsed = given.partition("=")[0], OverridesParser.create().parse_override(given)
    cfg = copy.deepcopy(as_shipped(command))
    OmegaConf.update(cfg, key, parsed.value(), merge=False)
    with pytest.raises(ValueError) as refused:
        check(cfg)
    message = str(refused.value)
    assert key in message and said in message and "\n" not in message


@pytest.mark.parametrize(("command", "given", "said"), COMPOSED)
def test_what_cannot_be_composed_is_said_in_one_line(command: str, given: str, said: str) -> None:
    app, *others = command.removesuffix("-without-arguments").split()
    asked = [] if command.endswith("-without-arguments") else ASKED.get(app, [])
    scale = [] if given.startswith("scale=") else ["scale=smoke"]
    message = refusal(app, *scale, *asked, *others, *([given] if given else []))
    key = given.partition("=")[0].lstrip("+~").partition("@")[0]
    assert key in message and said in message


@pytest.mark.parametrize("app", APPS)
def test_every_app_refuses_what_it_does_not_read(app: str) -> None:
    asked = ASKED.get(app, [])
    assert "seed is abc; it must be a whole number" in refusal(app, "seed=abc", *asked)


@pytest.mark.parametrize("app", ["run", "fingerprints", "repro"])
def test_what_starts_other_apps_refuses_too(
    app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = (ROOT / PARAMS_FILE).read_text()
    (tmp_path / PARAMS_FILE).write_text(params.replace("  steps: 500", "  steps: lots", 1))
    monkeypatch.chdir(tmp_path)
    assert "causal.steps is lots; " + COUNT in refusal(app)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("  steps: 500\n", "  steps: 500\n  stepz: 3\n", "params.yaml: causal.stepz is no key"),
        ("  steps: 500\n", "  steps: 500\n  stepz: 3\n", "did you mean causal.steps?"),
        ("  steps: 500\n", "  stepz: 500\n", "did you mean causal.steps?"),
        ("  steps: 500\n", "", "params.yaml lacks causal.steps; " + COUNT),
        ("scale: laptop", "skale: laptop", "params.yaml: skale is no key"),
        ("scale: laptop", "", "params.yaml lacks scale; it must be one of gpu, hours, laptop"),
        ("scale: laptop", "scale: laptp", "did you mean laptop?"),
        ("  steps: 500\n", "  steps: -500\n", "causal.steps is -500; " + COUNT),
        ("  steps: 500\n", "  steps: 500: 3\n", "params.yaml cannot be read: "),
        ("  steps: 500\n", "  steps: 500\n  steps: 600\n", "params.yaml cannot be read: "),
        ("seed: 0", "seed: [0", "params.yaml cannot be read: "),
        ("seed: 0", "seed: 0\ntrainer: {workers: 2}", "params.yaml: trainer.workers is no key"),
        ("seed: 0", "seed: null", "seed is null; it must be a whole number"),
        ("  within: 0.1", "  within: .nan", "survey.within is nan; it must be"),
        ("causal:", "caussal:", "did you mean causal."),
    ],
)
def test_params_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, said: str
) -> None:
    text = (ROOT / PARAMS_FILE).read_text()
    assert before in text
    (tmp_path / PARAMS_FILE).write_text(text.replace(before, after, 1))
    monkeypatch.chdir(tmp_path)
    assert said in refusal("train_causal")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "params.yaml cannot be read: it is empty"),
        ("# nothing\n", "params.yaml cannot be read: it is empty"),
        ("[1, 2]\n", "params.yaml"),
        ("laptop\n", "params.yaml"),
        ("\0", "params.yaml cannot be read"),
        (None, "no params.yaml in the current folder; run from the repository's root"),
    ],
)
@pytest.mark.parametrize("given", [[], ["scale=smoke"]])
def test_a_file_that_holds_no_params_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str, given: list[str]
) -> None:
    if text is not None:
        (tmp_path / PARAMS_FILE).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert said in refusal("corpus", *given)


AT = {
    "tokenizer": ["tokens.causal_tokenizer", "tokens.masked_tokenizer"],
    "optimizer": ["causal.optimizer", "masked.optimizer", "task.optimizer"],
    "schedule": ["causal.schedule", "length.schedule", "task.schedule"],
    "texts": ["caches"],
}
"""Where the options of a group go, if not under its name."""
CODE = {
    *("axes", "build", "count_models", "documents", "function", "load", "longer"),
    *("method", "methods", "task", "texts"),
}
"""Sections that are arguments of code: its signature is their schema."""


def shipped() -> Iterator[tuple[str, Any]]:
    """Every key of conf/ and its value as written; not of method cards and scales."""
    for file in sorted((ROOT / "conf").rglob("*.yaml")):
        group = "" if file.parent.name == "conf" else file.parent.name
        if group not in ("approximation", "scale"):
            for place in AT.get(group, [group]):
                for key, value in content_of(file):
                    yield f"{place}.{key}" if place else key, value


def content_of(file: Path) -> list[tuple[str, Any]]:
    content = yaml.safe_load(file.read_text())
    for key in ("defaults", "hydra"):
        content.pop(key, None)
    return [(key, value) for key, value in leaves(content) if key]


def test_every_value_that_people_may_vary_has_a_rule_and_every_rule_a_key() -> None:
    found = list(shipped())
    without = [
        key
        for key, value in found
        if rule_of(key) is None
        and not (isinstance(value, str) and "${" in value)
        and not set(key.split(".")) & CODE
        and not key.split(".")[-1].startswith("_")
    ]
    assert without == []
    known = {key for key, _ in found}
    known |= {
        f"{at}.{key}" for at in METHODS for card in cards().values() for key in card.arguments
    }
    assert [key for key in OF_CONF if key not in known and key not in PATTERNS] == []
    for pattern in PATTERNS:
        assert any(rule_of(key) is OF_CONF[pattern] for key in known), pattern


METHODS = ("approximation", "attention.method")


def test_params_has_the_keys_that_have_rules_and_scales_have_no_others() -> None:
    assert set(dict(content_of(ROOT / PARAMS_FILE))) == set(PARAMS)
    for file in (ROOT / "conf/scale").glob("*.yaml"):
        assert set(dict(content_of(file))) <= set(PARAMS)


def test_a_sweep_starts_where_one_job_is_right() -> None:
    check_sweep("evaluate", ["evaluation.batch_size=0,1", "scale=smoke"])
    with pytest.raises(ValueError, match=r"evaluation\.batch_size is 0; it must be a whole number"):
        check_sweep("evaluate", ["evaluation.batch_size=0,-1", "scale=smoke"])
    assert "causal.stepz is no key" in refusal("train_causal", "-m", "causal.stepz=3,4")


def run(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A process as the user starts it, and the seconds of a processor that it took."""
    before = used()
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done, used() - before


def used() -> float:
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_children.ru_utime + of_children.ru_stime


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train_causal causal.learning_rate=-1", "causal.learning_rate is -1; it must be"),
        ("evaluate -m evaluation.batch_size=0,-1", "evaluation.batch_size is 0; it must be"),
        ("probe model=x text=y probe.draw=maybe", "probe.draw is maybe; it must be true or false"),
        ("run causal.wdith=3", "did you mean causal.width?"),
    ],
)
def test_a_process_ends_within_seconds(command: str, said: str) -> None:
    app, *arguments = command.split()
    done, seconds = run(f"pipelines.{app}", *arguments)
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
    assert not done.stdout
    assert seconds < 3


def test_what_refuses_imports_nothing_that_takes_long() -> None:
    code = "import sys, pipelines.start; print([m for m in sys.modules if m in {'torch', 'numpy'}])"
    assert run_code(code) == "[]\n"


def run_code(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
