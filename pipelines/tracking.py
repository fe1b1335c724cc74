"""Weights & Biases, offline by default. Curves and browsing live there; results never do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import plain


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
    """Prints what the jobs of a multirun returned as one table."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Keeps the row that a job returned."""
        if job_return.status.name == "COMPLETED" and isinstance(job_return.return_value, dict):
            self.rows.append(job_return.return_value)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Prints the table."""
        import pandas as pd

        if self.rows:
            print(pd.DataFrame(self.rows).to_string(index=False, float_format="{:.4g}".format))
