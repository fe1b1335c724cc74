"""Stage train_in_context: a small decoder of a task whose answers stand in the context alone.

python -m pipelines.train_in_context task=recall|markov|copying [task.steps=700]
"""

from functools import partial

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, plain


@app("train_in_context")
def main(cfg: DictConfig) -> None:
    """Writes <models>/in_context_<task>/, which AutoModelForCausalLM reads, and its metrics."""
    from transformers import LlamaForCausalLM

    from pipelines.app.training import train
    from value_aware_study.data.in_context import InContextBatches
    from value_aware_study.training.decoder import sharpest_weights

    task = instantiate(cfg.task)
    rows = partial(InContextBatches, task, seed=cfg.seed, **cfg.batches)
    held_out = rows(steps=cfg.training.evaluation_batches, split="validation")
    settings = {key: value for key, value in plain(cfg.task).items() if key != "_target_"}

    def module():
        model = instantiate(cfg.model, vocabulary_size=task.vocabulary_size, length=task.length)
        return instantiate(cfg.module, _partial_=True)(model, task=task)

    train(
        cfg,
        module,
        rows(steps=cfg.fit.steps, split="train", growing=cfg.growing),
        held_out,
        save=LlamaForCausalLM.save_pretrained,
        facts={**settings, "growing": cfg.growing, "length": task.length},
        measured=lambda model: {
            "sharpest_weights": sharpest_weights(model, held_out[0], task.prefix)
        },
    )


if __name__ == "__main__":
    main()
