"""Stage train_masked: trains RoBERTa on masked tokens; the long one starts from the short (A.1).

python -m pipelines.train_masked length=short|long [masked.long.steps=700]
python -m pipelines.train_masked length=short attention=sliding_window [attention.method.r=8]
"""

from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app


@app("train_masked")
def main(cfg: DictConfig) -> None:
    """Writes <models>/masked_<length>/, which AutoModelForMaskedLM reads, and its metrics."""
    from pipelines.app.training import train, trained_attention
    from value_aware_attention.hugging_face.saved import short_name
    from value_aware_attention.models import attend_with, build_roberta, save_masked, warm_start
    from value_aware_study.data.batches import (
        FrozenMaskedBatches,
        MaskedBatches,
        masked_sequences,
    )
    from value_aware_study.data.tokens import held_out_split

    attention, start = trained_attention(cfg), cfg.warm_start
    folder, length, block = Path(cfg.tokens), cfg.positions.length, cfg.positions.block
    check_attention(attention, start, length=length, head_dim=cfg.layers.width // cfg.layers.heads)
    splits = ("train", held_out_split(folder, length))
    options = {"folder": folder, "length": length, "fraction": cfg.fraction, "block": block}
    text, held_out = (masked_sequences(split=split, **options) for split in splits)
    frozen = FrozenMaskedBatches(
        held_out, limit=cfg.training.evaluation_batches * cfg.batches.batch_size, **cfg.batches
    )

    def module():
        size = {"vocabulary_size": text.vocabulary_size, **cfg.positions, **cfg.layers}
        model = warm_start(start, **size) if start else build_roberta(**size)
        model.config.masked_fraction = cfg.fraction  # an evaluation must mask as many
        return instantiate(cfg.module, attend_with(model, attention) if attention else model)

    batches = MaskedBatches(text, steps=cfg.fit.steps, **cfg.batches)
    facts = {
        "initialisation": short_name(start) if start else "random",
        "instances": len(text),
        "instance_length": block,
        "epochs": round(cfg.fit.steps * cfg.batches.batch_size / len(text), 2),
        "block_positions": "y" if length > block else "n",
        "vocabulary_size": text.vocabulary_size,
        **({"attention": str(attention)} if attention else {}),
    }
    train(cfg, module, batches, frozen, save=save_masked, facts=facts)


def check_attention(attention: Any, warm_start: str | None, *, length: int, head_dim: int) -> None:
    """Raises ValueError for an attention that cannot be trained at this size from `warm_start`.

    `attention` is a `TrainedAttention`, or None for exact attention.

    A model trained with a mixing has no attention to start from.
    """
    from value_aware_attention.hugging_face.saved import check_files, installed
    from value_aware_attention.kernels import Exponential
    from value_aware_attention.models.long_roberta import read_config
    from value_aware_attention.models.masked_lm import masked_kernel
    from value_aware_attention.models.trained_attention import TrainedAttention

    if attention is not None:
        attention.check_trainable(
            kernel=masked_kernel(attention) or Exponential(),
            length=length,
            head_dim=head_dim,
            is_causal=False,
        )
    if warm_start is None:
        return
    if (folder := Path(installed(warm_start))).is_dir():
        check_files(folder, "train the model again")
    start = TrainedAttention.of(read_config(warm_start))
    if start and start.is_mixing and not (attention and attention.is_mixing):
        raise ValueError(f"{warm_start} was trained with {start}: it has no attention")


if __name__ == "__main__":
    main()
