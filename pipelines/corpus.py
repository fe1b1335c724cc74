"""Stage corpus: real text, split into training and evaluation documents.

python -m pipelines.corpus [corpus=docstrings|local|wikitext103|paper_mixture|...] [seed=0]
"""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, write_json
from pipelines.provenance import file_hash
from pipelines.tracking import record_made
from value_aware_study.data.corpora import write_corpus


@app("corpus")
def main(cfg: DictConfig) -> None:
    """Writes <folder>/<source>/<split>.jsonl and the counts of documents and copied words."""
    sources = {name: instantiate(source.documents) for name, source in cfg.sources.items()}
    counts = write_corpus(
        sources,
        Path(cfg.folder),
        cfg.seed,
        cfg.evaluation_fraction,
        validation_fraction=cfg.validation_fraction,
        remove_copies=cfg.remove_copies,
    )
    write_json(cfg.metrics, counts, checksum=True)
    record_made(cfg, "corpus", {}, "corpus", [file_hash([cfg.folder])])


if __name__ == "__main__":
    main()
