"""Ends a multirun with a table of its jobs' results, and a line for every job that failed."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from pipelines.app.errors import Failure
from pipelines.app.hydra_app import write_json


class SweepTable(Callback):
    """Prints the rows that the jobs of a multirun returned; failed ones end it with exit code 1.

    Jobs may run in other processes, or on other machines (hydra/launcher=submitit_slurm): each
    leaves a file in the sweep's folder, at its start already, so that one that dies is named too.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Forgets the sweep before."""
        shutil.rmtree(jobs_folder(config), ignore_errors=True)
        self.lost: list[str] = []
        if "submitit" in config.hydra.launcher._target_:
            wait_for_every_job(self.lost)

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Leaves the outcome of a job that dies, until its end replaces it."""
        if config.hydra.mode == RunMode.MULTIRUN:
            log = f"{config.hydra.sweep.dir}/.submitit"
            leave(config, {"failure": f"its process died; its log is in {log}"})

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Leaves the row that a job returned, its columns in order, or why there is none."""
        if config.hydra.mode == RunMode.MULTIRUN:
            result = job_return.return_value
            row = list(result.items()) if isinstance(result, dict) else []
            leave(config, {"failure": result} if isinstance(result, Failure) else {"row": row})

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Prints the table, then a line for every failed job: the overrides of its own, and why."""
        import pandas as pd

        files = sorted(jobs_folder(config).glob("*.json"), key=lambda file: int(file.stem))
        jobs = [json.loads(file.read_text()) for file in files]
        if rows := [dict(job["row"]) for job in jobs if job.get("row")]:
            print(pd.DataFrame(rows).to_string(index=False, float_format="{:.4g}".format))
        failed = [
            f"{' '.join(own_overrides(job, config))}: {job['failure']}"
            for job in jobs
            if "failure" in job
        ]
        if failed or self.lost:
            sys.stdout.flush()
            sys.exit("\n".join(f"error: {line}" for line in failed or self.lost))


def jobs_folder(config: DictConfig) -> Path:
    return Path(config.hydra.sweep.dir) / "jobs"


def leave(config: DictConfig, outcome: dict[str, object]) -> None:
    job = {"overrides": list(config.hydra.overrides.task), **outcome}
    write_json(jobs_folder(config) / f"{config.hydra.job.num}.json", job)


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
