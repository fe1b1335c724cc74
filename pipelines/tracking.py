"""Weights & Biases, offline by default. Curves and browsing live there; results never do."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import plain, write_json


@contextmanager
def tracked(cfg: DictConfig, stage: str, name: str, **facts: Any) -> Iterator[Any]:
    """A W&B run named after the stage's output, with the config and `facts` (hashes) attached.

    Yields None where the logger is `none`. The run is finished whatever happens, and as failed
    after an exception.
    """
    run = instantiate(cfg.run, job_type=stage, name=name)
    if run is None:
        yield None
        return
    run.config.update(plain(cfg) | facts, allow_val_change=True)
    try:
        yield run
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def wandb_run(*, project: str, group: str, mode: Any, dir: str, job_type: str, name: str) -> Any:
    """Starts a run; with mode "offline" no account and no network are needed."""
    import wandb

    Path(dir).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_SILENT", "true")
    return wandb.init(
        project=project, group=group, mode=mode, dir=dir, job_type=job_type, name=name
    )


def no_run(**settings: Any) -> None:
    """Nothing is logged."""


class ResultsTable(Callback):
    """Prints what the jobs of a multirun returned as one table.

    Jobs may run in other processes, or on other machines (hydra/launcher=submitit_slurm): each
    leaves its row in the sweep's folder.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Forgets the rows of the sweep before."""
        shutil.rmtree(rows_folder(config), ignore_errors=True)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Keeps the row that a job returned."""
        of_a_sweep = config.hydra.mode == RunMode.MULTIRUN
        row = job_return.return_value if job_return.status.name == "COMPLETED" else None
        if of_a_sweep and isinstance(row, dict):
            write_json(rows_folder(config) / f"{config.hydra.job.num}.json", list(row.items()))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Prints the table."""
        import pandas as pd

        files = sorted(rows_folder(config).glob("*.json"), key=lambda file: int(file.stem))
        if rows := [dict(json.loads(file.read_text())) for file in files]:
            print(pd.DataFrame(rows).to_string(index=False, float_format="{:.4g}".format))


def rows_folder(config: DictConfig) -> Path:
    return Path(config.hydra.sweep.dir) / "rows"
