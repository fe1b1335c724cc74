"""Stage corpus: real text, split into training and evaluation documents.

python -m pipelines.corpus [corpus=docstrings|local|wikitext103|paper_mixture|...] [seed=0]
"""

from glob import glob
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, write_json


@app("corpus")
def main(cfg: DictConfig) -> None:
    """Writes <folder>/<source>/<split>.jsonl and the counts of documents and copied words."""
    from value_aware_study.data.corpora import write_corpus
    from value_aware_study.safe_text import check_apart

    folder = Path(cfg.folder)
    for source in cfg.sources.values():  # a path may also name a data set on the hub
        for path in filter(None, map(source.documents.get, ("path", "evaluation_path"))):
            for text in [path] if Path(path).exists() else glob(path, recursive=True):
                check_apart(folder, Path(text))
    sources = {name: instantiate(source.documents) for name, source in cfg.sources.items()}
    write_json(
        cfg.metrics,
        write_corpus(
            sources,
            folder,
            cfg.seed,
            cfg.evaluation_fraction,
            validation_fraction=cfg.validation_fraction,
            remove_copies=cfg.remove_copies,
        ),
        checksum=True,
    )


if __name__ == "__main__":
    main()
