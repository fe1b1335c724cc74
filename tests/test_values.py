"""Wrong values of params.yaml, conf/ and the command line are refused by their key."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from checks.values.cases import CALL, LATE, ValueCase, cases
from pipelines import fingerprints, scale
from pipelines.app import (
    app,
    check_job,
    check_sweep,
    composed,
    ending_with_one_line,
    scale_of_params,
)
from pipelines.app.values import PARAMS_FILE, RULES, check_targets, leaves, rule_of
from pipelines.fingerprints import fingerprint
from pipelines.probe import SHORT
from tests.refusals import assert_refused
from tests.test_conf import APPS, ASKED

ROOT = Path(__file__).parents[1]
EARLY = [case for case in cases() if case.kind not in (LATE, CALL)]
"""Rows of the table that the start of an app decides"""
NEEDED = {"probe": {"probe.model": "x", "probe.text": f"{ROOT}/requirements.txt"}}
"""Values that an app does not start without"""


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def start(name: str, *arguments: str) -> str | None:
    """Checks values as the start of a command does; returns the line that it ends with, if any."""
    try:
        with ending_with_one_line():
            overrides = [*scale_of_params(arguments), *(a for a in arguments if a != "-m")]
            check = check_sweep if "-m" in arguments else check_job
            check(name if name in APPS else "plan", overrides)
    except SystemExit as stop:
        message = str(stop.code)
        assert message.startswith("error: ") and "\n" not in message
        return message.removeprefix("error: ")
    return None


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.given, marks=pytest.mark.slow if case.found == "new" else ())
        for case in EARLY
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
    name, *values = shlex.split(case.command)
    if name == "probe":
        values = [f"probe.{a}" if a.partition("=")[0] in SHORT else a for a in values]
    needed = {"scale": "smoke"} | NEEDED.get(name, {}) if name != "fingerprints" else {}
    keys = {value.partition("=")[0] for value in values}
    defaults = [f"{key}={value}" for key, value in needed.items() if key not in keys]
    line = start(name, *defaults, *values)
    assert (line is not None) == bool(case.exit) and case.line in (line or "")


def test_the_table_has_every_app_and_no_case_twice() -> None:
    rows = cases()
    assert len({case.name for case in rows}) == len(rows)
    commands = {case.given.partition(" ")[0].rstrip(";") for case in rows}
    assert {*APPS, "scale", "fingerprints"} <= commands
    assert not any(case.setup for case in EARLY)


@pytest.mark.slow
def test_every_rule_is_of_a_shipped_value_and_allows_it() -> None:
    """Arguments of the Trainer and Hydra's options are not in conf/."""
    rules = []
    for name in APPS:
        options = ["approximation=linformer", "model=masked"] if name == "evaluate" else []
        cfg = composed(name, [*ASKED.get(name, []), *options])
        rules += [rule_of(key) for key, _ in leaves(OmegaConf.to_container(cfg))]
    others = ("hydra.", "trainer.")
    unused = [
        key for key, rule in RULES.items() if not key.startswith(others) and rule not in rules
    ]
    assert unused == []


@pytest.mark.parametrize(
    "main", [fingerprints.main, partial(scale.main, [])], ids=["fingerprints", "scale"]
)
def test_what_starts_other_apps_refuses_too(
    main: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = (ROOT / PARAMS_FILE).read_text()
    (tmp_path / PARAMS_FILE).write_text(params.replace("  steps: 500", "  steps: lots", 1))
    monkeypatch.chdir(tmp_path)
    assert_refused(
        r"^error: causal\.steps is lots; it must be a whole number", main, error=SystemExit
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# nothing\n", "params.yaml cannot be read: it is empty"),
        ("[1, 2]\n", "params.yaml"),
        ("laptop\n", "params.yaml"),
        ("\0", "params.yaml cannot be read"),
        (None, "no params.yaml in the current folder; run from the repository's root"),
    ],
)
def test_a_file_that_holds_no_params_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, line: str
) -> None:
    if text is not None:
        (tmp_path / PARAMS_FILE).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert line in (start("corpus") or "")


