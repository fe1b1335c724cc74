"""Prints the headline table of the last report and where the report is.

python -m pipelines.headline
"""

from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app
from value_aware_study.reporting.page import headline
from value_aware_study.reporting.results import read_folder


@app("report")
def main(cfg: DictConfig) -> None:
    """Reads the records, writes nothing."""
    print(headline(read_folder(cfg.records)))
    print(f"\nThe report: {Path(cfg.results) / 'index.html'}")


if __name__ == "__main__":
    main()
