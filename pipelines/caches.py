"""Stage caches: what every cache method costs a model on queries that it has not observed.

python -m pipelines.caches texts=recall|markov|copying|docstrings|minilm ['caches.parts=[8]']
"""

from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from pipelines.app import app


@app("caches")
def main(cfg: DictConfig) -> None:
    """Writes <records>/<name>.json: every method, with r keys of all there are to choose from."""
    from pipelines.app.checkpoint import check_model
    from pipelines.app.tracking import log_curves, tracked
    from value_aware_attention.files import save_json
    from value_aware_attention.measurement.caches import cache_settings, measure_caches
    from value_aware_study.paths import inside

    file = inside(cfg.records, cfg.name, ".json")
    if "checkpoint" in cfg.load:
        check_model(Path(cfg.load.checkpoint))
    # texts of one more seed are those that profiles are measured on
    task = instantiate(cfg.load, seeds=[*cfg.seeds, max(cfg.seeds) + 1], units=cfg.units)
    *task.texts, calibration = task.texts
    task.parts = len(task.texts)
    keys = task.first_row or task.length
    replicate = OmegaConf.select(cfg._get_root(), "replicate")
    again = replicate.suffix if "layers" not in replicate else ""  # another training of the model
    given = {
        "prefix": task.first_row or None,
        "profiles": profiles(cfg, task, calibration) if task.first_row else None,
        **{key: cfg[key] for key in ("only", "after", "pools", "rows")},
    }
    settings = cache_settings(
        {name: partial(build, cfg, name) for name in cfg.methods},
        sizes=[max(1, keys // part) for part in cfg.parts],
        **{key: cfg[key] for key in ("observed", "gaps_of")}, **given,
    )  # fmt: skip
    curve = {name: {"model": cfg.curve.observed} for name in cfg.curve.methods}
    settings += cache_settings(
        {name: partial(build, cfg, name) for name in curve},
        sizes=[max(1, keys // part) for part in cfg.curve.parts],
        observed=cfg.curve.observed, **given | {"pools": curve},
    )  # fmt: skip
    with tracked(cfg, "caches", cfg.name) as run:
        record = measure_caches(
            task, settings, model_name=cfg.name, description=cfg.description,
            task_name=cfg.name.removesuffix(again),
        )  # fmt: skip
        log_curves(run, ((cell.r, *curve_point(cell)) for cell in record.cells))
    save_json(file, record.to_json())


def profiles(cfg: DictConfig, task: Any, text: Any) -> dict[str, Any]:
    """Profiles the task's model on a text, as the config says."""
    from value_aware_attention import caches

    tokens, _ = text.take(range(len(text.inputs)))
    return {
        name: caches.profile(
            task.model, [tokens], partial(build, cfg, one.method), prefix=task.first_row,
            by=one.by, observed=one.observed, rows=cfg.rows,
        )
        for name, one in cfg.profiles.items()
    }  # fmt: skip


def build(cfg: DictConfig, name: str, r: int) -> Any:
    """Builds a configured method; wherever its config says caches.r it keeps r keys."""
    whole = OmegaConf.merge(cfg._get_root(), {"caches": {"r": r}})
    return instantiate(whole.caches.methods[name])


def curve_point(cell: Any) -> tuple[str, dict[str, float | None]]:
    """Names a cell's curves by method, queries and budget, and its errors by their names."""
    numbers = {"relative output error": cell.error, **cell.ends}
    values = {name: estimate.value for name, estimate in numbers.items()}
    budget = f", one budget: {cell.pool}" if cell.pool else ""
    return f"{cell.method} ({cell.observed} {cell.rows}{budget})", values


if __name__ == "__main__":
    main()
