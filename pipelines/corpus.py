"""Stage corpus: real text, split into training and evaluation documents.

python -m pipelines.corpus [corpus=docstrings|local|wikitext103|paper_mixture|...] [seed=0]
"""

from collections.abc import Iterator
from glob import glob
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, write_json

PATHS = ("path", "evaluation_path")
"""Arguments of sources that name local files, or data sets on the hub."""


@app("corpus")
def main(cfg: DictConfig) -> None:
    """Writes <folder>/<source>/<split>.jsonl and the counts of documents and copied words."""
    from pipelines.app.checkpoint import file_hash
    from pipelines.app.tracking import record_made
    from value_aware_study.data.corpora import write_corpus
    from value_aware_study.paths import check_apart

    folder = Path(cfg.folder)
    for text in texts_of(cfg):
        check_apart(folder, text)
    sources = {name: instantiate(source.documents) for name, source in cfg.sources.items()}
    counts = write_corpus(
        sources,
        folder,
        cfg.seed,
        cfg.evaluation_fraction,
        validation_fraction=cfg.validation_fraction,
        remove_copies=cfg.remove_copies,
    )
    write_json(cfg.metrics, counts, checksum=True)
    record_made(cfg, "corpus", {}, "corpus", [file_hash([cfg.folder])])


def texts_of(cfg: DictConfig) -> Iterator[Path]:
    """Yields the local files and folders that the sources read."""
    for source in cfg.sources.values():
        for path in filter(None, (source.documents.get(key) for key in PATHS)):
            yield from map(Path, [path] if Path(path).exists() else glob(path, recursive=True))


if __name__ == "__main__":
    main()
