"""Stage report: the paper's tables and figures from the records, ours beside the paper's.

python -m pipelines.report
"""

import json
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app
from value_aware_study.reporting.page import write_report
from value_aware_study.reporting.results import files_of, read_folder


@app("report")
def main(cfg: DictConfig) -> None:
    """Writes <results>/*.csv, *.md, *.png and index.html."""
    records = read_folder(cfg.records)
    tokens = json.loads(Path(cfg.tokens).read_text())
    metrics = [json.loads(file.read_text()) for file in files_of(cfg.training)]
    write_report(records, {m["model"]: m for m in metrics}, tokens, Path(cfg.results))


if __name__ == "__main__":
    main()
