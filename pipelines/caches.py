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
    from pipelines.app.tracking import log_cache_record, tracked
    from value_aware_attention.files import save_json
    from value_aware_attention.measurement.caches import measure_caches
    from value_aware_study.paths import inside

    file = inside(cfg.records, cfg.name, ".json")
    if "checkpoint" in cfg.load:
        check_model(Path(cfg.load.checkpoint))
    # texts of one more seed are those that profiles are measured on
    task = instantiate(cfg.load, seeds=[*cfg.seeds, max(cfg.seeds) + 1], units=cfg.units)
    settings = compared(cfg, task)
    replicate = OmegaConf.select(cfg._get_root(), "replicate")
    again = replicate.suffix if "layers" not in replicate else ""  # another training of the model
    with tracked(cfg, "caches", cfg.name) as run:
        record = measure_caches(
            task, settings, model_name=cfg.name, description=cfg.description,
            task_name=cfg.name.removesuffix(again),
        )  # fmt: skip
        log_cache_record(run, record)
    save_json(file, record.to_json())


def compared(cfg: DictConfig, task: Any) -> list[Any]:
    """Lists the settings of the tables and those of the curve; takes the task's last text away."""
    from value_aware_attention import caches
    from value_aware_attention.measurement.caches import cache_settings

    *task.texts, calibration = task.texts
    prefix = task.first_row
    tokens = calibration.take(range(len(calibration.inputs)))[0]
    profiles = {
        name: caches.profile(
            task.model, [tokens], partial(built, cfg, profile.method), prefix=prefix,
            by=profile.by, observed=profile.observed, rows=cfg.rows,
        )
        for name, profile in (cfg.profiles.items() if prefix else ())
    }  # fmt: skip
    curve = {name: {"model": cfg.curve.observed} for name in cfg.curve.methods}
    shared = {"only": cfg.only, "after": cfg.after, "rows": cfg.rows, "profiles": profiles}
    tables = {"observed": cfg.observed, "pools": cfg.pools, "gaps_of": cfg.gaps_of}
    curves = {"observed": cfg.curve.observed, "pools": curve}
    of_all, of_curve = (cfg.methods, cfg.parts, tables), (curve, cfg.curve.parts, curves)
    return [
        setting
        for names, parts, ways in (of_all, of_curve)
        for setting in cache_settings(
            {name: partial(built, cfg, name) for name in names},
            sizes=[max(1, (prefix or task.length) // share) for share in parts],
            prefix=prefix or None, **shared, **ways,
        )
    ]  # fmt: skip


def built(cfg: DictConfig, name: str, r: int) -> Any:
    """Builds a configured method; wherever its config says caches.r it keeps r keys."""
    whole = OmegaConf.merge(cfg._get_root(), {"caches": {"r": r}})
    return instantiate(whole.caches.methods[name])


if __name__ == "__main__":
    main()
