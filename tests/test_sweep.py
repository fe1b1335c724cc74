"""A sweep leaves a table and a picture; when jobs fail, the others run, and these are named."""

import json
import pickle
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf

from pipelines.app.sweep import SweepTable, curve_name, job_rows, picture_of
from tests.apps import refusal, run_app, write_run
from value_aware_attention.files import held
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
    with pytest.raises(SystemExit, match=r"jobs belongs to a sweep .*hydra\.sweep\.dir=FOLDER"):
        SweepTable().on_multirun_start(config)
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
