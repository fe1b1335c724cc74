"""Prints the size of a scale: parameters, tokens, steps, operations, and hours on a GPU.

python -m pipelines.plan scale=paper
python -m pipelines.plan scale=paper plan.one_step=true   # and one real step of each model
"""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipelines.app import app, composed


@app("plan")
def main(cfg: DictConfig) -> None:
    """Prints one row a training stage; nothing is written."""
    from tabulate import tabulate

    from value_aware_study.training.plan import assumptions, with_hours

    overrides = list(HydraConfig.get().overrides.task)
    stages = rows(cfg, overrides)
    speed = cfg.operations_per_second if cfg.accelerator == "gpu" else None
    print(
        tabulate(
            [with_hours(stage, speed) for stage in stages],
            headers="keys",
            intfmt=",",
            floatfmt=".2g",
        )
    )
    print(f"\n{assumptions(sum(stage['operations'] for stage in stages), speed)}")
    if cfg.one_step:
        sections = trainings(overrides)
        print(
            tabulate(
                [step(cfg, name, sections[name]) for name in ("causal", "masked_long")],
                headers="keys",
                floatfmt=".2f",
            )
        )


def step(cfg: DictConfig, name: str, section: DictConfig) -> dict[str, Any]:
    """Takes one optimizer step on one sequence; returns loss, time and memory as a table's row."""
    from value_aware_study.training import plan

    vocabulary = plan.vocabulary_size(section, cfg.vocabulary, cfg.tokens)
    return {
        "one step of": name,
        "sequence": f"1 x {plan.sequence(section)}",
        **plan.one_step(
            plan.untrained(section, vocabulary), plan.random_batch(section, vocabulary, 1)
        ),
    }


def trainings(overrides: list[str]) -> dict[str, DictConfig]:
    """Composes the sections of the training stages as their apps get them, by the model's name."""
    shared = [text for text in overrides if not text.lstrip("+~").startswith("plan.")]
    return {"causal": composed("train_causal", shared).train_causal} | {
        f"masked_{length}": composed("train_masked", [*shared, f"length={length}"]).train_masked
        for length in ("short", "long")
    }


def rows(cfg: DictConfig, overrides: list[str]) -> list[dict[str, Any]]:
    """Computes a row for every training stage, and one for the causal models of all kernels."""
    from value_aware_study.training.plan import row, vocabulary_size

    kernels = len(cfg.kernels)
    causal, *masked = (
        row(name, section, vocabulary_size(section, cfg.vocabulary, cfg.tokens))
        for name, section in trainings(overrides).items()
    )
    causal["stage"] += f" ({kernels} kernels)"
    causal["operations"] *= kernels
    return [causal, *masked] if kernels else masked


if __name__ == "__main__":
    main()
