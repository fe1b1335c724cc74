"""Ends a multirun with a table and a picture of its jobs' results, and a line for every failure."""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from pipelines.app.errors import Failure, ending_with_one_line
from pipelines.app.hydra_app import write_json

if TYPE_CHECKING:
    import pandas as pd

TABLE, PICTURE = "sweep.csv", "sweep.png"
COLUMNS = {
    "approximation": "method",
    "value": "{}",
    "low": "{}_low_95",
    "high": "{}_high_95",
    "count": "targets",
    "relative_output_error": "output_error",
}
"""Key of a row -> its column; {} is the metric's name, which has the unit."""


class SweepTable(Callback):
    """Prints and keeps the rows that a multirun's jobs returned; failed ones end it with code 1.

    Jobs may run in other processes, or on other machines (hydra/launcher=submitit_slurm): each
    leaves a file in the sweep's folder, at its start already, so that one that dies is named too.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Forgets the sweep before."""
        shutil.rmtree(jobs_folder(config.hydra), ignore_errors=True)
        for name in (TABLE, PICTURE):
            Path(config.hydra.sweep.dir, name).unlink(missing_ok=True)
        self.lost: list[str] = []
        if "submitit" in config.hydra.launcher._target_:
            wait_for_every_job(self.lost)

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Leaves the outcome of a job that dies, until its end replaces it."""
        log = f"{config.hydra.sweep.dir}/.submitit"
        leave(config.hydra, failure=f"its process died; its log is in {log}")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Leaves the row that a job returned, its columns in order, or why there is none."""
        result = job_return.return_value
        row = list(result.items()) if isinstance(result, dict) else []
        leave(config.hydra, row=row, failure=result if isinstance(result, Failure) else None)

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Prints the table, then a line for every failed job: the overrides of its own, and why."""
        files = sorted(jobs_folder(config.hydra).glob("*.json"), key=lambda file: int(file.stem))
        jobs = [json.loads(file.read_text()) for file in files]
        if rows := rows_of(jobs):
            with ending_with_one_line():
                keep(rows, Path(config.hydra.sweep.dir))
        failed = [
            f"{' '.join(own_overrides(job, config))}: {job['failure']}"
            for job in jobs
            if job.get("failure")
        ]
        if failed or self.lost:
            sys.stdout.flush()
            sys.exit("\n".join(f"error: {line}" for line in failed or self.lost))


def jobs_folder(hydra: Any) -> Path:
    return Path(hydra.sweep.dir) / "jobs"


def leave(hydra: Any, **outcome: object) -> None:
    """Adds an outcome to the file of a multirun's job; a single job has none."""
    if hydra.mode == RunMode.MULTIRUN:
        file = jobs_folder(hydra) / f"{hydra.job.num}.json"
        job = json.loads(file.read_text()) if file.exists() else {}
        write_json(file, job | {"overrides": list(hydra.overrides.task)} | outcome)


def rows_of(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lists the rows of jobs, and before the first that is compared with it exact attention's."""
    rows: list[dict[str, Any]] = []
    for job in jobs:
        row, exact = dict(job.get("row") or ()), job.get("exact")
        if exact and "value" in row:
            own = beside(dict.fromkeys(row) | exact, exact)
            rows += [] if own in rows else [own]
            row = {} if row["approximation"] == "exact" else beside(row, exact)
        rows += [row] if row else []
    return rows


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
    from value_aware_attention.files import new_files

    table = table_of(rows)
    print(table.to_string(index=False, float_format="{:.4g}".format, na_rep=""))
    drawn = picture_of(rows)
    with new_files(folder, last=TABLE) as aside:
        table.to_csv(aside / TABLE, index=False, lineterminator="\n", float_format="%.8g")
        if drawn:
            (aside / PICTURE).write_bytes(drawn)
    print(folder / TABLE, *([folder / PICTURE] if drawn else []), sep="\n")


def table_of(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Tabulates rows, the metric under its name, which has the unit."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    if "metric" not in frame:
        return frame
    metric = "_or_".join(frame.pop("metric").unique())
    names = {name: shown.format(metric) for name, shown in COLUMNS.items()}
    return frame.rename(columns=names)


def picture_of(rows: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Draws the ratio to exact attention against r, a panel a model; None where no row has both."""
    import pandas as pd

    from value_aware_study.report import charts, look
    from value_aware_study.report.words import ORACLES, series_label

    drawn = pd.DataFrame(
        {
            **row,
            "count": row["r"],
            "series": ORACLES.get(row["approximation"]) or series_label(row),
            **{
                end: row[end] and row[end] / row["value"] * row["times_exact"]
                for end in ("value", *charts.ENDS)
            },
        }
        for row in rows
        if row.get("r") and row.get("times_exact")
    )
    if drawn.empty:
        return None
    metric = " or ".join(name.removesuffix("_percent") for name in drawn["metric"].unique())
    x, y = (
        charts.count_axis("keys kept, r", drawn["count"].tolist()),
        charts.ratio_axis(charts.direction(f"{metric} / exact attention's", "lower"), drawn),
    )
    panels = [
        charts.figure(
            [*charts.level(1.0), *charts.curves(frame, look.oracle_marks(frame), x, y)],
            model.replace("_", " "),
        )
        for model, frame in drawn.groupby("model", sort=False)
    ]
    return look.png(panels, math.ceil(len(panels) / 3))


def own_overrides(job: dict[str, Any], config: DictConfig) -> list[str]:
    """Returns the overrides that a job does not share with its sweep; all of a single job."""
    shared = set(config.hydra.overrides.task)
    return [text for text in job["overrides"] if text not in shared] or job["overrides"]


def wait_for_every_job(lost: list[str]) -> None:
    """Lets submitit's launcher continue after a job whose process died, and adds why to `lost`.

    The launcher itself would stop there, without a word on the later jobs.
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
