"""Tracks runs in Weights & Biases, offline by default: curves to browse, never results."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app.hydra_app import plain
from pipelines.app.summary import row, summary
from value_aware_attention.measurement import Record

OF_HOME = {"WANDB_DATA_DIR": "wandb_data", "WANDB_CACHE_DIR": "wandb_cache"}
"""Variables that name W&B's folders, else in the user's home, and their names below logs."""


@contextmanager
def tracked(cfg: DictConfig, stage: str, name: str, **hashes: str) -> Iterator[Any]:
    """Opens a W&B run named <stage>/<name>, with the config and sha256 hashes of what it read.

    Yields None where the logger is `none`, and in every process but the first. The run is finished
    whatever happens, and as failed after an exception. Online, what was read is linked as artifacts
    of those hashes, so that the runs that made it are found.
    """
    tags = [str(tag) for tag in (stage, cfg.get("scale"), cfg.get("kernel")) if tag]
    named = {"job_type": stage, "name": f"{stage}/{name}", "tags": tags}
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        named["group"] = f"{cfg.run.get('group')} sweep"
    run = instantiate(cfg.run, **named)
    if run is None:
        yield None
        return
    facts = {f"{key}_sha256": value for key, value in hashes.items()}
    run.config.update(plain(cfg) | facts, allow_val_change=True)
    for key, value in hashes.items():
        link(run, "use_artifact", key, value)
    try:
        yield run
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def link(run: Any, how: str, kind: str, sha256: str) -> None:
    """Names what a run read (`use_artifact`) or made (`log_artifact`) by its content.

    W&B keeps no lineage of runs that are offline; their configs have the hashes.
    """
    if run.settings.mode != "online":
        return
    import wandb

    artifact = wandb.Artifact(kind, type=kind, metadata={"sha256": sha256})
    with artifact.new_file("sha256.txt") as file:
        file.write(sha256)
    getattr(run, how)(artifact)


def log_record(run: Any, record: Record) -> None:
    """Logs the curves of every method against its number of keys, the grid, and the summary.

    That number is the cell's budget, where it has one, or its r, where it has no other argument.
    """
    if run is None:
        return
    import pandas as pd
    import wandb

    for prefix in (record.metric, "relative output error"):
        run.define_metric(f"{prefix}/*", summary="none")  # the last r is not the finding
    log_curves(
        run,
        (
            (
                cell.budget or cell.parameters["r"],
                cell.approximation,
                {
                    record.metric: cell.value,
                    "relative output error": cell.error.relative if cell.error else None,
                },
            )
            for cell in record.cells
            if cell.budget or set(cell.parameters) == {"r"}
        ),
    )
    rows = pd.DataFrame([row(record, cell) for cell in record.cells])
    if len(record.cells) == 2:  # one cell of a sweep, and exact attention
        run.summary.update({key: rows[key].iloc[1] for key in ("value", "relative_output_error")})
    run.summary.update(summary(record) | {"grid": wandb.Table(dataframe=rows.astype(object))})


def log_curves(run: Any, points: Iterable[tuple[float, str, Mapping[str, float | None]]]) -> None:
    """Logs (number of keys, method, its numbers by name) as a curve a number and method.

    The step of a row is the number of keys, by which every reader of W&B draws.
    """
    by_keys: dict[int, dict[str, float]] = {}
    for keys, method, numbers in points:
        found = by_keys.setdefault(int(keys), {})
        found |= {f"{name}/{method}": one for name, one in numbers.items() if one is not None}
    for keys in sorted(by_keys) if run else ():
        run.log(by_keys[keys], step=keys)


def record_made(
    cfg: DictConfig, stage: str, read: Mapping[str, str], kind: str, made: Sequence[str]
) -> None:
    """Tells W&B, where it is online, what a stage read and the artifacts it made, by sha256.

    Offline there is no lineage, and no run for what logs nothing.
    """
    if (cfg.run or {}).get("mode") != "online":
        return
    with tracked(cfg, stage, stage, **read) as run:
        for sha256 in made:
            link(run, "log_artifact", kind, sha256)


def wandb_run(*, project: str, group: str, mode: Any, dir: str, **named: Any) -> Any:
    """Starts a run; with mode "offline" no account and no network are needed.

    What W&B keeps beside a run lies below `dir` too: a home that cannot be written would end a
    stage after its work. Raises ValueError, in one line, where W&B refuses.
    """
    folder = Path(dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    given = [name for name in os.environ if name.startswith("WANDB_") and name not in OF_HOME]
    for variable, name in OF_HOME.items():
        os.environ.setdefault(variable, str(folder / name))
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb
    from pydantic import ValidationError

    try:
        return wandb.init(project=project, group=group, mode=mode, dir=str(folder), **named)
    except ValidationError as error:
        first = error.errors()[0]
        key, said = str(first["loc"][0]), first["msg"].replace("Input should be", "it must be", 1)
        variable = f"WANDB_{key.upper()}"
        name = variable if variable in given else f"logger.{key}"
        raise ValueError(f"{name} is {first['input']}; {said}") from None
    except wandb.Error as error:
        said = " ".join(str(error).split()).rstrip(".")
        about = ", ".join(given) or "logger"
        raise ValueError(f"{about}: W&B starts no run: {said}; logger=none does without") from None


def no_run(**settings: Any) -> None:
    """Starts no run: the logger `none`."""