EDITS = {"causal": {"steps": 3, "length": 220}, "tokens": {"causal_sources": ["networkx"]}}
EDITED = "causal.steps is 3 in params.yaml, edited: it wins over scale=smoke, which sets 6\n"


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
    length = EDITED.replace("steps is 3", "length is 220").replace("sets 6", "sets 96")
    for arguments, lines in (
        (["scale=smoke"], [EDITED, length]),
        (["scale=smoke", "causal.steps=4"], [length]),
        (["-m", "scale=smoke", "causal.length=230,231"], [EDITED]),
        ([], []),
    ):
        start("train_causal", *arguments)
        assert sorted(capsys.readouterr().err.splitlines(True)) == sorted(lines)


@pytest.mark.usefixtures("_edited")
def test_jobs_of_a_sweep_have_the_edited_values(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, int, int]] = []
    monkeypatch.setattr("sys.argv", ["", "-m", "scale=smoke,hours", "causal.length=230,231"])

    def job(cfg: DictConfig) -> None:
        jobs.append((cfg.card.scale, cfg.fit.steps, cfg.batches.length))

    app("train_causal")(job)()
    assert jobs == [(scale, 3, length) for length in (230, 231) for scale in ("smoke", "hours")]


def test_options_of_hydra_may_stand_among_the_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    for option in (f"--config-dir={tmp_path}", "--config-name=train_causal"):
        arguments = ["scale=smoke", option, "kernel=elu", f"paths.root={tmp_path}"]
        monkeypatch.setattr("sys.argv", ["", *arguments])
        app("train_causal")(lambda cfg: names.append(cfg.name))()
    assert names == ["causal_elu", "causal_elu"]


def test_an_alias_is_refused_before_what_it_stands_for_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 9)]
    bomb = "\n".join(["x0: &x0 [1]", *levels, (ROOT / PARAMS_FILE).read_text()])
    (tmp_path / PARAMS_FILE).write_text(bomb)
    monkeypatch.chdir(tmp_path)
    assert "line 2 has the alias *x0; write the value itself" in (start("corpus") or "")


def test_a_config_calls_only_code_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in ("os.system", "platform.node", "torch.hub.load", "yours.Method"):
        nested = {"methods": [{"kernel": {"_target_": target}}]}
        assert_refused(f"methods.0.kernel._target_ is {target}; it must beg", check_targets, nested)
    assert_refused(
        r"optimizer\._target_ is platform\.node",
        composed,
        "train_causal",
        ["causal.optimizer._target_=platform.node"],
    )
    monkeypatch.chdir(tmp_path)
    Path("yours.py").touch()
    check_targets(nested)


def test_a_sweep_starts_where_one_job_is_right() -> None:
    check_sweep("evaluate", ["evaluation.batch_size=0,1", "scale=smoke"])
    assert_refused(
        r"evaluation\.batch_size is 0; it must be a whole number",
        check_sweep,
        "evaluate",
        ["evaluation.batch_size=0,-1", "scale=smoke"],
    )
    assert "causal.stepz is no key" in (start("train_causal", "-m", "causal.stepz=3,4") or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train_causal causal.learning_rate=-1", "causal.learning_rate is -1; it must be"),
        ("evaluate -m evaluation.batch_size=0,-1", "evaluation.batch_size is 0; it must be"),
        ("run causal.wdith=3", "did you mean causal.width?"),
    ],
)
def test_a_process_ends_with_the_line(command: str, line: str) -> None:
    app, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-m", f"pipelines.{app}", *arguments],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and line in done.stderr and done.stderr.count("\n") == 1
    assert not done.stdout


HEAVY = ("torch", "transformers", "pytorch_lightning", "datasets", "pandas", "wandb", "dvc")
LATER = ("plan", "publish", "workspace")
"""Apps that import slow packages at once."""


def test_no_app_imports_what_takes_long_before_its_values_are_checked() -> None:
    names = [name for name in APPS if name not in LATER]
    imports = f"import sys, {', '.join(f'pipelines.{name}' for name in names)}"
    code = f"{imports}; print([name for name in sys.modules if name in {HEAVY}])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
