"""Stage train_masked: RoBERTa for masked tokens, short, then long from the short one (A.1).

python -m pipelines.train_masked length=short|long [masked.long.steps=700]
python -m pipelines.train_masked length=short attention=sliding_window [attention.method.r=8]
"""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app
from pipelines.checkpoint import AGAIN
from pipelines.train import train, trained_attention
from value_aware_attention.hugging_face.saved import check_files
from value_aware_attention.kernels import Exponential
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.models import attend_with, build_roberta, save_masked, warm_start
from value_aware_attention.models.long_roberta import read_config
from value_aware_attention.models.masked_lm import masked_kernel
from value_aware_attention.models.trained_attention import TrainedAttention
from value_aware_study.data.batches import FrozenMaskedBatches, MaskedBatches, masked_sequences
from value_aware_study.data.tokens import held_out_split


@app("train_masked")
def main(cfg: DictConfig) -> None:
    """Writes <models>/masked_<length>/, an ordinary Hugging Face folder, and the learning curve.

    AutoModelForMaskedLM and AutoTokenizer read it.
    """
    attention = trained_attention(cfg)
    check(cfg, attention)
    folder, length = Path(cfg.tokens), cfg.positions.length
    text, held_out = (
        masked_sequences(folder=folder, split=split, length=length, fraction=cfg.fraction)
        for split in ("train", held_out_split(folder, length))
    )
    limit = cfg.training.evaluation_batches * cfg.batches.batch_size
    frozen = FrozenMaskedBatches(held_out, limit=limit, **cfg.batches)
    check_masked(frozen)
    size = {"vocabulary_size": text.vocabulary_size, **cfg.positions}

    def module():
        model = (
            warm_start(cfg.warm_start, **cfg.layers, **size)
            if cfg.warm_start
            else build_roberta(**cfg.layers, **size)
        )
        model.config.masked_fraction = cfg.fraction  # an evaluation must mask as many
        return instantiate(cfg.module, attend_with(model, attention) if attention else model)

    train(
        cfg,
        module,
        MaskedBatches(text, steps=cfg.fit.steps, **cfg.batches),
        frozen,
        save=save_masked,
        facts={
            "initialisation": Path(cfg.warm_start).name if cfg.warm_start else "random",
            "instances": len(text),
            "instance_length": cfg.positions.block,
            "epochs": round(cfg.fit.steps * cfg.batches.batch_size / len(text), 2),
            "block_positions": "y" if length > cfg.positions.block else "n",
            "vocabulary_size": text.vocabulary_size,
            **({"attention": str(attention)} if attention else {}),
        },
    )


def check(cfg: DictConfig, attention: TrainedAttention | None) -> None:
    """Refuses, before anything is read, an attention or a start that cannot have this size."""
    made_with = {int(path.name) for path in Path(cfg.tokens).glob("*") if path.name.isdigit()}
    if made_with and cfg.positions.block not in made_with:
        raise ValueError(
            f"masked.block is {cfg.positions.block}; {cfg.tokens} was made with "
            f"{min(made_with)}: take that, or run python -m pipelines.tokens again"
        )
    if attention is not None:
        attention.check_trainable(
            kernel=masked_kernel(attention) or Exponential(),
            length=cfg.positions.length,
            head_dim=cfg.layers.width // cfg.layers.heads,
            is_causal=False,
        )
    if cfg.warm_start and Path(cfg.warm_start).is_dir():
        check_files(Path(cfg.warm_start), AGAIN)
    start = TrainedAttention.of(read_config(cfg.warm_start)) if cfg.warm_start else None
    if start and start.is_mixing and not (attention and attention.is_mixing):
        raise ValueError(f"{cfg.warm_start} was trained with {start}: it has no attention")


def check_masked(held_out: FrozenMaskedBatches) -> None:
    """Refuses held-out text on which nothing would be predicted."""
    batches = (held_out[index] for index in range(len(held_out)))
    if len(held_out) and not any((batch["labels"] != IGNORED).any() for batch in batches):
        raise ValueError(
            f"no masked token in {held_out.count} held-out sequences; masked.fraction is "
            f"{held_out.sequences.fraction:g}, raise it"
        )


if __name__ == "__main__":
    main()
