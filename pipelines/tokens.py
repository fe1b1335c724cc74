"""Stage tokens: tokenizer, one stream for the causal LM, wrapped instances for the masked LM.

python -m pipelines.tokens [tokens.vocabulary_size=4096] [tokens.rearrange=false]
"""

from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, write_json
from pipelines.provenance import file_hash
from pipelines.tracking import record_made
from value_aware_attention.files import load_json, new_folder, write_checksums
from value_aware_study.data.tokens import SourceQuota, write_tokens
from value_aware_study.paths import check_apart


@app("tokens")
def main(cfg: DictConfig) -> None:
    """Writes <folder>/{causal,masked}/ and the counts of Table 3."""
    lengths = sorted({cfg.instance_length, *(() if cfg.rearrange else (cfg.long_length,))})
    documents = load_json(cfg.corpus_metrics, *cfg.sources, remedy="run python -m pipelines.corpus")
    check_apart(Path(cfg.folder), Path(cfg.corpus))
    with new_folder(cfg.folder) as folder:
        shared = {"corpus": Path(cfg.corpus), "seed": cfg.seed, "scratch": folder}
        causal: dict = {
            "tokenizer": cfg.causal_tokenizer,
            "sources": {name: quota(cfg, name) for name in cfg.causal_sources or cfg.sources},
        }
        masked: dict = {
            "tokenizer": cfg.masked_tokenizer,
            "sources": {name: quota(cfg, name) for name in cfg.masked_sources or cfg.sources},
        }
        stream = {"stream_folder": folder / "causal", "score_first": cfg.score_first}
        instances = {"instance_folder": folder / "masked", "instance_lengths": lengths}
        if causal == masked:  # the same text and tokenizer serve both: tokenize once
            made = [write(causal, **shared, **stream, **instances)]
        else:
            made = [write(causal, **shared, **stream), write(masked, **shared, **instances)]
        for part in ("causal", "masked"):
            write_checksums(folder / part)
    write_json(cfg.metrics, counts(documents, made[0], made[-1]), checksum=True)
    parts = [Path(cfg.folder) / part for part in ("causal", "causal/evaluation.npy", "masked")]
    hashes = [file_hash([part]) for part in parts]
    record_made(cfg, "tokens", {"corpus": file_hash([cfg.corpus])}, "data", hashes)


def write(task: dict, **options: Any) -> dict[str, Any]:
    """Tokenizes for one task; the tokenizer is built only now."""
    tokenizer = instantiate(task["tokenizer"])
    return write_tokens(tokenizer=tokenizer, sources=task["sources"], **options)


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
