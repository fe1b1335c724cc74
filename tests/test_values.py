"""Wrong values of params.yaml, conf/ and the command line are refused by their key."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from checks.values.cases import CALL, LATE, NEW, ValueCase, cases
from pipelines import fingerprints, repro
from pipelines.app import (
    app,
    check_all,
    check_job,
    check_sweep,
    composed,
    ending_with_one_line,
    scale_of_params,
)
from pipelines.app.values import CONF, OF_CONF, PARAMS, PARAMS_FILE, PATTERNS, leaves, rule_of
from pipelines.fingerprints import fingerprint
from pipelines.probe import SHORT
from tests.test_conf import APPS, ASKED
from value_aware_study.cards import cards

ROOT = Path(__file__).parents[1]

COUNT = "it must be a whole number of at least 1"
EARLY = [case for case in cases() if case.kind not in (LATE, CALL)]
"""Rows of the table that the start of an app decides"""
GIVEN = {"probe": ("model=x", "text=requirements.txt")}
"""Values that an app does not start without"""


def refusal(app: str, *given: str) -> str:
    with pytest.raises(SystemExit) as stop, ending_with_one_line():
        check_start(app, given)
    message = str(stop.value.code)
    assert message.startswith("error: ") and "\n" not in message and "+" not in message
    return message


def check_start(app: str, given: Sequence[str]) -> None:
    """Checks values as the start of an app does, or of a command that starts apps."""
    overrides = [*scale_of_params(given), *(one for one in given if one != "-m")]
    name = app if app in APPS else "plan"
    check_sweep(name, overrides) if "-m" in given else check_job(name, overrides)


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.given, marks=pytest.mark.slow if case.found == NEW and n % 3 else ()
        )
        for n, case in enumerate(EARLY)
    ],
)
def test_what_is_given_ends_as_the_table_says(
    case: ValueCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.edit:
        text = (ROOT / PARAMS_FILE).read_text()
        assert case.edit[0] in text
        (tmp_path / PARAMS_FILE).write_text(text.replace(*case.edit, 1))
        monkeypatch.chdir(tmp_path)
    app, *values = shlex.split(case.command)
    named = {value.partition("=")[0].removeprefix(f"{app}.") for value in values}
    asked = [one for one in GIVEN.get(app, ()) if one.partition("=")[0] not in named]
    if app != "fingerprints" and "scale" not in named:
        asked.append("scale=smoke")
    line = refused(app, *asked, *values)
    if case.exit:
        assert line and case.line and case.line in line and "\n" not in line
        assert case.edit or name_of(values) in line
    else:
        assert line is None


def name_of(values: list[str]) -> str:
    """Returns the last part of the key of the last value."""
    return values[-1].partition("=")[0].lstrip("+~").partition("@")[0].rpartition(".")[2]


def refused(app: str, *values: str) -> str | None:
    """Returns the one line with which the start of an app ends; None where the app goes on."""
    short = SHORT if app == "probe" else ()
    given = [f"{app}.{one}" if one.partition("=")[0] in short else one for one in values]
    if app in APPS and (found := set_in_composed(app, given)) is not None:
        cfg, undo = found
        try:
            check_all(cfg, app, [])
        except ValueError as error:
            return str(error)
        finally:
            undo()
        return None
    try:
        with ending_with_one_line():
            check_start(app, given)
    except SystemExit as stop:
        assert str(stop.code).startswith("error: ")
        return str(stop.code).removeprefix("error: ")
    return None


def set_in_composed(app: str, given: list[str]) -> tuple[DictConfig, Callable[[], None]] | None:
    """Sets the last value in the config composed of the others; returns the config and the undo.

    Returns None where the last value is an option of a group or adds a key.
    Composing anew takes half a second, and most rows of the table differ in a value alone.
    """
    *others, last = given
    key = last.partition("=")[0]
    section, _, name = key.rpartition(".")
    try:
        value = OverridesParser.create().parse_override(last).value()
        cfg = as_shipped(app, *others)
    except (HydraException, ValueError):
        return None
    node = OmegaConf.select(cfg, section) if section else cfg
    if (CONF / key).is_dir() or key == "scale" or not node or name not in node:
        return None
    before = OmegaConf.to_container(node, resolve=False)[name]
    OmegaConf.update(cfg, key, value, merge=False)
    return cfg, lambda: OmegaConf.update(cfg, key, before, merge=False)


@cache
def as_shipped(app: str, *values: str) -> DictConfig:
    return composed(app, values)


def test_the_table_has_every_app_and_every_kind_of_mistake() -> None:
    rows = cases()
    assert len({case.name for case in rows}) == len(rows)
    assert {*APPS, "run", "fingerprints"} <= {
        case.given.partition(" ")[0].rstrip(";") for case in rows
    }
    assert not any(case.setup for case in EARLY)
    new = sum(case.found == NEW for case in rows)
    assert new >= 100 and len(rows) - new >= 80


@pytest.mark.parametrize("app", APPS)
def test_every_app_refuses_what_it_does_not_read(app: str) -> None:
    asked = ASKED.get(app, [])
    assert "seed is abc; it must be a whole number" in refusal(app, "seed=abc", *asked)


@pytest.mark.parametrize(
    "main", [fingerprints.main, partial(repro.main, [])], ids=["fingerprints", "repro"]
)
def test_what_starts_other_apps_refuses_too(
    main: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = (ROOT / PARAMS_FILE).read_text()
    (tmp_path / PARAMS_FILE).write_text(params.replace("  steps: 500", "  steps: lots", 1))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^error: causal.steps is lots; {COUNT}"):
        main()


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
    "measured": ["caches"],
}
"""Places of a group's options, where that is not the group's name."""
CODE = {
    *("axes", "build", "count_models", "documents", "function", "load", "longer"),
    *("method", "methods", "task", "texts"),
}
"""Sections that are arguments of code: its signature is their schema."""


def shipped() -> Iterator[tuple[str, Any]]:
    """Yields every key of conf/, without method cards and scales, and its value as written."""
    for file in sorted((ROOT / "conf").rglob("*.yaml")):
        group = "" if file.parent.name == "conf" else file.parent.name
        if group not in ("approximation", "cache", "scale"):
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


EDITS = {"causal": {"steps": 3, "length": 220}, "tokens": {"causal_sources": ["networkx"]}}
SAID = "causal.steps is 3 in params.yaml, edited: it wins over scale=smoke, which sets 6\n"


@pytest.fixture
def _edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = OmegaConf.merge(OmegaConf.load(ROOT / PARAMS_FILE), EDITS)
    OmegaConf.save(content, tmp_path / PARAMS_FILE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_edited")
@pytest.mark.parametrize("scale", ["laptop", "smoke", "hours"])
def test_an_edited_value_of_params_wins_over_every_scale_and_the_command_line_over_both(
    scale: str,
) -> None:
    cfg = composed("train_causal", [f"scale={scale}"])
    assert (cfg.train_causal.fit.steps, cfg.causal.length) == (3, 220)
    assert cfg.tokens.causal_sources == ["networkx"]
    assert cfg.causal.layers == (2 if scale == "smoke" else 3)
    assert composed("train_causal", [f"scale={scale}", "causal.steps=7"]).causal.steps == 7
    values = fingerprint("train_causal", [f"scale={scale}", "kernel=elu"])["values"]
    assert values["fit"]["steps"] == 3


@pytest.mark.usefixtures("_edited")
def test_an_edited_value_that_stands_in_place_of_the_scales_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    length = SAID.replace("steps is 3", "length is 220").replace("sets 6", "sets 96")
    for given, said in (
        (["scale=smoke"], [SAID, length]),
        (["scale=smoke", "causal.steps=4"], [length]),
        (["-m", "scale=smoke", "causal.length=230,231"], [SAID]),
        ([], []),
    ):
        check_start("train_causal", given)
        assert sorted(capsys.readouterr().err.splitlines(True)) == sorted(said)


@pytest.mark.usefixtures("_edited")
def test_jobs_of_a_sweep_have_the_edited_values(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, int, int]] = []
    monkeypatch.setattr("sys.argv", ["", "-m", "scale=smoke,hours", "causal.length=230,231"])

    def job(cfg: DictConfig) -> None:
        found.append((cfg.card.scale, cfg.fit.steps, cfg.batches.length))

    app("train_causal")(job)()
    assert found == [(scale, 3, length) for length in (230, 231) for scale in ("smoke", "hours")]


def test_options_of_hydra_may_stand_among_the_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    for option in (f"--config-dir={tmp_path}", "--config-name=train_causal"):
        given = ["scale=smoke", option, "kernel=elu", f"paths.root={tmp_path}"]
        monkeypatch.setattr("sys.argv", ["", *given])
        app("train_causal")(lambda cfg: found.append(cfg.name))()
    assert found == ["causal_elu", "causal_elu"]


def test_an_alias_is_refused_before_what_it_stands_for_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 9)]
    bomb = "\n".join(["x0: &x0 [1]", *levels, (ROOT / PARAMS_FILE).read_text()])
    (tmp_path / PARAMS_FILE).write_text(bomb)
    monkeypatch.chdir(tmp_path)
    assert "line 2 has the alias *x0; write the value itself" in refusal("corpus")


def test_a_sweep_starts_where_one_job_is_right() -> None:
    check_sweep("evaluate", ["evaluation.batch_size=0,1", "scale=smoke"])
    with pytest.raises(ValueError, match=r"evaluation\.batch_size is 0; it must be a whole number"):
        check_sweep("evaluate", ["evaluation.batch_size=0,-1", "scale=smoke"])
    assert "causal.stepz is no key" in refusal("train_causal", "-m", "causal.stepz=3,4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train_causal causal.learning_rate=-1", "causal.learning_rate is -1; it must be"),
        ("evaluate -m evaluation.batch_size=0,-1", "evaluation.batch_size is 0; it must be"),
        ("probe model=x text=y probe.draw=maybe", "probe.draw is maybe; it must be true or false"),
        ("run causal.wdith=3", "did you mean causal.width?"),
    ],
)
def test_a_process_ends_with_the_line(command: str, said: str) -> None:
    app, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-m", f"pipelines.{app}", *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
    assert not done.stdout


HEAVY = ("torch", "transformers", "pytorch_lightning", "datasets", "pandas", "wandb", "dvc")
LATER = ("plan", "publish", "workspace")
"""Apps that import slow packages at once."""


def test_no_app_imports_what_takes_long_before_its_values_are_checked() -> None:
    names = [name for name in APPS if name not in LATER]
    imports = f"import sys, {', '.join(f'pipelines.{name}' for name in names)}"
    code = f"{imports}; print([one for one in sys.modules if one in {HEAVY}])"
    assert run_code(code) == "[]\n"


def run_code(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
