"""Ends a multirun with a table and a picture of its jobs' results, and a line for every failure."""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from pipelines.app.errors import Failure, ending_with_one_line
from pipelines.app.hydra_app import parse, write_json
from pipelines.app.job import EXACT_ROW, SWEPT
from value_aware_attention.files import held, new_files

if TYPE_CHECKING:
    import pandas as pd

TABLE_FILE, PICTURE_FILE = "sweep.csv", "sweep.png"
SWEEP_COLUMNS = {
    "approximation": "method",
    "value": "{}",
    "low": "{}_low_95",
    "high": "{}_high_95",
    "count": "targets",
    "relative_output_error": "output_error",
}
"""Key of a row -> its column; {} is the metric's name, which has the unit."""


class SweepTable(Callback):
    """Prints and stores the rows of a multirun's jobs; if a job fails, it ends with code 1.

    Jobs may run in other processes, or on other machines (hydra/launcher=submitit_slurm): each
    writes a file into a folder of this sweep when it starts, so that a job that dies is named too.
    A lock keeps other sweeps out of the folder meanwhile. Hydra only warns about an error in a
    callback, so errors end the program here.
    """

    def __getstate__(self) -> dict[str, Any]:
        # the lock stays in the process that launches the jobs
        return {"jobs": self.jobs, "shared": self.shared}

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Takes the sweep's folder, and removes the previous sweep."""
        # jobs of a killed sweep may still run, and know only their own folder
        self.jobs = Path(config.hydra.sweep.dir, "jobs", uuid4().hex[:12])
        self.lock, self.lost = ExitStack(), list[str]()
        self.shared = {
            override.get_key_element()
            for override in parse(config.hydra.overrides.task)
            if not override.is_sweep_override()
        }
        with ending_with_one_line():
            self.lock.enter_context(
                held(self.jobs.parent, "a sweep", "give this one a folder: hydra.sweep.dir=FOLDER")
            )
            shutil.rmtree(self.jobs.parent, ignore_errors=True)
            self.jobs.mkdir(parents=True)
            for name in (TABLE_FILE, PICTURE_FILE):
                Path(config.hydra.sweep.dir, name).unlink(missing_ok=True)
        if "submitit" in config.hydra.launcher._target_:
            wait_for_every_job(self.lost)

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Writes the outcome of a job that dies; the job's end replaces it."""
        EXACT_ROW.clear()
        SWEPT[:] = [
            text.lstrip("+")
            for text in config.hydra.overrides.task
            if config.hydra.mode == RunMode.MULTIRUN and text.partition("=")[0] not in self.shared
        ]
        self.leave(
            config.hydra,
            failure=f"its process died; its log is in {config.hydra.sweep.dir}/.submitit",
        )

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Writes the row that a job returned, its columns in order, or why there is none."""
        result = job_return.return_value
        self.leave(
            config.hydra,
            row=list(result.items()) if isinstance(result, dict) else [], exact=EXACT_ROW,
            failure=result if isinstance(result, Failure) else None,
        )  # fmt: skip

    def leave(self, hydra: Any, **outcome: object) -> None:
        """Writes the outcome of a multirun's job; a single job has none."""
        if hydra.mode == RunMode.MULTIRUN:
            with ending_with_one_line():
                write_json(
                    self.jobs / f"{hydra.job.num}.json",
                    {"overrides": list(hydra.overrides.task), "swept": SWEPT, **outcome},
                )

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Prints the table, then a line for every failed job: its own overrides, and the reason."""
        SWEPT.clear()
        with self.lock, ending_with_one_line():
            jobs = [
                json.loads(file.read_text())
                for file in sorted(self.jobs.glob("*.json"), key=lambda file: int(file.stem))
            ]
            if rows := job_rows(jobs):
                keep(rows, Path(config.hydra.sweep.dir))
                track(rows, config)
        failed = [
            f"{' '.join(job['swept'] or job['overrides'])}: {job['failure']}"
            for job in jobs
            if job.get("failure")
        ]
        if failed or self.lost:
            sys.stdout.flush()
            sys.exit("\n".join(f"error: {line}" for line in failed or self.lost))


def job_rows(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lists the rows of jobs; exact attention's row comes before the first job compared with it.

    Swept keys that no column shows get their own columns, before the others.
    """
    rows: list[dict[str, Any]] = []
    for job, hidden in zip(jobs, hidden_values(jobs), strict=True):
        row, exact = dict(job.get("row") or ()), job.get("exact")
        if exact and "value" in row:
            of_method = {key: None for key in hidden if key.startswith("approximation.")}
            exact_row = hidden | of_method | beside(dict.fromkeys(row) | exact, exact)
            rows += [] if exact_row in rows else [exact_row]
            row = {} if row["approximation"] == "exact" else beside(row, exact)
        rows += [hidden | row] if row else []
    return rows


