"""Values and scales of runs are what params.yaml, conf/ and commands say, or refused by a key."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from difflib import ndiff
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo
from dvc.utils.hydra import apply_overrides
from omegaconf import DictConfig, OmegaConf
from pygit2 import Signature, init_repository

from checks.values.cases import LATE, TABLE, ValueCase, cases
from pipelines import fingerprints, scale
from pipelines.app import (
    app,
    check_sweep,
    composed,
    ending_with_one_line,
    scale_of_params,
    values,
)
from pipelines.app.method_cards import check_targets
from pipelines.app.values import PARAMS_FILE, VALUE_RULES, leaves, rule_of
from pipelines.probe import SHORT_ARGUMENTS
from tests.apps import ROOT, copy_of_the_project
from tests.refusals import assert_refused
from tests.test_conf import APPS, ASKED

EDITED = (
    "causal.steps is 3 in params.yaml, edited, and scale=hours sets 3000: edit "
    "conf/scale/hours.yaml, or give it on the command line"
)
EARLY = [case for case in cases() if case.kind != LATE]
"""Rows of the table that the start of an app decides"""
RUNNING = [case for case in cases() if case.kind == LATE]
"""Rows that an app decides once it looks at files and devices"""
PARAMS = (ROOT / PARAMS_FILE).read_text()
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
            app = name if name in APPS else "plan"
            if "-m" in arguments:
                check_sweep(app, overrides)
            else:
                composed(app, overrides, app=app)
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
        assert case.edit[0] in PARAMS
        (tmp_path / PARAMS_FILE).write_text(PARAMS.replace(*case.edit, 1))
        monkeypatch.chdir(tmp_path)
    name, *arguments = shlex.split(case.command)
    if name == "probe":
        arguments = [
            f"probe.{a}" if a.partition("=")[0] in SHORT_ARGUMENTS else a for a in arguments
        ]
    needed = {"scale": "smoke"} | NEEDED.get(name, {}) if name != "fingerprints" else {}
    keys = {argument.partition("=")[0] for argument in arguments}
    defaults = [f"{key}={value}" for key, value in needed.items() if key not in keys]
    line = start(name, *defaults, *arguments)
    assert (line is not None) == bool(case.exit) and case.line in (line or "")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Gives every row of `RUNNING` to its app; returns how each ended, by the row's name."""
    command = [sys.executable, str(TABLE.with_name("worker.py")), str(tmp_path_factory.mktemp("x"))]
    rows = [{"given": row.command, "edit": row.edit, "setup": row.setup} for row in RUNNING]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(rows), stdout=subprocess.PIPE, text=True, check=True
    )
    ended = map(json.loads, done.stdout.splitlines())
    return dict(zip((row.name for row in RUNNING), ended, strict=True))


@pytest.mark.slow
@pytest.mark.skipif("VALUE_CASES" not in os.environ, reason="runs every app: VALUE_CASES=1")
@pytest.mark.parametrize("case", RUNNING, ids=lambda case: case.name)
def test_what_a_running_app_refuses_ends_as_the_table_says(
    case: ValueCase, outcomes: dict[str, dict[str, Any]]
) -> None:
    outcome = outcomes[case.name]
    lines = [line for line in outcome["stderr"] if line.startswith(("error: ", "Traceback"))]
    assert outcome["code"] == case.exit, lines
    if case.exit:
        assert len(lines) == 1 and case.line in lines[0] and not outcome["changed"]


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
        key for key, rule in VALUE_RULES.items() if not key.startswith(others) and rule not in rules
    ]
    assert unused == []


