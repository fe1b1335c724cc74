"""Publishes the run of report/ as results/<scale>, with which later runs are compared.

python -m pipelines.publish [scale=hours] [publish.trainings|pretrained|caches|survey|probe=true]

No other command changes results/<scale>. With `publish.trainings` it writes results/seeds/<scale>
alone, the records of a run, from which `make page` draws its page again; with `publish.pretrained`
results/pretrained, the records of make decoder, with `publish.caches` results/caches and with
`publish.survey` results/survey, those of make caches and make survey, and with `publish.probe`
results/probe, those of pipelines.probe: the page of every run shows them, unless it has its
own. With `publish.page=false` results/<scale> has the numbers of the page without it.
"""

import csv
import lzma
import shutil
from pathlib import Path
from zipfile import ZIP_BZIP2, ZipFile, ZipInfo

from omegaconf import DictConfig

from pipelines.app import app, write_json

RECORDS = {
    "pretrained": {"records/pretrained/*.json": "{0.name}"},
    "caches": {"records/caches/*.json": "{0.name}"},
    "survey": {
        "records/survey/*.json": "survey-{0.name}",
        "records/trained/*.json": "trained-{0.name}",
    },
    "probe": {
        "probe/*/record.json": "record-{0.parent.name}.json",
        "probe/*/explorer.json": "explorer-{0.parent.name}.json",
    },
}
"""Folder of published records -> the files of a run that it holds, and their names in it"""
OF_PAGE = (
    "records/*.json",
    "explored/*.json",
    "metrics/**/*.json",
    "summary/*.json",
    "plots/*.csv",
)
"""Files of a run that are kept with `publish.trainings`"""


@app("publish")
def main(cfg: DictConfig) -> None:
    """Writes <results>/<scale>: the page, its tables and figures, the summary, the times."""
    if cfg.trainings:
        print(f"{cfg.seeds} has {keep(Path(cfg.outputs), Path(cfg.seeds))} files of trainings")
    elif name := next((name for name in RECORDS if cfg[name]), ""):
        print(f"{publish_records(cfg, name)} is the published run of {name}")
    else:
        print(f"{publish_page(cfg)} is the published run of this scale")


def keep(outputs: Path, folder: Path) -> int:
    """Packs the files of a run's page under their paths in the project; counts them.

    Equal files make equal bytes. Raises FileNotFoundError for a run without a record.
    """
    from value_aware_attention.files import new_folder
    from value_aware_study.report.records import files_of

    files_of(outputs / "records")
    files = sorted(file for pattern in OF_PAGE for file in outputs.glob(pattern))
    with new_folder(folder) as partial, ZipFile(partial / "records.zip", "w") as packed:
        for file in files:
            packed.writestr(ZipInfo(file.as_posix()), file.read_bytes(), ZIP_BZIP2)
    return len(files)


def publish_page(cfg: DictConfig) -> Path:
    """Writes the page of report/ and its numbers to <results>/<scale>, if it is of this scale.

    Of pictures and tables in Markdown, which the page offers to save, `linked` ones are kept.
    Without `page` only tables and numbers are written. The seconds of the stages stay as they are.
    """
    from pipelines.app.summary import summary
    from value_aware_attention.files import (
        CHECKSUMS,
        check_checksums,
        listed,
        new_folder,
        write_checksums,
    )
    from value_aware_study.paths import SUMMARY, TIMES, inside
    from value_aware_study.report.page import PAGE, pack
    from value_aware_study.report.records import read_folder

    records, report = read_folder(cfg.records), Path(cfg.report)
    if not report.exists():
        raise FileNotFoundError(f"{report} holds no report; make repro writes it")
    if records[0].scale != cfg.scale:
        raise ValueError(
            f"{cfg.records} holds records of scale {records[0].scale}; scale is {cfg.scale}"
        )
    published = inside(cfg.results, cfg.scale)
    again = "make the report again (python -m pipelines.report)"
    if not (names := listed(report)):
        raise ValueError(f"{report} has no {CHECKSUMS}, the list of its page's files: {again}")
    check_checksums(report, again)
    with (report / "grid.csv").open(encoding="utf-8", newline="") as text:
        reported = {row["scale"] for row in csv.DictReader(text)}
    if reported != {cfg.scale}:
        raise ValueError(
            f"{report} is of scale {', '.join(reported)}; scale is {cfg.scale}: {again}"
        )
    kept = [name for name in names if name.endswith(".csv") or (cfg.page and name in cfg.linked)]
    with new_folder(published) as folder:
        for file in [*(report / name for name in kept), *published.glob(TIMES)]:
            shutil.copy(file, folder)
        if cfg.page:
            (folder / PAGE).write_text(pack(report / PAGE))
        write_json(folder / SUMMARY, {record.model: summary(record) for record in records})
        write_checksums(folder)
    return published


def publish_records(cfg: DictConfig, name: str) -> Path:
    """Writes <results>/<name>: the records of this run, and the published ones of other texts.

    A survey takes the place of the published one, which may be of another scale.
    """
    from value_aware_attention.files import new_folder, write_checksums
    from value_aware_study.paths import inside

    published = inside(cfg.results, name)
    kept = published.glob("*.json.xz") if name != "survey" else ()  # one scale in a survey
    packed = {file.name: file.read_bytes() for file in kept}
    for pattern, published_name in RECORDS[name].items():
        for file in Path(cfg.outputs).glob(pattern):
            if not file.stem.endswith("-cut"):
                content = lzma.compress(file.read_bytes(), preset=9)
                packed[f"{published_name.format(file)}.xz"] = content
    if not packed:
        command = {"pretrained": "make decoder", "probe": "python -m pipelines.probe"}
        raise FileNotFoundError(
            f"{cfg.outputs} holds no records of {name}: run {command.get(name, f'make {name}')}"
        )
    with new_folder(published) as folder:
        for record, content in packed.items():
            (folder / record).write_bytes(content)
        write_checksums(folder)
    return published


if __name__ == "__main__":
    main()
