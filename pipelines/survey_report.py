"""Stage survey_report: time, memory and distance to the optimum of every method of the survey.

python -m pipelines.survey_report
"""

import json
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app
from value_aware_study.reporting.results import read_folder
from value_aware_study.reporting.survey_page import write_survey


@app("survey_report")
def main(cfg: DictConfig) -> None:
    """Writes <results>/*.csv, *.md, *.png and index.html."""
    benchmark = json.loads(Path(cfg.benchmark).read_text())
    write_survey(benchmark, read_folder(cfg.records, cfg.trained), Path(cfg.results))
    print(f"The report: {Path(cfg.results) / 'index.html'}")


if __name__ == "__main__":
    main()
