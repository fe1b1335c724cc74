"""A sweep leaves a table and a picture, and names jobs that fail; W&B gets curves against r."""

import json
import os
import pickle
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import wandb
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf
from PIL import Image

from pipelines.app import composed, plain, tracking
from pipelines.app.sweep import SweepTable, curve_name, job_rows, picture_of
from tests.apps import ROOT, refusal, run_app, write_run
from tests.refusals import assert_refused
from value_aware_attention.files import held
from value_aware_study.evaluation.grid import setting
from value_aware_study.report.exhibit import Exhibit, Page, Section, Table
from value_aware_study.report.look import ORACLE_MARKS, oracle_marks

pytestmark = pytest.mark.filterwarnings("ignore")
SWEEP = "evaluate -m kernel=elu approximation=optimal_v_oblivious approximation.r="


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def ended(command: str, root: Path) -> list[str]:
    """Returns the lines that a failing sweep ends with."""
    with pytest.raises(SystemExit) as stop:
        run_app(command, root)
    return str(stop.value).splitlines()


def test_a_sweep_leaves_its_table_with_exact_attention_and_a_picture(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_app(f"{SWEEP}1,4", root)
    folder = root / "logs/hydra/evaluate"
    table = pd.read_csv(folder / "sweep.csv")
    exact, *_ = values = table["perplexity"].tolist()
    assert (folder / "multirun.yaml").exists() and not (root / "outputs/smoke/records").exists()
    assert table["method"].tolist() == ["exact", "optimal_v_oblivious", "optimal_v_oblivious"]
    assert table["r"].tolist()[1:] == [1, 4] and set(table["kernel"]) == {"elu"}
    assert table["times_exact"].tolist() == pytest.approx([value / exact for value in values])
    assert (table["perplexity_low_95"] <= table["perplexity"]).all()
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [f"{folder}/sweep.csv", f"{folder}/sweep.png"]
    assert printed[-6].split() == list(table)
    run_app("evaluate -m kernel=elu approximation=exact,linear_attention", root)
    assert pd.read_csv(folder / "sweep.csv")["method"].tolist() == ["exact", "linear_attention"]
    assert not (folder / "sweep.png").exists()  # no method with r


def test_rows_are_compared_with_their_own_exact_attention() -> None:
    numbers = {"low": 1.0, "high": None, "count": 9}
    exact = {"approximation": "exact", "kernel": "elu", "metric": "error_percent", **numbers}
    jobs = [
        {
            "row": [*{"model": model, "approximation": "random_keys", "r": 2, "value": 6}.items()],
            "exact": exact | {"model": model, "value": value},
            "overrides": [],
        }
        for model, value in (("a", 3.0), ("b", 2.0), ("a", 3.0), ("c", 0.0))
    ]
    jobs += [{"row": [["model", "d"]], "overrides": []}, {"failure": "it", "overrides": []}]
    rows = job_rows(json.loads(json.dumps(jobs)))
    assert [row["model"] for row in rows] == ["a", "a", "b", "b", "a", "c", "c", "d"]
    assert [row.get("times_exact") for row in rows] == [1, 2, 1, 3, 2, None, None, None]
    assert picture_of(rows[-1:]) is None
    assert picture_of(
        [rows[1] | numbers | {"low": -1.0}]
    )  # an interval that a logarithm cannot show


def swept(*jobs: tuple[list[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of jobs with these overrides and columns, compared with exact attention."""
    row = {"model": "causal_elu", "approximation": "optimal_v_aware", "r": 4, "value": 6.0}
    row |= {"low": 5.0, "high": None, "count": 9}
    exact = row | {"approximation": "exact", "kernel": "elu", "metric": "perplexity", "value": 3.0}
    files = [
        {"overrides": given, "row": [*(row | columns).items()], "exact": exact | {"r": None}}
        for given, columns in jobs
    ]
    return job_rows(json.loads(json.dumps(files)))


@pytest.mark.parametrize(
    ("key", "values", "columns", "shown"),
    [
        ("scale", ("smoke", "laptop"), ({}, {}), ["smoke", "smoke", "laptop", "laptop"]),
        ("approximation.search", ("fast", "best"), ({}, {}), [None, "fast", "best"]),
        ("evaluation.causal_units", (4, 8), ({}, {}), [4, 4, 8, 8]),
        ("evaluation.axes", ("[1,2]", "null"), ({}, {}), ["[1, 2]", "[1, 2]", "null", "null"]),
        ("kernel", ("exponential", "elu"), ({"model": "causal_exponential"}, {}), None),
        ("length", ("short", "long"), ({"model": "masked_short"}, {"model": "masked_long"}), None),
        ("approximation.r", (1, 4), ({"r": 1}, {}), None),
        ("++approximation.seed", (0, 1), ({"seed": 0}, {"seed": 1}), None),
    ],
)
def test_what_was_swept_and_no_column_shows_has_a_column(
    key: str, values: tuple[Any, Any], columns: tuple[Any, Any], shown: list[Any] | None
) -> None:
    same = ["logger=none", "seed=3"]
    rows = swept(*(([*same, f"{key}={v}"], c) for v, c in zip(values, columns, strict=True)))
    first = ["model"] if shown is None else [key, "model"]
    assert [*rows[0]][: len(first)] == first
    assert shown is None or [row[key] for row in rows] == shown


def test_a_swept_key_with_the_name_of_another_column_has_its_own() -> None:
    rows = swept(*(([f"seed={seed}"], {"seed": 7}) for seed in (0, 1)))
    assert [(row["swept_seed"], row["seed"]) for row in rows if row["times_exact"] == 2] == [
        *((0, 7), (1, 7))
    ]


def test_the_picture_has_a_curve_for_each_value_and_the_legend_names_it() -> None:
    given = [(scale, search) for scale in ("smoke", "laptop") for search in ("fast", "best")]
    rows = swept(*(
        ([f"scale={scale}", f"approximation.search={search}"], {"r": r})
        for scale, search in given
        for r in (1, 4)
    ))  # fmt: skip
    cells = [row for row in rows if row["approximation"] != "exact"]
    names = [curve_name(row, cells) for row in cells]
    assert names[::2] == [f"OVA, scale {scale}, search {search}" for scale, search in given]
    drawn = pd.DataFrame([row | {"series": name} for row, name in zip(cells, names, strict=True)])
    marks = {name: oracle_marks(drawn)[name] for name in names}
    assert len(set(marks.values()) | set(ORACLE_MARKS.values())) == len(marks) + 2 == 6
    assert curve_name(cells[0], cells[:1]) == "chosen for the output (OVA)"
    assert picture_of(rows).startswith(b"\x89PNG")


@pytest.mark.parametrize("where", ["", "hydra.sweep.dir=/proc/nowhere", "hydra.sweep.dir={}/text"])
def test_a_sweep_whose_folder_is_taken_or_takes_nothing_is_one_line(root: Path, where: str) -> None:
    (root / "text").touch()
    with held(root / "logs/hydra/evaluate/jobs"):
        line = refusal(f"{SWEEP}1,4 {where.format(root)}", root)
    if not where:
        assert "belongs to a sweep that is still going: wait for it, or give this one a" in line


def test_jobs_of_a_killed_sweep_are_not_those_of_the_next(tmp_path: Path) -> None:
    hydra = {"mode": RunMode.MULTIRUN, "sweep": {"dir": str(tmp_path)}, "job": {"num": 0}}
    hydra |= {"launcher": {"_target_": "basic"}, "overrides": {"task": []}}
    config = OmegaConf.create({"hydra": hydra})
    killed, sweep, done = SweepTable(), SweepTable(), JobStatus.COMPLETED
    killed.on_multirun_start(config)
    line = r"jobs belongs to a sweep .*hydra\.sweep\.dir=FOLDER"
    assert_refused(line, SweepTable().on_multirun_start, config, error=SystemExit)
    in_another_process = pickle.loads(pickle.dumps(killed))
    killed.lock.close()
    sweep.on_multirun_start(config)
    for table, model in ((sweep, "new"), (in_another_process, "old")):
        table.on_job_start(config)
        table.on_job_end(config, JobReturn(_return_value={"model": model}, status=done))
    sweep.on_multirun_end(config)
    assert pd.read_csv(tmp_path / "sweep.csv")["model"].tolist() == ["new"]


def test_values_of_a_sweeper_are_refused_on_the_command_line(root: Path) -> None:
    for key in ("hydra.sweeper.params", "+hydra.sweeper.params"):
        line = refusal(f"{SWEEP}1 {key}={{approximation.r:'1,4'}}", root)
        assert "hydra.sweeper.params is read from a config file alone; on the command line" in line


def test_bad_cells_are_named_with_tracebacks_of_ours_and_the_others_are_a_table(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = import_module("pipelines.evaluate")
    whole = app.evaluate

    def broken(cfg: Any, device: str) -> Any:
        return {}["missing"] if cfg.approximation.r < 4 else whole(cfg, device)

    monkeypatch.setattr(app, "evaluate", broken)
    first, wrong, second = ended(f"{SWEEP}1,0,2,4", root)
    assert first.startswith("error: approximation.r=1: KeyError") and "missing" in first
    assert wrong == (
        "error: approximation.r=0: approximation.r is 0; it must be a whole number of at least 1"
    )
    assert second.startswith("error: approximation.r=2: KeyError")
    printed = capfd.readouterr()
    assert printed.err.count("Traceback") == 2
    assert printed.out.splitlines()[-3].split()[3] == "4"


def test_a_sweep_is_ended_by_hand_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def interrupted(cfg: Any, device: str) -> None:
        asked.append(cfg.approximation.r)
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("pipelines.evaluate"), "evaluate", interrupted)
    assert ended(f"{SWEEP}1,4", root) == ["error: interrupted"]
    assert asked == [1]


def test_apps_without_a_table_name_their_jobs_too(root: Path) -> None:
    lengths = "causal.length=1000000,2000000"  # the text has less: known once it is read
    (line, _) = ended(f"train_causal -m kernel=elu {lengths} logger=none seed=1", root)
    assert line.startswith("error: causal.length=1000000: ") and "too few for length" in line


@pytest.mark.slow
@pytest.mark.skipif(find_spec("submitit") is None, reason="needs requirements-cluster.txt")
def test_a_job_that_is_killed_is_named_and_the_others_are_waited_for(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = "value_aware_attention.approximations.OptimalValueOblivious"
    targets = f"approximation._target_=tests.training.processes.kill,nowhere.Nothing,{kept}"
    killed, refused = ended(f"{SWEEP}4 {targets} hydra/launcher=submitit_local", root)
    assert killed.startswith("error: approximation._target_=tests.training.processes.kill: its pro")
    assert refused.startswith("error: approximation._target_=nowhere.Nothing: ")
    assert len(list(Path(killed.rpartition(" ")[2]).glob("*/*_log.err"))) == 3
    *_, row = (line for line in capfd.readouterr().out.splitlines() if kept in line)
    assert "optimal_v_oblivious" in row and "4" in row.split()


FEW = (
    "grid.keys=[1,4]", "grid.value_aware_keys=[1,4]", "grid.window_keys=[]",
    "grid.baseline_keys=[]", "grid.sampled_keys=[]",
)  # fmt: skip


class Run:
    """Stands for a W&B run and remembers its logs and summary."""

    def __init__(self) -> None:
        self.history: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        last = max(self.history, default=0)
        assert step is None or step > last  # W&B drops what goes back
        self.history.setdefault(step or last, {}).update(values)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Run]:
    """Collects the runs that apps start."""
    write_run(tmp_path)
    made: list[Run] = []

    def start(**settings: Any) -> Run:
        run = Run()
        run.define_metric = run.finish = lambda *_, **__: None
        run.name, run.tags, run.group = (settings[key] for key in ("name", "tags", "group"))
        run.config = SimpleNamespace(update=lambda values, **options: run.facts.update(values))
        run.settings = wandb.Settings(mode="offline")
        made.append(run)
        return run

    monkeypatch.setattr(tracking, "wandb_run", start)
    return made


def test_an_evaluation_logs_its_curves_against_r_and_a_summary(
    runs: list[Run], tmp_path: Path
) -> None:
    run_app(" ".join(["evaluate", "kernel=elu", "logger=wandb", *FEW]), tmp_path)
    (run,) = runs
    assert run.name == "evaluate/causal_elu" and run.tags == ["evaluate", "smoke", "elu"]
    assert list(run.history) == [1, 4]
    assert set(run.history[4]) == {
        f"{measured}/{method}"
        for measured in ("perplexity", "output_error")
        for method in ("OVO", "OVA")
    }
    compared = {f"perplexity_{name}" for name in ("exact", "OVO_1", "OVO_4", "OVA_1", "OVA_4")}
    assert set(run.summary) == {*compared, "match_4_keys", "grid"}
    assert run.summary["perplexity_OVA_4"] == run.history[4]["perplexity/OVA"]
    assert {"perplexity", "output_error"} <= set(run.summary["grid"].columns)
    assert len(run.facts["checkpoint_sha256"]) == len(run.facts["data_sha256"]) == 64


def sweep_axes() -> dict[str, list[Any]]:
    sweep = plain(OmegaConf.create((ROOT / "sweep.yaml").read_text().replace("${", "$\\{")))
    return {name: axis["values"] for name, axis in sweep["parameters"].items()}


@pytest.mark.parametrize(
    "file", ["docs/compare-runs.md", "pipelines/evaluate.py", "conf/evaluate.yaml"]
)
def test_the_sweep_is_that_of_the_multirun(file: str) -> None:
    text = re.sub(r"\\+\n\s*", "", (ROOT / file).read_text())
    (command,) = re.findall(r"python -m pipelines\.evaluate -m (kernel=.*)", text)
    axes = [pair.partition("=") for pair in command.split()]
    assert {name: values.split(",") for name, _, values in axes} == {
        name: [*map(str, values)] for name, values in sweep_axes().items()
    }


def test_every_value_of_the_sweep_is_a_cell() -> None:
    """Other axes keep their first values: composing every combination takes half a minute."""
    axes = sweep_axes()
    first = [values[0] for values in axes.values()]
    cells = {
        (*first[:place], value, *first[place + 1 :])
        for place, values in enumerate(axes.values())
        for value in values
    }
    for values in cells:
        chosen = [f"{name}={value}" for name, value in zip(axes, values, strict=True)]
        section = composed("evaluate", ["model=causal", *chosen, "scale=smoke"]).evaluate
        assert setting(values[1], plain(section.approximation)).build(0).r == values[2]


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf/experiment").iterdir()))
def test_a_preset_sweeps_cells_and_that_of_readme_is_the_sweep(name: str) -> None:
    chosen = [f"experiment={name}"]
    hydra = composed("evaluate", chosen, return_hydra_config=True).hydra
    axes = {key: str(values).split(",") for key, values in hydra.sweeper.params.items()}
    assert hydra.mode == RunMode.MULTIRUN
    assert name != "r_and_kernels" or axes == {
        key: [*map(str, values)] for key, values in sweep_axes().items()
    }
    for place in (0, -1):
        job = [*(f"{key}={values[place]}" for key, values in axes.items()), *chosen]
        section = composed("evaluate", job, app="evaluate").evaluate
        method = setting("a cell", plain(section.approximation)).build(0)
        assert method.r == int(axes["approximation.r"][place])


@pytest.mark.slow
def test_a_preset_runs_by_its_name_and_a_given_value_replaces_its_own(root: Path) -> None:
    run_app("evaluate -m experiment=r_and_kernels kernel=elu", root)
    table = pd.read_csv(root / "logs/hydra/evaluate/sweep.csv").fillna({"r": 0})
    methods = ("optimal_v_oblivious", "optimal_v_aware", "sliding_window")
    assert [*zip(table["method"], table["r"], strict=True)] == [
        *(("exact", 0), *((method, r) for method in methods for r in (1, 4, 16, 65)))
    ]
    run_app("evaluate -m experiment=r_and_kernels kernel=elu approximation.r=2,3", root)
    assert set(pd.read_csv(root / "logs/hydra/evaluate/sweep.csv")["r"].dropna()) == {2, 3}


def test_the_workspace_draws_methods_together_and_what_has_another_unit_apart() -> None:
    workspace = import_module("pipelines.workspace")  # it warns of pydantic's old validators
    made = workspace.built("someone", "value-aware-attention")
    against_r, compared, training = made.sections
    assert against_r.name == "Loss against r" and against_r.is_open
    logged = ["perplexity/OVO", "error_percent/window", "output_error/OVA", "evaluation/perplexity"]
    drawn = [[*filter(re.compile(plot.metric_regex).match, logged)] for plot in against_r.panels]
    assert drawn == [[name] for name in logged[:3]]
    assert all(plot.log_x for plot in against_r.panels)
    units = [{name.rpartition("/")[2] for name in plot.y} for plot in training.panels]
    assert {"loss"} in units and {"learning_rate"} in units and {"tokens_per_second"} in units
    assert not any(plot.metric_regex for plot in training.panels)
    names = [column.metric.name for column in compared.panels[0].columns]
    assert names[0] == "perplexity_exact" and names[-1] == "match_4_keys"


def test_a_workspace_without_an_account_is_refused(tmp_path: Path) -> None:
    assert_refused(
        r"^error: workspace\.entity is not set", run_app, "workspace", tmp_path, error=SystemExit
    )


def linked(mode: str, how: str, sha256: str) -> list[wandb.Artifact]:
    """Returns what a run in this mode is linked to."""
    artifacts: list[wandb.Artifact] = []
    run = SimpleNamespace(settings=wandb.Settings(mode=mode), **{how: artifacts.append})
    tracking.link(run, how, "data", sha256)
    return artifacts


def test_what_was_read_and_made_is_linked_by_its_content_where_wandb_is_online() -> None:
    assert not linked("offline", "use_artifact", "ab12")  # W&B keeps no lineage of such runs
    (artifact,) = linked("online", "use_artifact", "ab12")
    assert (artifact.type, artifact.metadata) == ("data", {"sha256": "ab12"})
    first, same, other = (
        linked("online", "log_artifact", sha256)[0].digest for sha256 in ("ab12", "ab12", "cd34")
    )
    assert first == same != other


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Unsets every variable of W&B, for the time of a test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in (*tracking.OF_HOME, "WANDB_SILENT"):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.slow
def test_wandb_writes_below_the_logs_alone(unset: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test starts a process, as W&B reads its variables once."""
    unset.setenv("HOME", "/proc")  # where nobody can write
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        unset.delenv(name, raising=False)
    code = f"""
import wandb
from pipelines.app.tracking import wandb_run
run = wandb_run(project="p", group="g", mode="offline", dir={str(tmp_path / "logs")!r})
run.summary.update({{"grid": wandb.Table(columns=["r"], data=[[1]])}})
run.finish()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    made = {path.name for path in (tmp_path / "logs").iterdir()}
    assert made == {"wandb", *tracking.OF_HOME.values()}


@pytest.mark.parametrize(
    ("variables", "settings", "line"),
    [
        ({"WANDB_MODE": "nope"}, {"mode": "nope"}, "^WANDB_MODE is nope; it must be 'online'"),
        ({"WANDB_SILENT": "abc"}, {}, "^WANDB_SILENT is abc; it must be a valid boolean"),
        ({"WANDB_BASE_URL": "x"}, {}, "^WANDB_BASE_URL is x; it must be a valid URL"),
        ({"WANDB_PROJECT": "a/b"}, {}, "^WANDB_PROJECT: W&B starts no run: Invalid project name"),
        ({"WANDB_RUN_ID": "a/b"}, {}, "^WANDB_RUN_ID: W&B starts no run: Run ID cannot contain"),
        ({}, {"mode": "nope"}, "^logger.mode is nope; it must be 'online'"),
        ({}, {"mode": "online"}, "^logger: W&B starts no run: No API key .*; logger=none does"),
        ({}, {"project": "a?b"}, "^logger: W&B starts no run: Invalid project name 'a[?]b'"),
    ],
)
def test_what_wandb_refuses_is_named(
    unset: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    settings: dict[str, str],
    line: str,
) -> None:
    wandb.teardown()  # it reads its variables once
    for name, value in ({"HOME": str(tmp_path)} | variables).items():  # without an account
        unset.setenv(name, value)
    assert_refused(
        line,
        tracking.wandb_run,
        **{"project": "p", "group": "g", "mode": "offline", "dir": str(tmp_path)} | settings,
    )


def test_a_cell_of_a_sweep_is_named_after_it(
    runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = "evaluate kernel=elu logger=wandb approximation=optimal_v_oblivious approximation.r="
    run_app(f"{cell}4", tmp_path)
    run_app(f"-m {cell}1,4".replace("-m evaluate", "evaluate -m"), tmp_path)
    monkeypatch.setenv("WANDB_SWEEP_ID", "ab12")
    run_app(f"{cell}4", tmp_path)
    metric = OmegaConf.load(ROOT / "sweep.yaml").metric.name
    assert runs[0].summary[metric] == runs[0].summary["perplexity_OVO_4"]
    assert "output_error" in runs[0].summary
    assert [(run.name, run.group) for run in runs] == [
        ("evaluate/causal_elu OVO r=4", "smoke"),
        ("evaluate/causal_elu OVO r=1", "smoke sweep"),
        ("evaluate/causal_elu OVO r=4", "smoke sweep"),
        ("sweep/causal_elu", "smoke sweep"),
        ("evaluate/causal_elu OVO r=4", "smoke sweep"),
    ]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (
            "train_causal -m kernel=exponential,polynomial optimizer@causal.optimizer=adamw,muon "
            "causal.schedule.peak=0.5,1.5 causal.dropout=0.10",
            [
                f"train/causal_{kernel} optimizer={optimizer} peak={peak}"
                for kernel in ("exponential", "polynomial")
                for optimizer in ("adamw", "muon")
                for peak in (0.5, 1.5)
            ],
        ),
        (
            "evaluate -m kernel=elu approximation=random_keys approximation.r=1,2 "
            "evaluation.batch_size=2,4",
            [
                *(
                    f"evaluate/causal_elu random_keys r={r} seed=0 batch_size={size}"
                    for r in (1, 2)
                    for size in (2, 4)
                ),
                *(f"sweep/causal_elu batch_size={size}" for size in (2, 4)),
            ],
        ),
    ],
)
def test_jobs_of_a_sweep_are_named_after_what_it_varies(
    runs: list[Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    names: list[str],
) -> None:
    training = import_module("pipelines.app.training")
    monkeypatch.setattr(training, "fit", lambda *_, **__: None)
    monkeypatch.setattr(training, "StepLogger", lambda **_: None)
    monkeypatch.setattr(training, "file_hash", lambda *_: "")
    run_app(f"{command} logger=wandb", tmp_path)
    assert [run.name for run in runs] == names
    assert {run.group for run in runs} == {"smoke sweep"}


@pytest.mark.parametrize(
    ("app", "chosen", "tags"),
    [
        ("train_causal", ["kernel=elu"], ["train", "laptop", "elu"]),
        ("train_masked", ["length=short"], ["train", "laptop", "exponential"]),
        ("probe", ["probe.model=x", "probe.text=x"], ["train", "laptop"]),
    ],
)
def test_runs_are_tagged_with_their_scale_and_kernel(
    runs: list[Run], app: str, chosen: list[str], tags: list[str]
) -> None:
    section = composed(app, [*chosen, "logger=wandb", "scale=laptop"])[app]
    with tracking.tracked(section.copy(), "train", "masked_short_sliding_window"):
        pass
    (run,) = runs
    assert run.tags == tags
    assert run.name == "train/masked_short_sliding_window"  # a model's own name


def test_offline_files_hold_every_row_and_the_curves_of_a_sweep(tmp_path: Path) -> None:
    write_run(tmp_path)
    offline = "logger=wandb logger.mode=offline"
    run_app(" ".join(["evaluate", "kernel=elu", offline, *FEW]), tmp_path)
    run_app(f"{SWEEP}1,4 {offline}", tmp_path)
    record = json.loads((tmp_path / "outputs/smoke/records/causal_elu.json").read_text())
    runs, folder = tmp_path / "logs/wandb", tmp_path / "logs/hydra/evaluate"
    tables = [
        json.loads(file.read_text()) for file in runs.glob("offline-run-*/files/media/table/*")
    ]
    assert sorted(len(table["data"]) for table in tables) == [2, 2, len(record["cells"])]
    (image,) = runs.glob("offline-run-*/files/media/images/sweep*.png")
    assert image.read_bytes() == (folder / "sweep.png").read_bytes()
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(runs / "latest-run")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in lines.splitlines()]
    assert {r["run"]["display_name"] for r in records if "run" in r} == {"sweep/causal_elu"}
    logged = [record["history"] for record in records if "history" in record]
    curve = {step["step"]["num"]: step["item"]["perplexity/OVO"] for step in logged}
    cells = pd.read_csv(folder / "sweep.csv").iloc[1:].set_index("r")
    assert curve == pytest.approx(cells["perplexity"].to_dict()) and set(curve) == {1, 4}


def test_the_page_is_logged_offline_as_images_and_tables(tmp_path: Path) -> None:
    data = pd.DataFrame({"claim": ["one", "other"], "estimate": [0.5, None], "seeds": ["", 2]})
    table = Table(data, data.astype(str))
    Image.new("RGB", (2, 2)).save(tmp_path / "figure_1.png")
    exhibits = [
        Exhibit("figure_1", "A figure", "", charts=[{}], table=table),
        Exhibit("findings", "Findings", "", table=table),
    ]
    page = Page("?", "", [Section("answer", "Answer", "", exhibits)])
    run = tracking.wandb_run(project="p", group="g", mode="offline", dir=str(tmp_path))
    tracking.log_page(run, page, tmp_path)
    run.finish()
    media = {
        file.parent.name: file for file in tmp_path.glob("wandb/offline-run-*/files/media/*/*/*")
    }
    assert media["figures"].name.startswith("figure_1") and media["figures"].suffix == ".png"
    (logged,) = tmp_path.glob("wandb/offline-run-*/files/media/table/tables/findings*.table.json")
    assert json.loads(logged.read_text())["data"] == [["one", 0.5, ""], ["other", None, 2]]
    tracking.log_page(None, page, tmp_path)  # logger=none
