"""Stage report: the paper's tables and figures from the records, ours beside the paper's.

python -m pipelines.report
"""

import json
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app
from value_aware_study.reporting.page import write_report


@app("report")
def main(cfg: DictConfig) -> None:
    """Writes <results>/*.csv, *.md, *.png and index.html."""
    records = read_folder(cfg.records)
    tokens = json.loads(Path(cfg.tokens).read_text())
    training = {metrics["model"]: metrics for metrics in read_folder(cfg.training)}
    other = [json.loads(file.read_text()) for file in sorted(Path(cfg.published).glob("*.json"))]
    write_report(records, training, tokens, Path(cfg.results), other)


def read_folder(folder: str) -> list[dict]:
    """Every JSON file of a folder, in the order of their names."""
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no records; run dvc repro first")
    return [json.loads(file.read_text()) for file in files]


if __name__ == "__main__":
    main()
