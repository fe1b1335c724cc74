"""Stage tokens: tokenizer, one stream for the causal LM, wrapped instances for the masked LM.

python -m pipelines.tokens [tokens.vocabulary_size=4096] [tokens.rearrange=false]
"""

from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, write_json


@app("tokens")
def main(cfg: DictConfig) -> None:
    """Writes <folder>/{causal,masked}/ and the counts of Table 3."""
    from value_aware_attention.files import load_json, new_folder, write_checksums
    from value_aware_study.data.tokens import merged_counts
    from value_aware_study.safe_text import check_apart

    lengths = sorted({cfg.instance_length, *(() if cfg.rearrange else (cfg.long_length,))})
    documents = load_json(cfg.corpus_metrics, *cfg.sources, remedy="run python -m pipelines.corpus")
    check_apart(Path(cfg.folder), Path(cfg.corpus))
    causal = (cfg.causal_tokenizer, list(cfg.causal_sources or cfg.sources))
    masked = (cfg.masked_tokenizer, list(cfg.masked_sources or cfg.sources))
    with new_folder(cfg.folder) as folder:
        options: dict[str, Any] = {
            "instance_folder": folder / "masked", "instance_lengths": lengths, "scratch": folder
        }  # fmt: skip
        stream = partial(write, stream_folder=folder / "causal", score_first=cfg.score_first)
        if causal == masked:  # the same text and tokenizer serve both: tokenize once
            made = [stream(cfg, *causal, **options)]
        else:
            made = [stream(cfg, *causal, scratch=folder), write(cfg, *masked, **options)]
        for kind in ("causal", "masked"):
            write_checksums(folder / kind)
    write_json(cfg.metrics, merged_counts(documents, made[0], made[-1]), checksum=True)


def write(cfg: DictConfig, tokenizer: DictConfig, names: list[str], **options: Any) -> Any:
    """Tokenizes the named sources for one kind of model, with the instances that each may give."""
    from value_aware_study.data.tokens import write_tokens

    quotas = {
        name: {split: cfg.sources[name][f"{split}_instances"] for split in ("train", "evaluation")}
        for name in names
    }
    return write_tokens(
        corpus=Path(cfg.corpus),
        sources=quotas,
        build=instantiate(tokenizer).build,
        seed=cfg.seed,
        **options,
    )


if __name__ == "__main__":
    main()
