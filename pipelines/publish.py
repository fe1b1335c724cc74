"""Publishes the run that was made last: results/<scale> becomes what report/ shows.

python -m pipelines.publish [paths.outputs=outputs/hours paths.report=outputs/hours/report]

The only command that changes results/<scale>. Later runs of the scale are compared with it.
"""

import shutil
from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app, new_folder, write_json
from pipelines.summary import summary
from pipelines.verdict import CLAIMS, SUMMARY, TIMES, kept
from value_aware_study.report.results import read_folder


@app("publish")
def main(cfg: DictConfig) -> None:
    """Writes <results>/<scale>: the page, its tables and figures, the summary, the times."""
    records, report = read_folder(cfg.records), Path(cfg.report)
    if not (report / CLAIMS).exists():
        raise FileNotFoundError(f"{report} holds no report; make repro writes it")
    scale = records[0].scale
    if scale != cfg.scale:
        raise ValueError(f"{cfg.records} holds records of scale {scale}; scale is {cfg.scale}")
    with new_folder(Path(cfg.results) / scale) as folder:
        shutil.copytree(report, folder, dirs_exist_ok=True)
        write_json(folder / SUMMARY, {record.model: summary(record) for record in records})
        write_json(folder / TIMES, kept(Path(cfg.seconds)))
    print(f"{Path(cfg.results) / scale} is the published run of this scale")


if __name__ == "__main__":
    main()