@pytest.mark.parametrize(
    "main", [fingerprints.main, partial(scale.main, [])], ids=["fingerprints", "scale"]
)
def test_what_starts_other_apps_refuses_too(
    main: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PARAMS_FILE).write_text(PARAMS.replace("  steps: 500", "  steps: lots", 1))
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


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of params.yaml that git has at HEAD."""
    monkeypatch.chdir(tmp_path)
    repository = init_repository(tmp_path)
    file = Path(shutil.copy(ROOT / PARAMS_FILE, tmp_path))
    repository.index.add(PARAMS_FILE)
    author = Signature("a", "a@b")
    repository.create_commit("HEAD", author, author, "", repository.index.write_tree(), [])
    return file


@pytest.mark.parametrize(
    ("edit", "scale", "overrides", "line"),
    [
        ("  steps: 500|  steps: 3", "laptop", "", ""),
        ("log_every: 10|log_every: 20", "hours", "", ""),  # which the scale leaves as it is
        ("  steps: 500|  steps: 3000", "hours", "", ""),
        ("  steps: 500|  steps: 3", "hours", "causal.steps=4", ""),
        ("  steps: 500|  steps: 3", "hours", "", EDITED),
        ("short: 192|short: 5", "gpu", "", "evaluation.masked_units.short is 5 in params.yaml"),
        ("scale: laptop|scale: hours", "smoke", "", ""),
        ("  steps: 500|  steps: abc", "laptop", "", "causal.steps is abc; it must be a whole"),
    ],
)
def test_no_edit_of_params_is_lost(
    params: Path, edit: str, scale: str, overrides: str, line: str
) -> None:
    text, (before, after) = params.read_text(), edit.split("|")
    assert before in text
    params.write_text(text.replace(before, after, 1))
    given = [f"scale={scale}", *overrides.split()]
    refused = start("train_causal", *given) or ""
    assert refused.startswith(line) and bool(line) == bool(refused)


def test_a_scale_replaces_what_params_has_and_the_command_line_both(params: Path) -> None:
    params.write_text(params.read_text().replace("log_every: 10", "log_every: 20"))
    for name, steps, layers in (("laptop", 500, 3), ("smoke", 6, 2), ("hours", 3000, 3)):
        cfg = composed("train_causal", [f"scale={name}"])
        assert (cfg.scale, cfg.train_causal.fit.steps, cfg.causal.layers) == (name, steps, layers)
        assert cfg.training.log_every == 20
        assert composed("train_causal", [f"scale={name}", "causal.steps=7"]).causal.steps == 7


def test_without_git_a_line_counts_what_a_scale_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / PARAMS_FILE, tmp_path)
    values.committed.cache_clear()
    for name in ("laptop", "hours", "hours"):
        composed("train_causal", [f"scale={name}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(
        r"conf/scale/hours\.yaml replaces \d+ values of params\.yaml; without git", line
    )


def test_jobs_of_a_sweep_have_their_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, int, int]] = []
    monkeypatch.setattr("sys.argv", ["", "-m", "scale=smoke,laptop", "causal.length=230"])

    def job(cfg: DictConfig) -> None:
        jobs.append((cfg.card.scale, cfg.fit.steps, cfg.batches.length))

    app("train_causal")(job)()
    steps = {"smoke": 6, "laptop": 500}
    assert jobs == [(scale, steps[scale], 230) for scale in steps]


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
    bomb = "\n".join(["x0: &x0 [1]", *levels, PARAMS])
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
        ("scale causal.wdith=3", "did you mean causal.width?"),
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


FEWER = {"  - exponential\n  - polynomial\n": "", "  - short\n": ""}  # stages


@pytest.fixture
def params_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path(shutil.copy(ROOT / "params.yaml", "."))
    head = dict(leaves(OmegaConf.to_container(OmegaConf.load(file))))
    monkeypatch.setattr(values, "committed", lambda *_: head)
    return file


def value(params_file: Path, key: str) -> object:
    return OmegaConf.select(OmegaConf.load(params_file), key)


def test_the_overrides_of_a_run_replace_those_of_the_run_before(params_file: Path) -> None:
    folder = params_file.parent / "größe # x=y"
    scale.choose(["scale=smoke", "causal.steps=3", "logger=none"])
    assert value(params_file, "grid.replicates") == []
    cfg = scale.checked()
    assert (cfg.causal.steps, cfg.masked.short.steps) == (3, 6)
    scale.choose(["corpus=local", f"corpus.path='{folder}'"])
    cfg = scale.checked()
    assert (cfg.scale, cfg.causal.steps, cfg.corpus.path) == ("smoke", 6, str(folder))
    scale.choose(["grid.replicates=[second, third]"])
    assert value(params_file, "grid.replicates") == ["second", "third"]
    assert scale.checked().grid.replicates == ["second", "third"]
    assert scale_of_params([]) == ["scale=smoke", "grid.replicates=[second, third]"]
    assert scale_of_params(["scale=smoke"]) == ["grid.replicates=[second, third]"]
    assert scale_of_params(["scale=laptop"]) == []
    scale.choose(["laptop"])
    assert params_file.read_text() == PARAMS


def test_a_list_comes_back_after_the_scales_that_replaced_it(
    params_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params_file.write_text(PARAMS.replace("extent:\n  - tokens_256\n", "extent:\n"))
    committed = dict(leaves(OmegaConf.to_container(OmegaConf.load(params_file))))
    monkeypatch.setattr(values, "committed", lambda *_: committed)
    scale.choose(["hours"])
    assert (value(params_file, "scale"), value(params_file, "overrides")) == ("hours", [])
    assert value(params_file, "grid.replicates") == ["second", "third"]
    assert value(params_file, "grid.extent") == [] and scale.choose([]).scale == "hours"
    scale.choose(["minilm"])
    scale.choose(["gpu", "trainer.accelerator=auto"])  # a scale without lists
    assert value(params_file, "grid.extent") == ["tokens_512", "tokens_2048"]
    scale.choose(["hours"])
    params_file.write_text(PARAMS)  # as git checkout does
    scale.choose(["gpu", "trainer.accelerator=auto"])
    assert "tokens_256" in value(params_file, "grid.extent")


@pytest.mark.parametrize(
    ("key", "value"), [("training.log_every", 40), ("grid.replicates", ["second"]), ("seed", 5)]
)
def test_dvc_changes_the_lines_of_one_value(params_file: Path, key: str, value: object) -> None:
    apply_overrides(params_file, [f"{key}={value}"])
    changes = [
        line for line in ndiff(PARAMS.split(), params_file.read_text().split()) if line[0] in "+-"
    ]
    assert len(changes) == (3 if isinstance(value, list) else 2)
    scale.choose(["scale=smoke"])
    written = params_file.read_text()
    apply_overrides(params_file, ["scale=smoke"])
    assert params_file.read_text().split() == written.split()


def test_a_scale_whose_axes_dvc_does_not_read_is_refused(params_file: Path) -> None:
    params_file.write_text(PARAMS.replace("scale: laptop", "scale: hours"))
    assert_refused(r"^grid\.replicates is \[second, third\] at .*=hours", scale.checked)
    params_file.write_text(PARAMS.replace("overrides: []", "overrides: [scale=smoke]"))
    assert_refused(r"^scale is smoke at .* and laptop in params", scale.checked)


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("grid.kernel=[eluu]", "grid.kernel is \\['eluu'\\]; it must be a list"),
        ("grid.replicates=[a", "replicates=.a cannot be read"),
        ("kernel=elu", "kernel=elu is not for a run of all stages; every stage"),
        ("++paths.report=/big", "paths.report=/big .* work in a copy of the project"),
        ("corpus.path=a=b", "corpus.path=a=b cannot be read .* a value with =, .* needs quotes"),
        ("scale=gpu", "scale=gpu .* 14 days; trainer.accelerator=auto"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_params_as_they_are(
    params_file: Path, monkeypatch: pytest.MonkeyPatch, argument: str, line: str
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(scale, "to_run", pytest.fail)
    written = params_file.stat().st_mtime_ns
    with pytest.raises(SystemExit, match=f"^error: .*{line}") as stop:
        scale.main([argument])
    assert "\n" not in str(stop.value) and params_file.read_text() == PARAMS
    assert params_file.stat().st_mtime_ns == written


@pytest.mark.parametrize("link", ["outputs", "outputs/smoke/models", "report"])
def test_a_link_out_of_the_project_is_refused_before_the_first_stage(
    params_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    link: str,
) -> None:
    Path(".git").mkdir()
    Path(link).parent.mkdir(parents=True, exist_ok=True)
    Path(link).symlink_to(tmp_path_factory.mktemp("disk"))
    line = "leads out of the project.*copy of the project on that"
    assert_refused(line, scale.choose, ["smoke"])
    assert params_file.read_text() == PARAMS
    Path(".git").rmdir()  # DVC follows links where there is no git
    Repo.init(no_scm=True)
    assert scale.choose(["smoke"]).scale == "smoke"


def test_links_and_folders_of_a_run_are_ignored_by_git(tmp_path: Path) -> None:
    """Git takes a link to a folder for a file."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    repository = init_repository(tmp_path)
    names = ("outputs", "report", "logs", ".cache")
    assert all(repository.path_is_ignored(f"{name}{end}") for name in names for end in ("", "/a"))


