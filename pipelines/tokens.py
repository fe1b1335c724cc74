"""Stage tokens: tokenizer, one stream for the causal LM, wrapped instances for the masked LM.

python -m pipelines.tokens [tokens.vocabulary_size=4096] [tokens.rearrange=false]
"""

import json
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, new_folder, write_json
from value_aware_attention.data.tokens import SourceQuota, write_tokens


@app("tokens")
def main(cfg: DictConfig) -> None:
    """Writes <folder>/{causal,masked}/ and the counts of Table 3."""
    shared = {"corpus": Path(cfg.corpus), "seed": cfg.seed}
    lengths = sorted({cfg.instance_length, *(() if cfg.rearrange else (cfg.long_length,))})
    with new_folder(cfg.folder) as folder:
        causal = write_tokens(
            **shared,
            sources={name: SourceQuota() for name in cfg.causal_sources or cfg.sources},
            tokenizer=instantiate(cfg.causal_tokenizer),
            instance_lengths=(),
            folder=folder / "causal",
        )
        masked = write_tokens(
            **shared,
            sources={name: quota(cfg, name) for name in cfg.masked_sources or cfg.sources},
            tokenizer=instantiate(cfg.masked_tokenizer),
            instance_lengths=lengths,
            folder=folder / "masked",
        )
    documents = json.loads(Path(cfg.corpus_metrics).read_text())
    write_json(cfg.metrics, counts(documents, causal, masked))


def quota(cfg: DictConfig, name: str) -> SourceQuota:
    """The instances per split that the corpus config grants a source."""
    source = cfg.sources[name]
    return SourceQuota(train=source.train_instances, evaluation=source.evaluation_instances)


def counts(documents: dict, causal: dict, masked: dict) -> dict:
    """Documents, tokens and instances per source and split, for Table 3."""
    merged = {
        name: {
            split: documents[name][split]
            | causal["sources"].get(name, {}).get(split, {})
            | masked["sources"].get(name, {}).get(split, {})
            for split in splits
        }
        for name, splits in documents.items()
    }
    return {
        "sources": merged,
        "vocabulary_size": masked["vocabulary_size"],
        "causal_vocabulary_size": causal["vocabulary_size"],
    }


if __name__ == "__main__":
    main()
