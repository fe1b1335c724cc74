"""Stage report: one page of the paper's claims, tables and figures, ours beside the paper's.

python -m pipelines.report

The survey and probed models are on it where they were measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipelines.app import app
from value_aware_attention.files import CONTENT_SHA256, load_json, reading
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_attention.measurement.record import Record
from value_aware_attention.measurement.record import read as check_kind
from value_aware_study.report import Section, write_page
from value_aware_study.report.caches import cache_section
from value_aware_study.report.explorer import Exploration
from value_aware_study.report.model import model_section
from value_aware_study.report.pages import report_page
from value_aware_study.report.results import Results, files_of, read_folder
from value_aware_study.report.survey import survey_section

AGAIN = "make it again (dvc repro)"
Numbers = Mapping[str, float | None]
MEASURED = {"model": str, "curve": tuple[Numbers, ...], "hyperparameters": Mapping[str, Any]}
"""What a report shows of a training"""
TIMED = ("cells", "methods", "layer", "run_on")
COUNTS = Mapping[str, Mapping[str, Numbers]]
"""By source and split"""


@app("report")
def main(cfg: DictConfig) -> None:
    """Writes <report>/index.html, and a .csv, .md and .png of each exhibit."""
    metrics = [read_training(file) for file in files_of(cfg.training)]
    trained = {one["model"]: one for one in metrics}
    results = Results.of(read_folder(cfg.records), trained, read_tokens(Path(cfg.tokens)))
    survey = survey_of(cfg, results.records)
    probed = [read(file) for file in sorted(Path(cfg.probe).glob("*/record.json"))]
    names = ["model", *(f"model_{place}" for place in range(2, len(probed) + 1))]
    models = [model_section(*one) for one in zip(probed, names, strict=False)]
    caches = [read_caches(file) for file in sorted(Path(cfg.caches).glob("*.json"))]
    sections = [*([cache_section(caches)] if caches else []), *models]
    page = report_page(results, survey, sections, explored(cfg), probed, unchecked(cfg))
    write_page(page, Path(cfg.report))


def unchecked(cfg: DictConfig) -> list[str]:
    """Names the files that hold no checksum of their content, with their folder's."""
    folders = (cfg.training, cfg.records, cfg.explored, cfg.survey, cfg.trained, cfg.caches)
    files = [Path(cfg.tokens), Path(cfg.benchmark), *Path(cfg.probe).glob("*/record.json")]
    files += [file for folder in folders for file in Path(folder).glob("*.json")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.exists()}
    return sorted(
        f"{file.parent.name}/{file.name}"
        for file in texts
        if f'"{CONTENT_SHA256}": ' not in texts[file]
    )


def read_training(file: Path) -> dict[str, Any]:
    """What a training measured."""
    content = load_json(file, *MEASURED, remedy=AGAIN)
    with reading(file, AGAIN):
        for key, kind in MEASURED.items():
            check_kind(kind, content[key], key)
        for point in content["curve"]:
            point["step"]
    return content


def read_tokens(file: Path) -> dict[str, Any]:
    """Counts of the training text by source."""
    content = load_json(file, "sources", "vocabulary_size", remedy=AGAIN)
    with reading(file, AGAIN):
        check_kind(int, content["vocabulary_size"], "vocabulary_size")
        check_kind(COUNTS, content["sources"], "sources")
        if not content["sources"]:
            raise ValueError("it has no sources")
    return content


def read(file: Path) -> Record:
    """The record of a probe."""
    with reading(file, AGAIN):
        return Record.from_json(file.read_text(encoding="utf-8"), str(file))


def read_caches(file: Path) -> CacheRecord:
    """The record of cache methods on one model."""
    with reading(file, AGAIN):
        return CacheRecord.from_json(file.read_text(encoding="utf-8"), str(file))


def explored(cfg: DictConfig) -> Exploration | None:
    """What the evaluations left for the token explorer."""
    files = sorted(Path(cfg.explored).glob("*.json"))
    found = [exploration(file) for file in files]
    return Exploration.of(found) if found else None


def exploration(file: Path) -> Exploration:
    with reading(file, AGAIN):
        return Exploration.from_json(file.read_text(encoding="utf-8"))


def survey_of(cfg: DictConfig, evaluated: Sequence[Record]) -> Section | None:
    """The survey of these models; records of other checkpoints are left out, and named."""
    found, trained, benchmark = Path(cfg.survey), Path(cfg.trained), Path(cfg.benchmark)
    surveyed = read_folder(found) if any(found.glob("*.json")) else []
    variants = read_folder(trained) if any(trained.glob("*.json")) else []
    measured = load_json(benchmark, *TIMED, remedy=AGAIN) if benchmark.exists() else {}
    if not surveyed and not variants and not measured:
        return None
    known = {record.hashes.get("checkpoint") for record in evaluated}
    same = [record for record in surveyed if record.hashes.get("checkpoint") in known]
    others = [record.model for record in surveyed if record not in same]
    section = survey_section(same, variants, measured)
    if not others:
        return section
    said = f"Left out, of other checkpoints than the evaluation's: {', '.join(others)}."
    return replace(section, lead=f"{section.lead} {said}")


if __name__ == "__main__":
    main()
