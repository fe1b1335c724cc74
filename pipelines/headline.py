"""Prints the headline table of the last report and where the report is.

python -m pipelines.headline
"""

from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app
from pipelines.report import read_folder
from value_aware_study.reporting.page import headline


@app("report")
def main(cfg: DictConfig) -> None:
    """Reads the records, writes nothing."""
    print(headline(read_folder(cfg.records)))
    print(f"\nThe report: {Path(cfg.results) / 'index.html'}")


if __name__ == "__main__":
    main()
