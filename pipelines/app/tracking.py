"""Tracks runs in Weights & Biases, offline by default: curves to browse, never results."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from pipelines.app.hydra_app import plain
from pipelines.app.job import EXACT_ROW, SWEPT
from pipelines.app.summary import SHORT_NAMES, row, summary
from value_aware_attention.measurement import Record

if TYPE_CHECKING:  # they import W&B and plotting
    from wandb import Run

    from value_aware_study.report.exhibit import Page

OF_HOME = {"WANDB_DATA_DIR": "wandb_data", "WANDB_CACHE_DIR": "wandb_cache"}
"""Variables that name W&B's folders, else in the user's home, and their names below logs."""
LOGGED_NAMES = {
    **SHORT_NAMES,
    "sliding_window": "window",
    "error": "error_percent",
    "relative output error": "output_error",
    "match_4": "match_4_keys",
}
"""Methods and numbers whose names in W&B are others: short, and with the unit."""


@contextmanager
def tracked(cfg: DictConfig, stage: str, name: str, **hashes: str) -> Iterator["Run | None"]:
    """Opens a W&B run named <stage>/<name>, with the config and sha256 hashes of what it read.

    Yields None if the logger is `none`, and in every process but the first. The run is always
    finished; after an exception, as failed. Its tags are stage, scale and kernel. The jobs of a
    sweep are a group, and the name of each has the swept values. Online, inputs are linked as
    artifacts with those hashes, so that the runs that made them are found.
    """
    tags = [
        stage,
        OmegaConf.select(cfg._get_root(), "scale"),
        cfg.get("kernel") or cfg.get("card", {}).get("kernel"),  # a training has it in its card
    ]
    is_sweep = (
        stage == "sweep"
        or "WANDB_SWEEP_ID" in os.environ
        or (HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN)
    )
    words = [*name.split(), *unnamed_values(name)]
    named = {
        "job_type": stage,
        "name": f"{stage}/{' '.join(LOGGED_NAMES.get(word, word) for word in words)}",
        "tags": [tag for tag in tags if isinstance(tag, str)],
        **({"group": f"{cfg.run.get('group')} sweep"} if is_sweep else {}),
    }
    if (run := instantiate(cfg.run, **named)) is None:
        yield None
        return
    run.config.update(
        plain(cfg) | {f"{kind}_sha256": value for kind, value in hashes.items()},
        allow_val_change=True,
    )
    for kind, value in hashes.items():
        link(run, "use_artifact", kind, value)
    try:
        yield run
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def unnamed_values(name: str) -> list[str]:
    """Lists the swept values of this process's job that its name lacks: "steps=400"."""
    within = f"_{name.replace(' ', '_')}_"
    pairs = [
        (key.rpartition(".")[2], value) for key, _, value in (text.partition("=") for text in SWEPT)
    ]
    return [
        f"{option}={value}"
        for option, value in pairs
        if f"_{value}_" not in within and f"_{option}={value}_" not in within
    ]


def link(run: "Run", how: str, kind: str, sha256: str) -> None:
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


def log_record(run: "Run | None", record: Record) -> None:
    """Logs the curves of every method against its number of keys, the grid, and the summary.

    That number is the cell's budget, if it has one, or its r, if it has no other argument. The
    table of a multirun gets the row of exact attention.
    """
    EXACT_ROW.update(row(record, record.cells[0]), kernel=record.kernel, metric=key(record.metric))
    if run is None:
        return
    import pandas as pd
    import wandb

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
    metric, error = key(record.metric), key("relative output error")
    rows = pd.DataFrame([row(record, cell) for cell in record.cells])
    rows = rows.rename(columns={"value": metric, "relative_output_error": error})
    if len(record.cells) == 2:  # one cell of a sweep, and exact attention
        run.summary.update({name: rows[name].iloc[1] for name in (metric, error)})
    run.summary.update(
        {
            key(name) if name in LOGGED_NAMES else f"{metric}_{name}": value
            for name, value in summary(record).items()
        }
        | {"grid": wandb.Table(dataframe=rows.astype(object))}
    )


