"""Publishes the run of report/ as results/<scale>, with which later runs are compared.

python -m pipelines.publish [scale=hours] [what=page|numbers|trainings|pretrained|caches|...]

No other command changes results/. `page` is results/<scale> with the page and its numbers,
`numbers` the same without the page. The others are below results/records: `trainings` is
<scale>/records.zip, the records of a run, from which `make page` draws its page again. The rest are
the records of make decoder, make caches, make survey and pipelines.probe, compressed, with the
paths that they have below outputs/<scale>/records. The page of every run shows them, unless the run
has its own records.
"""

import csv
import lzma
import shutil
from pathlib import Path
from zipfile import ZIP_BZIP2, ZipFile, ZipInfo

from omegaconf import DictConfig

from pipelines.app import app, write_json
from value_aware_attention.files import (
    CHECKSUMS,
    check_checksums,
    listed,
    new_folder,
    write_checksums,
)
from value_aware_study.safe_text import SUMMARY, TIMES, inside

RECORDS = {
    "pretrained": ("pretrained",),
    "caches": ("caches",),
    "survey": ("survey", "trained"),
    "probe": ("probe",),
}
"""What is published -> the folders of its records"""


@app("publish", short=("what",))
def main(cfg: DictConfig) -> None:
    """Writes the folder of results/ that `what` names. Raises ValueError for another word."""
    if cfg.what not in (allowed := ("page", "numbers", "trainings", *RECORDS)):
        raise ValueError(f"publish.what is {cfg.what}; it must be one of {', '.join(allowed)}")
    if cfg.what == "trainings":
        folder = inside(cfg.published, cfg.scale)
        print(f"{folder} has {keep(Path(cfg.outputs), folder)} files of trainings")
    elif cfg.what in RECORDS:
        print(f"{publish_records(cfg, cfg.what)} is the published run of {cfg.what}")
    else:
        print(f"{publish_page(cfg)} is the published run of this scale")


def keep(outputs: Path, folder: Path) -> int:
    """Packs the files of a run's page under their paths in the project; counts them.

    Equal files give equal bytes. Raises FileNotFoundError for a run without a record.
    """
    from value_aware_study.report.records import files_of

    files_of(outputs / "records")
    patterns = ("records/*.json", "explored/*.json", "metrics/**/*.json", "summary/*.json")
    files = sorted(file for name in (*patterns, "plots/*.csv") for file in outputs.glob(name))
    with new_folder(folder) as partial, ZipFile(partial / "records.zip", "w") as packed:
        for file in files:
            packed.writestr(ZipInfo(file.as_posix()), file.read_bytes(), ZIP_BZIP2)
    return len(files)


def publish_page(cfg: DictConfig) -> Path:
    """Writes the page of report/ and its numbers to <results>/<scale>, if it is of this scale.

    The page offers pictures and tables in Markdown to save; only `linked` ones are copied. Without
    `page` only tables and numbers are written. The seconds of the stages stay as they are.
    """
    from pipelines.app.summary import summary
    from value_aware_study.report.page import PAGE, pack
    from value_aware_study.report.records import read_folder

    records, report = read_folder(cfg.records), Path(cfg.report)
    with_page = cfg.what == "page"
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
    if "grid.csv" not in names:
        raise ValueError(f"{report} has no grid.csv, the numbers of its page: {again}")
    check_checksums(report, again)
    with (report / "grid.csv").open(encoding="utf-8", newline="") as text:
        reported = {row["scale"] for row in csv.DictReader(text)}
    if reported != {cfg.scale}:
        raise ValueError(
            f"{report} is of scale {', '.join(reported)}; scale is {cfg.scale}: {again}"
        )
    kept = [name for name in names if name.endswith(".csv") or (with_page and name in cfg.linked)]
    with new_folder(published) as folder:
        for file in [*(report / name for name in kept), *published.glob(TIMES)]:
            shutil.copy(file, folder)
        if with_page:
            (folder / PAGE).write_text(pack(report / PAGE))
        write_json(folder / SUMMARY, {record.model: summary(record) for record in records})
        write_checksums(folder)
    return published


def publish_records(cfg: DictConfig, what: str) -> Path:
    """Writes the records of this run to <published>, with their paths below <records>.

    Published records with other paths stay, except those of a survey, which has one scale. Raises
    FileNotFoundError for a run without such records.
    """
    from value_aware_study.report.records import COMPRESSED

    records, published = Path(cfg.records), Path(cfg.published)
    files = {
        name: [file for file in (records / name).rglob("*.json") if not file.match("*-cut.json")]
        for name in RECORDS[what]
    }
    if not any(files.values()):
        command = {"pretrained": "make decoder", "probe": "python -m pipelines.probe"}
        raise FileNotFoundError(
            f"{records} holds no records of {what}: run {command.get(what, f'make {what}')}"
        )
    for name in files:
        with new_folder(published / name) as folder:
            if what != "survey" and (published / name).exists():
                shutil.copytree(
                    published / name,
                    folder,
                    ignore=shutil.ignore_patterns(CHECKSUMS),
                    dirs_exist_ok=True,
                )
            for file in files[name]:
                packed = folder / f"{file.relative_to(records / name)}{COMPRESSED}"
                packed.parent.mkdir(parents=True, exist_ok=True)
                packed.write_bytes(lzma.compress(file.read_bytes(), preset=9))
        if not files[name]:
            shutil.rmtree(published / name)
    return published / what


if __name__ == "__main__":
    main()
