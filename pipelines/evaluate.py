"""Stage evaluate: a trained model with its attention replaced, over a grid of approximations.

The grid of a model:   python -m pipelines.evaluate model=masked length=long
On eight GPUs:         torchrun --nproc-per-node 8 -m pipelines.evaluate kernel=elu
One cell:              python -m pipelines.evaluate kernel=elu approximation=sliding_window
Its own attention:     python -m pipelines.evaluate model=masked attention=sliding_window
A sweep with a table:  python -m pipelines.evaluate -m kernel=exponential,polynomial,elu \\
                           approximation=optimal_v_oblivious,optimal_v_aware,sliding_window \\
                           approximation.r=1,4,16,65
"""

from dataclasses import replace
from functools import partial
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, file_hash, plain


@app("evaluate")
def main(cfg: DictConfig) -> dict[str, object]:
    """Writes <records>/<model>.json, or returns the row of the one requested cell."""
    check_card(cfg)
    from pipelines.app.evaluating import evaluating

    with evaluating(cfg) as device:
        return evaluate(cfg, device)


def check_card(cfg: DictConfig) -> None:
    """Refuses, before torch is imported, a method that does not fit the model, as its card says."""
    if cfg.approximation is None:
        return
    card, method = cfg.approximation.get("card", {}), cfg.approximation._target_.rpartition(".")[2]
    if (kernels := card.get("kernels")) and cfg.kernel not in kernels:
        raise ValueError(
            f"{cfg.choice}: {method} approximates the kernel {' or '.join(kernels)}; {cfg.name} "
            f"has {cfg.kernel}"
        )
    if not card.get("causal", True) and cfg.task._target_.endswith(".causal_task"):
        raise ValueError(
            f"{cfg.choice}: {method} does not support causal attention (its choice of keys would "
            f"leak the future), and {cfg.name} is causal: give model=masked"
        )


def evaluate(cfg: DictConfig, device: str) -> dict[str, object]:
    """Measures the model's grid, one cell of it, or the attention that it was trained with."""
    from pipelines.app import evaluating, summary, tracking
    from value_aware_attention.measurement import measure
    from value_aware_attention.models.trained_attention import TrainedAttention
    from value_aware_study.evaluation.grid import own_record, setting

    task, hashes = instantiate(cfg.task, device=device), evaluating.hashes_of(cfg)
    named = {"name": cfg.name, "description": cfg.data}
    if attention := TrainedAttention.of(task.model.config):
        if cfg.approximation is not None:
            raise ValueError(
                f"{cfg.name} was trained with {attention}; {cfg.choice} can approximate the "
                f"attention of models trained with exact attention only"
            )
        record = own_record(task, attention, cfg.kernel, **named)
        evaluating.write_record(cfg, cfg.trained, replace(record, scale=cfg.scale, hashes=hashes))
        return summary.row(record, record.cells[0])
    named |= {"cache": cfg.cache, "weights": hashes["checkpoint"]}
    cell = cfg.approximation and setting(cfg.choice, plain(cfg.approximation))
    with evaluating.tracked_by_first(cfg, "evaluate", hashes, str(cell or "")) as run:
        if cell is None:
            record = evaluate_grid(cfg, task, hashes, **named)
        else:  # a sweep's job, which does not touch the outputs
            record = measure(task, [cell], layers=None, **named)
        tracking.log_record(run, record)
    return {} if cfg.approximation is None else summary.row(record, record.cells[-1])


def evaluate_grid(cfg: DictConfig, task: Any, hashes: dict[str, str], **named: str) -> Any:
    """Writes the record of the whole grid, after the summary and the explorer's share of it."""
    from pipelines.app import evaluating
    from value_aware_attention.hugging_face.saved import saved_tokenizer
    from value_aware_attention.measurement.control import control
    from value_aware_attention.measurement.measure import LayerOptions, measure
    from value_aware_study.evaluation.explorer import evaluated_exploration
    from value_aware_study.evaluation.grid import count_models, grid, longer_text

    record = measure(task, grid(plain(cfg.methods), plain(cfg.axes), task.length), **named)  # type: ignore[arg-type]
    counted = count_models(
        instantiate(cfg.count_models),
        task,
        record.cells[0],
        cache=cfg.cache,
        key={"count_models": plain(cfg.count_models), "training": file_hash([cfg.training])},
    )
    beside = counted | longer_text(task, plain(cfg.longer) if cfg.longer else None)
    layers = LayerOptions(between=False, skewness_gap=False)  # seconds: no end metric
    alike = partial(measure, methods=[], layers=layers, cell_errors=False, cache=cfg.cache)
    record = replace(
        record, scale=cfg.scale, hashes=hashes, baselines=beside, control=control(task, alike)
    )
    evaluating.write_summary(
        cfg, record, evaluated_exploration(cfg.name, task, saved_tokenizer(cfg.tokenizer))
    )
    evaluating.write_record(
        cfg, cfg.records, record
    )  # last: a record has everything that belongs to it
    return record


if __name__ == "__main__":
    main()