def hidden_values(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns, for each job, its values of the keys that differ between jobs and have no column.

    A key that is the name of another column has swept_ before it.
    """
    values = [
        {
            override.get_key_element().lstrip("+"): override.value()
            for override in OverridesParser.create().parse_overrides(job["overrides"])
        }
        for job in jobs
    ]
    rows = [dict(job.get("row") or ()) for job in jobs]
    hidden = {
        key: f"swept_{key}" if any(key in row for row in rows) else key
        for key in dict.fromkeys(key for of_job in values for key in of_job)
        if len({repr(of_job.get(key)) for of_job in values}) > 1
        and not all(
            shows(row, key, of_job.get(key))
            for row, of_job in zip(rows, values, strict=True)
            if row
        )
    }
    return [
        {
            column: value
            if isinstance(value := of_job.get(key), str | int | float)
            else json.dumps(value)
            for key, column in hidden.items()
        }
        for of_job in values
    ]


def shows(row: Mapping[str, Any], key: str, value: object) -> bool:
    """Tells whether a row has a swept value under its name, or an option in its model's name."""
    in_model = str(row.get("model")).split("_") if "." not in key else ()
    return str(value) in in_model or row.get(key.rpartition(".")[2], ...) == value


def beside(row: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the kernel, the metric and its ratio to exact attention's to a row."""
    return {
        "model": row["model"],
        "kernel": exact["kernel"],
        **row,
        "times_exact": row["value"] / exact["value"] if exact["value"] else None,
        "metric": exact["metric"],
    }


def keep(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Prints the table, then writes it and its picture beside multirun.yaml, both or neither."""
    table = table_of(rows)
    print(table.to_string(index=False, float_format="{:.4g}".format, na_rep=""))
    drawn = picture_of(rows)
    with new_files(folder, last=TABLE_FILE) as aside:
        table.to_csv(aside / TABLE_FILE, index=False, lineterminator="\n", float_format="%.8g")
        if drawn:
            (aside / PICTURE_FILE).write_bytes(drawn)
    print(folder / TABLE_FILE, *([folder / PICTURE_FILE] if drawn else []), sep="\n")


def track(rows: Sequence[Mapping[str, Any]], config: DictConfig) -> None:
    """Logs the curves of the picture to W&B: a run for each model and each swept value but r."""
    from pipelines.app.tracking import log_sweep

    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("r") and row.get("times_exact"):
            varied = [f"{name}={value}" for name, value in varied_values(row, rows)]
            runs.setdefault(" ".join([row["model"], *varied]), []).append(row)
    for name, of_run in runs.items():
        log_sweep(config, name, of_run, Path(config.hydra.sweep.dir, PICTURE_FILE))


def table_of(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Tabulates rows, the metric under its name, which has the unit."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    if "metric" not in frame:
        return frame
    metric = "_or_".join(frame.pop("metric").unique())
    return frame.rename(
        columns={name: shown.format(metric) for name, shown in SWEEP_COLUMNS.items()}
    )


def picture_of(rows: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Draws the ratio to exact attention against r, a panel per model; None if no row has both."""
    import pandas as pd

    from value_aware_study.report import charts, look

    rows = [row for row in rows if row.get("r") and row.get("times_exact")]
    drawn = pd.DataFrame(
        {
            **row,
            "count": row["r"],
            "series": curve_name(row, rows),
            **{
                end: row[end] and row[end] / row["value"] * row["times_exact"]
                for end in ("value", *charts.END_COLUMNS)
            },
        }
        for row in rows
    )
    if drawn.empty:
        return None
    metric = " or ".join(name.removesuffix("_percent") for name in drawn["metric"].unique())
    named = drawn.assign(name=drawn["model"].str.replace("_", " "))
    panels = charts.against_keys(named, metric)
    return look.png(panels, math.ceil(len(panels) / 3))


def curve_name(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Names the curve of a row: its method, and what distinguishes it from others of its model."""
    from value_aware_study.cards import cards
    from value_aware_study.report.words import ORACLES, plain_text, series_label

    method, label = row["approximation"], series_label(row)
    in_label = cards()[method].curves if method in cards() else ()
    words = [
        f"{plain_text(name)} {value}"
        for name, value in varied_values(row, rows)
        if name not in in_label
    ]
    return ", ".join([label, *words]) if words else ORACLES.get(method, label)


def varied_values(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[str, object]]:
    """Lists the values but r that tell a row from others of its model and method, by name."""
    alike = [
        other
        for other in rows
        if all(other.get(name) == row[name] for name in ("model", "approximation"))
    ]
    return [
        (name.rpartition(".")[2], value)
        for name, value in row.items()
        if name not in {*SWEEP_COLUMNS, "r", "times_exact"}
        and {repr(other.get(name)) for other in alike} != {repr(value)}
    ]


def wait_for_every_job(lost: list[str]) -> None:
    """Lets submitit's launcher continue after a job whose process died; adds the reason to `lost`.

    The launcher itself would stop there, without reporting the later jobs.
    """
    jobs: Any = import_module("submitit").Job
    results = jobs.results

    def outcomes(job: Any) -> list[Any]:
        try:
            return results(job)
        except Exception as error:
            lost.append(str(error).partition("\n")[0])
            return [JobReturn(_return_value=None, status=JobStatus.COMPLETED)]

    jobs.results = outcomes
