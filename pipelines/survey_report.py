"""Stage survey_report: time, memory and distance to the optimum of every method of the survey.

python -m pipelines.survey_report
"""

import json
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app
from value_aware_study.report import Page, write_page
from value_aware_study.report.results import read_folder
from value_aware_study.report.survey import survey_section


@app("survey_report")
def main(cfg: DictConfig) -> None:
    """Writes <results>/*.csv, *.md, *.png and index.html."""
    benchmark = json.loads(Path(cfg.benchmark).read_text())
    section = survey_section(read_folder(cfg.records), read_folder(cfg.trained), benchmark)
    write_page(Page("Every method of the survey", "", [section]), Path(cfg.results))
    print(f"The report: {Path(cfg.results) / 'index.html'}")


if __name__ == "__main__":
    main()
