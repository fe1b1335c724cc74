"""Stage train_in_context: a small decoder of a task whose answers stand in the context alone.

python -m pipelines.train_in_context task=recall|markov|copying [task.steps=700]
"""

from contextlib import nullcontext
from functools import partial

from hydra.utils import instantiate
from omegaconf import DictConfig
from pytorch_lightning import seed_everything
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from pipelines.app import app, plain, write_json
from pipelines.tracking import tracked
from pipelines.train import (
    StepLogger,
    check_finite,
    check_trainer,
    fingerprint,
    memory_shortage_named,
)
from pipelines.train import metrics as measured
from value_aware_attention.files import new_folder
from value_aware_study.data.in_context import InContextBatches
from value_aware_study.paths import inside
from value_aware_study.training.decoder import sharpest_weights
from value_aware_study.training.fit import fit


@app("train_in_context")
def main(cfg: DictConfig) -> None:
    """Writes <models>/in_context_<task>/, which AutoModelForCausalLM reads, and its metrics.

    A killed run continues where it was, if nothing that determines it has changed.
    """
    check_trainer(cfg)
    seed_everything(cfg.seed, verbose=False)
    task = instantiate(cfg.task)
    model = instantiate(cfg.model, vocabulary_size=task.vocabulary_size, length=task.length)
    module = instantiate(cfg.module, _partial_=True)(model, task=task)
    rows = partial(InContextBatches, task, seed=cfg.seed, **cfg.batches)
    held_out = rows(steps=cfg.training.evaluation_batches, split="validation")
    first = rank_zero_only.rank == 0  # type: ignore[attr-defined]

    def write(curve: list[dict[str, float]]) -> None:
        check_finite(cfg.name, model, curve)
        facts = {key: value for key, value in plain(cfg.task).items() if key != "_target_"}
        facts["growing"] = cfg.growing
        record = measured(cfg, model, curve, {**facts, "length": task.length})
        record["sharpest_weights"] = sharpest_weights(model, held_out[0], task.prefix)
        with new_folder(inside(cfg.models, cfg.name)) as folder:
            model.save_pretrained(folder)
        write_json(inside(cfg.metrics, cfg.name, ".json"), record, checksum=True)

    tracking = tracked(cfg, "train", cfg.name) if first else nullcontext()
    with tracking as run, memory_shortage_named(cfg):
        fit(
            module,
            rows(steps=cfg.fit.steps, split="train", growing=cfg.growing),
            held_out,
            evaluate_every=cfg.training.evaluate_every,
            checkpoint_every=cfg.training.checkpoint_every,
            log_every_n_steps=cfg.training.log_every,
            checkpoint_folder=inside(cfg.checkpoints, cfg.name),
            fingerprint=fingerprint(cfg),
            save=write,
            logger=StepLogger(experiment=run) if run else None,
            **cfg.trainer,
        )


if __name__ == "__main__":
    main()