def test_replicates_have_outputs_of_their_own_and_read_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    first, second = (
        composed("train_causal", ["scale=smoke", f"replicate={option}"]).train_causal
        for option in ("first", "second")
    )
    assert (first.name, second.name) == ("causal_exponential", "causal_exponential_second")
    assert (first.module.seed, second.module.seed, second.batches.seed) == (0, 1, 1)
    assert first.tokens == second.tokens


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copies the project with fewer stages and without git."""
    folders, files = ("conf", "pipelines", "src", "results"), ("dvc.yaml", "requirements.txt")
    tree = copy_of_the_project(tmp_path / "project", *folders, *files, "Makefile")
    text = PARAMS
    for old, new in FEWER.items():
        text = text.replace(old, new)
    (tree / "params.yaml").write_text(text)
    (tree / ".dvc").mkdir()
    (tree / ".venv").symlink_to(sys.prefix)
    scale = (ROOT / "conf/scale/smoke.yaml").read_text().replace("scale: smoke", "scale: again")
    scale = scale.replace("grid: {", "grid: {replicates: [second], ")
    (tree / "conf/scale/again.yaml").write_text(scale)
    return tree


def command(project: Path, *words: str) -> str:
    """Runs a command in this environment, which make takes for installed; returns its output."""
    environment = os.environ | {"WANDB_MODE": "disabled", "PYTHONPATH": str(project)}
    # when make calls the tests, the make below would name its folders too
    words = (*words, "-o", "setup", "--no-print-directory") if words[0] == "make" else words
    process = subprocess.run(words, cwd=project, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.slow
def test_a_scale_runs_through_dvc_without_git_and_goes_on_where_it_was(project: Path) -> None:
    lines = command(project, "make", "repro", "SCALE=again").splitlines()
    assert lines[0].startswith('params.yaml now has scale "again", ')
    assert "12 of 13 stages will run" in lines and "  train_causal_again@elu-second" in lines
    outputs = project / "outputs/again"
    assert sorted(path.stem for path in (outputs / "records").iterdir()) == [
        *("causal_elu", "causal_elu_second", "masked_long", "masked_long_second")
    ]
    models = [outputs / f"models/causal_elu{end}/model.safetensors" for end in ("", "_second")]
    assert models[0].read_bytes() != models[1].read_bytes()
    record = outputs / "records/masked_long.json"
    before, page = record.read_bytes(), project / "report/grid.csv"
    record.unlink()
    assert "1 of 13 stages will run" in command(project, "make", "repro")
    assert record.read_bytes() == before  # from DVC's cache
    python = (sys.executable, "-m")
    shown = command(project, *python, "pipelines.publish", "what=trainings")
    assert "results/records/again has 24 files of trainings" in shown
    numbers = page.read_bytes()
    shutil.rmtree(outputs)
    shutil.rmtree(project / "report")
    command(project, "make", "page", "SCALE=again")
    assert page.read_bytes() == numbers and not (outputs / "models").exists()
    edited = project / "pipelines/evaluate.py"
    edited.write_text(edited.read_text().replace("if __name__", "UNUSED = 1\n\nif __name__"))
    output = command(project, "make", "repro")
    assert "Running stage 'evaluate_causal@elu'" in output and models[1].exists()
    assert "Running stage 'train_" not in output  # they come back from DVC's cache
