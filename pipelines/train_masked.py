"""Stage train_masked: RoBERTa for masked tokens, short, then long from the short one (A.1).

python -m pipelines.train_masked length=short|long [masked.long.steps=700]
"""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app
from pipelines.train import train
from value_aware_attention.data.batches import FrozenMaskedBatches, MaskedBatches
from value_aware_attention.data.tokens import masked_sequences
from value_aware_attention.models import build_roberta, save_folded, warm_start


@app("train_masked")
def main(cfg: DictConfig) -> None:
    """Writes <models>/masked_<length>/, an ordinary Hugging Face folder, and the learning curve."""
    folder, length = Path(cfg.tokens), cfg.positions.length
    text, held_out = (
        masked_sequences(folder=folder, split=split, length=length, fraction=cfg.fraction)
        for split in ("train", "evaluation")
    )
    limit = cfg.training.evaluation_batches * cfg.batches.batch_size
    size = {"vocabulary_size": text.vocabulary_size, **cfg.positions}

    def module():
        model = (
            warm_start(cfg.warm_start, **size)
            if cfg.warm_start
            else build_roberta(**cfg.layers, **size)
        )
        return instantiate(cfg.module, model)

    train(
        cfg,
        module,
        MaskedBatches(text, steps=cfg.fit.steps, **cfg.batches),
        FrozenMaskedBatches(held_out, limit=limit, **cfg.batches),
        save=save_folded,
        facts={
            "initialisation": Path(cfg.warm_start).name if cfg.warm_start else "random",
            "instances": len(text),
            "instance_length": cfg.positions.block,
            "epochs": round(cfg.fit.steps * cfg.batches.batch_size / len(text), 2),
            "block_positions": "y" if length > cfg.positions.block else "n",
            "vocabulary_size": text.vocabulary_size,
        },
    )


if __name__ == "__main__":
    main()
