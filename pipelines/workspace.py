"""Makes the W&B workspace of this project: loss against r first. Needs an account.

python -m pipelines.workspace workspace.entity=NAME [workspace.project=...]
"""

from functools import partial

import wandb
import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as workspaces
from omegaconf import DictConfig

from pipelines.app import app

METRICS = {"perplexity": "causal language models", "error": "masked language models"}


@app("workspace")
def main(cfg: DictConfig) -> None:
    """Saves the workspace and prints its address."""
    if not cfg.entity:
        raise ValueError("workspace.entity is not set; it is your W&B user or team")
    try:
        print(built(cfg.entity, cfg.project).save().url)
    except (wandb.Error, wandb.errors.CommError) as error:
        raise ValueError(f"W&B refused: {error}; wandb login first") from error


def built(entity: str, project: str) -> workspaces.Workspace:
    """Composes the sections: curves against r, the summaries compared, and training."""
    against_r = partial(panels.LinePlot, title_x="r, keys kept", log_x=True)
    curves = [
        against_r(title=f"{models}: lower is better", metric_regex=f"{metric}/.*", title_y=metric)
        for metric, models in METRICS.items()
    ]
    errors = against_r(
        title="Relative output error: lower is better",
        metric_regex="relative output error/.*",
        log_y=True,
    )
    names = ("exact", "OVO_1", "OVA_1", "OVO_4", "OVA_4", "match_4")
    columns = [panels.ParallelCoordinatesPlotColumn(panels.SummaryMetric(name)) for name in names]
    compared = panels.ParallelCoordinatesPlot(title="Models compared", columns=columns)
    training = panels.LinePlot(metric_regex="(train|evaluation)/.*")
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="Value-aware attention",
        sections=[
            workspaces.Section(name="Loss against r", panels=[*curves, errors], is_open=True),
            workspaces.Section(name="Models compared", panels=[compared], is_open=True),
            workspaces.Section(name="Training", panels=[training]),
        ],
    )


if __name__ == "__main__":
    main()