def log_sweep(cfg: DictConfig, name: str, rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Logs rows of a sweep as a run with a curve against r for each method, and the picture.

    The run of a cell has one point alone. In a panel of W&B this run is a line. Its config has what
    the rows share, and its summary their metric.
    """
    import wandb

    metric, exact = rows[0]["metric"], rows[0]["value"] / rows[0]["times_exact"]
    section = {
        "scale": cfg.scale,
        "run": plain(cfg.logger),
        **{
            column: value
            for column, value in rows[0].items()
            if all(cell.get(column) == value for cell in rows)
        },
    }
    with tracked(OmegaConf.create(section), "sweep", name) as run:
        if run:
            log_curves(
                run,
                (
                    (
                        cell["r"],
                        cell["approximation"],
                        {metric: cell["value"], "output_error": cell.get("relative_output_error")},
                    )
                    for cell in rows
                ),
            )
            run.log({"sweep": wandb.Image(str(picture))})
            run.summary.update(
                {f"{metric}_exact": exact}
                | {
                    f"{metric}_{key(cell['approximation'])}_{cell['r']}": cell["value"]
                    for cell in rows
                }
            )


def key(name: str) -> str:
    """Returns a name for W&B of only letters, digits and _, because its tables cannot sort by
    others."""
    return re.sub(r"\W+", "_", LOGGED_NAMES.get(name, name)).strip("_")


def log_curves(run: "Run", points: Iterable[tuple[float, str, Mapping[str, float | None]]]) -> None:
    """Logs (number of keys, method, its numbers by name) as one curve per number and method.

    The curves of a number are one section of W&B, `<number>/<method>`, so that a panel can draw all
    of them. The step of a row is the number of keys, the x axis in every W&B reader. The summary
    has none of them: the last number of keys is not the finding.
    """
    by_keys: dict[int, dict[str, float]] = {}
    for keys, method, numbers in points:
        logged = by_keys.setdefault(int(keys), {})
        for name, value in numbers.items():
            if value is not None:
                logged[f"{key(name)}/{key(method)}"] = value
    for number in {name.partition("/")[0] for logged in by_keys.values() for name in logged}:
        run.define_metric(f"{number}/*", summary="none")
    for keys in sorted(by_keys):
        run.log(by_keys[keys], step=keys)


def log_page(run: "Run | None", page: "Page", folder: Path) -> None:
    """Logs the figures of a page, which lie in a folder, and its claims and findings as tables."""
    if run is None:
        return
    import wandb

    logged: dict[str, Any] = {}
    for exhibit in page.exhibits():
        if exhibit.charts:
            logged[f"figures/{exhibit.name}"] = wandb.Image(
                str(folder / f"{exhibit.name}.png"), caption=exhibit.title
            )
        if exhibit.table and exhibit.name in ("claims", "findings"):
            data = exhibit.table.data.astype(object)
            data = data.where(data.notna(), None)  # no seeds are "", others numbers
            logged[f"tables/{exhibit.name}"] = wandb.Table(dataframe=data, allow_mixed_types=True)
    run.log(logged)


def wandb_run(*, project: str, group: str, mode: Any, dir: str, **named: Any) -> "Run":
    """Starts a run; with mode "offline" no account and no network are needed.

    W&B's other files are below `dir` too: a home that cannot be written would end a stage after its
    work. Raises ValueError, in one line, if W&B refuses.
    """
    folder = Path(dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    variables = [name for name in os.environ if name.startswith("WANDB_") and name not in OF_HOME]
    for variable, name in OF_HOME.items():
        os.environ.setdefault(variable, str(folder / name))
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb
    from pydantic import ValidationError

    try:
        return wandb.init(project=project, group=group, mode=mode, dir=str(folder), **named)
    except ValidationError as error:
        first = error.errors()[0]
        field, rule = str(first["loc"][0]), first["msg"].replace("Input should be", "it must be", 1)
        variable = f"WANDB_{field.upper()}"
        name = variable if variable in variables else f"logger.{field}"
        raise ValueError(f"{name} is {first['input']}; {rule}") from None
    except wandb.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{', '.join(variables) or 'logger'}: W&B starts no run: {reason}; logger=none does "
            f"without"
        ) from None


def no_run(**settings: object) -> None:
    """Starts no run: the logger `none`."""
