"""Keeps the records of a run in git, small: results/gpu, which every report shows beside its own.

python -m pipelines.publish [paths.outputs=outputs/gpu]
"""

from pathlib import Path

from omegaconf import DictConfig

from pipelines.app import app, write_json
from pipelines.report import read_folder
from value_aware_study.reporting.other_run import compact


@app("publish")
def main(cfg: DictConfig) -> None:
    """Writes <folder>/<model>.json for every record, and removes those of a run before."""
    training = {metrics["model"]: metrics for metrics in read_folder(cfg.training)}
    folder, records = Path(cfg.folder), read_folder(cfg.records)
    if missing := [record["model"] for record in records if record["model"] not in training]:
        raise ValueError(
            f"{cfg.training} says nothing of {', '.join(missing)}; it has {', '.join(training)}"
        )
    for record in records:
        model = record["model"]
        write_json(folder / f"{model}.json", compact(record, training[model]))
    for file in set(folder.glob("*.json")) - {folder / f"{r['model']}.json" for r in records}:
        file.unlink()
    print(f"{len(records)} records in {folder}; python -m pipelines.report shows them")


if __name__ == "__main__":
    main()
