"""Makes the W&B workspace of this project: loss against r first. Needs an account.

python -m pipelines.workspace workspace.entity=NAME [workspace.project=...]   # or WANDB_ENTITY
"""

from functools import partial
from typing import Any

import wandb
import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as workspaces
from omegaconf import DictConfig

from pipelines.app import app


@app("workspace")
def main(cfg: DictConfig) -> None:
    """Saves the workspace and prints its address."""
    if not cfg.entity:
        raise ValueError(
            "workspace.entity is not set, nor WANDB_ENTITY; it is your W&B user or team"
        )
    try:
        print(built(cfg.entity, cfg.project).save().url)
    except (wandb.Error, wandb.errors.CommError) as error:
        raise ValueError(f"W&B refused: {error}") from error


def built(entity: str, project: str) -> workspaces.Workspace:
    """Composes the sections: curves against r, the summaries compared, and training.

    Further panels, such as the report's figures and tables, are W&B's own.
    """
    against_r = partial(panels.LinePlot, title_x="r, keys kept", log_x=True)
    curves = [
        against_r(
            title=f"{title}: lower is better",
            metric_regex=f"^{metric}/.*",
            log_y=metric == "output_error",
        )
        for metric, title in (
            ("perplexity", "Perplexity of causal models"),
            ("error_percent", "Error of masked models, in %"),
            ("output_error", "Relative error of attention outputs"),
        )
    ]
    sections: dict[str, list[Any]] = {
        "Loss against r": curves,
        "Models compared": [models_compared("perplexity"), models_compared("error_percent")],
        "Training": [
            panels.LinePlot(title=title, y=[*names], title_x="optimizer step")
            for title, names in (
                ("Loss, nats a token", ["train/loss", "evaluation/loss"]),
                ("Learning rate", ["train/learning_rate"]),
                ("Norm of the gradient", ["train/gradient_norm"]),
                ("Tokens a second", ["train/tokens_per_second"]),
                ("Model-FLOP utilisation", ["train/model_flops_utilisation"]),
            )
        ],
    }
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="Value-aware attention",
        sections=[
            workspaces.Section(name=name, panels=plots, is_open=True)
            for name, plots in sections.items()
        ],
        auto_generate_panels=True,
    )


def models_compared(metric: str) -> panels.ParallelCoordinatesPlot:
    """Compares models by their metric with exact attention and with few keys."""
    methods = ("exact", "OVO_1", "OVA_1", "OVO_4", "OVA_4")
    return panels.ParallelCoordinatesPlot(
        title=f"Models compared: {metric}",
        columns=[
            panels.ParallelCoordinatesPlotColumn(panels.SummaryMetric(name))
            for name in (*(f"{metric}_{method}" for method in methods), "match_4_keys")
        ],
    )


if __name__ == "__main__":
    main()
