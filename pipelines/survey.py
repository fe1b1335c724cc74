"""Stage survey: measures every method on a trained model at equal budgets, and its weights.

python -m pipelines.survey model=masked length=long
python -m pipelines.survey kernel=elu 'survey.budgets=[32]'
"""

from dataclasses import replace

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, plain


@app("survey")
def main(cfg: DictConfig) -> None:
    """Writes <records>/<model>.json: the cells with their budgets, and the picture's weights."""
    from pipelines.app import evaluating, tracking
    from value_aware_attention.hugging_face.saved import saved_tokenizer
    from value_aware_attention.measurement import measure
    from value_aware_study.evaluation.budgets import (
        Contender,
        picture,
        planned_cells,
        with_costs,
    )

    with evaluating.evaluating(cfg) as device:
        hashes = evaluating.hashes_of(cfg)
        task = instantiate(cfg.task, device=device)
        call = task.layer_calls()[0]
        if call.is_causal and cfg.picture.tokens > call.keys:  # whole masked sequences are shown
            raise ValueError(
                f"survey.picture.tokens is {cfg.picture.tokens}; it must be at most {call.keys}, "
                f"the tokens of a window"
            )
        contenders = [
            Contender(name, plain(method), cfg.vary[name], instantiate(method, _partial_=True))
            for name, method in cfg.methods.items()
        ]
        plan = planned_cells(
            contenders, call, [*cfg.budgets], within=cfg.within, seeds=[*cfg.seeds]
        )
        with evaluating.tracked_by_first(cfg, "survey", hashes) as run:
            record = measure(
                task, [cell for cell, *_ in plan], layers=None, cache=cfg.cache, name=cfg.name,
                weights=hashes["checkpoint"], description=cfg.data,
            )  # fmt: skip
            drawn = picture(
                contenders, task, call, saved_tokenizer(cfg.tokenizer), **plain(cfg.picture)
            )
            record = replace(
                with_costs(record, plan), scale=cfg.scale, hashes=hashes, picture=drawn
            )
            evaluating.write_record(cfg, cfg.records, record)
            tracking.log_record(run, record)


if __name__ == "__main__":
    main()
