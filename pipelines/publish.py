"""Publishes the run of report/ as results/<scale>, with which later runs are compared.

python -m pipelines.publish [scale=hours] [publish.trainings|pretrained|caches=true]

No other command changes results/<scale>. With `publish.trainings` it writes results/seeds/<scale>
alone, the records of the finished trainings; with `publish.pretrained` results/pretrained, the page
of the records of make decoder with these records, which needs no other stage; with `publish.caches`
results/caches in the same way, of make caches.
"""

import gzip
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from pipelines.app import app, write_json

if TYPE_CHECKING:  # it brings what draws
    from value_aware_study.report.exhibit import Page


@app("publish")
def main(cfg: DictConfig) -> None:
    """Writes <results>/<scale>: the page, its tables and figures, the summary, the times."""
    if cfg.trainings:
        from pipelines.app.seeds import keep

        print(f"{cfg.seeds} has {keep(Path(cfg.outputs), Path(cfg.seeds))} files of trainings")
    elif cfg.pretrained or cfg.caches:
        name = "pretrained" if cfg.pretrained else "caches"
        print(f"{publish_records(cfg, name)} is the published run of {name}")
    else:
        print(f"{publish_page(cfg)} is the published run of this scale")


def publish_page(cfg: DictConfig) -> Path:
    """Writes the page of report/ to <results>/<scale>, after checking that it is of this scale."""
    from pipelines.app.summary import summary
    from pipelines.verdict import numbers
    from value_aware_attention.files import CHECKSUMS, check_checksums, listed, new_folder
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
    # the stages of kept records did not run here
    seconds = numbers(published / TIMES) | numbers(Path(cfg.outputs, TIMES))
    with new_folder(published) as folder:
        for file in report.iterdir():
            if file.name in names and file.suffix != ".json":  # the page has the explorer's numbers
                shutil.copy(file, folder)
        (folder / PAGE).write_text(pack(report / PAGE))
        write_json(folder / SUMMARY, {record.model: summary(record) for record in records})
        write_json(folder / TIMES, seconds)
    return published


def publish_records(cfg: DictConfig, name: str) -> Path:
    """Writes <results>/<name>: the page of pretrained models or caches, and their whole records."""
    from pipelines.report import origin
    from value_aware_study.report import contents, records

    folder, published = Path(cfg.outputs) / name, Path(cfg.results) / name
    read, build = getattr(records, name), getattr(contents, f"{name}_page")
    page = build(read(folder, published), origin())
    packed = {file.name: file.read_bytes() for file in published.glob("*.json.gz")}
    for file in folder.glob("*.json"):
        if not file.stem.endswith("-cut"):
            packed[f"{file.name}.gz"] = gzip.compress(file.read_bytes(), mtime=0)
    return publish_alone(cfg, name, page, packed)


def publish_alone(cfg: DictConfig, name: str, page: "Page", records: Mapping[str, bytes]) -> Path:
    """Writes a page with its tables and figures, and records beside it, to <results>/<name>."""
    from value_aware_attention.files import new_folder, write_checksums
    from value_aware_study.paths import inside
    from value_aware_study.report.page import pack, write_page

    published = inside(cfg.results, name)
    with new_folder(published) as folder:
        written = write_page(page, folder)
        written.write_text(pack(written))
        for file, content in records.items():
            (folder / file).write_bytes(content)
        write_checksums(folder)
    return published


if __name__ == "__main__":
    main()
