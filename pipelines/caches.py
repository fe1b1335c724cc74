"""Stage caches: what every cache method costs a model on queries that it has not observed.

python -m pipelines.caches texts=recall|markov|copying|docstrings|minilm ['caches.sizes=[16]']
"""

from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from pipelines.app import app
from pipelines.checkpoint import check_model
from pipelines.tracking import tracked
from value_aware_attention.caches import CacheMethod
from value_aware_attention.files import save_json
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_attention.measurement.measure_caches import cache_settings, measure_caches
from value_aware_study.paths import inside


@app("caches")
def main(cfg: DictConfig) -> None:
    """Writes <records>/<name>.json: every method, with r keys of all there are to choose from."""
    file = inside(cfg.records, cfg.name, ".json")
    if "checkpoint" in cfg.load:
        check_model(Path(cfg.load.checkpoint))
    task = instantiate(cfg.load, seeds=list(cfg.seeds), units=cfg.units)
    keys = task.first_row or task.length
    settings = cache_settings(
        {name: partial(build, cfg, name) for name in cfg.methods},
        sizes=[max(1, keys // part) for part in cfg.parts],
        observed=cfg.observed,
        gaps_of=cfg.gaps_of,
        only=cfg.only,
        prefix=task.first_row or None,
        rows=cfg.rows,
    )
    with tracked(cfg, "caches", cfg.name) as run:
        record = measure_caches(
            task, settings, model_name=cfg.name, task_name=cfg.name, description=cfg.description,
        )  # fmt: skip
        log_errors(run, record)
    save_json(file, record.to_json())


def build(cfg: DictConfig, name: str, r: int) -> CacheMethod:
    """A configured method; wherever its config says caches.r it keeps r keys."""
    whole = OmegaConf.merge(cfg._get_root(), {"caches": {"r": r}})
    found: CacheMethod = instantiate(whole.caches.methods[name])
    return found


def log_errors(run: Any, record: CacheRecord) -> None:
    """Every method's output error and end metrics against r, which is the step."""
    for r in sorted({cell.r for cell in record.cells}) if run else ():
        found: dict[str, float | None] = {}
        for cell in (cell for cell in record.cells if cell.r == r):
            numbers = {"relative output error": cell.error, **cell.ends}
            label = f"{cell.method} ({cell.observed})"
            found |= {f"{name}/{label}": one.value for name, one in numbers.items()}
        run.log(found, step=r)


if __name__ == "__main__":
    main()
