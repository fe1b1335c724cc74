"""Reads everything that a report shows from the files that the stages wrote."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from value_aware_attention.files import CONTENT_SHA256, load_json, reading
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_attention.measurement.record import Record
from value_aware_attention.measurement.record import read as check_kind
from value_aware_study.report import Section
from value_aware_study.report.explorer import Exploration
from value_aware_study.report.results import files_of, read_folder
from value_aware_study.report.survey import survey_section

AGAIN = "make it again (dvc repro)"
Numbers = Mapping[str, float | None]
MEASURED = {"model": str, "curve": tuple[Numbers, ...], "hyperparameters": Mapping[str, Any]}
"""Keys of a training's metrics that a report shows, with their types."""
TIMED = ("cells", "methods", "layer", "run_on")
"""Keys of a benchmark that a report shows."""
COUNTS = Mapping[str, Mapping[str, Numbers]]
"""The type of counts by source and split."""


def unchecked(files: Iterable[Path]) -> list[str]:
    """Names the files that hold no checksum of their content, each with its folder."""
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.exists()}
    return sorted(
        f"{file.parent.name}/{file.name}"
        for file in texts
        if f'"{CONTENT_SHA256}": ' not in texts[file]
    )


def read_trainings(folder: str) -> dict[str, Mapping[str, Any]]:
    """Reads the metrics of every training, by the model's name."""
    found: dict[str, Mapping[str, Any]] = {}
    for file in files_of(folder):
        content = load_json(file, *MEASURED, remedy=AGAIN)
        with reading(file, AGAIN):
            for key, kind in MEASURED.items():
                check_kind(kind, content[key], key)
            for point in content["curve"]:
                point["step"]
        found[content["model"]] = content
    return found


def read_tokens(file: Path) -> dict[str, Any]:
    """Reads the counts of the training text by source."""
    content = load_json(file, "sources", "vocabulary_size", remedy=AGAIN)
    with reading(file, AGAIN):
        check_kind(int, content["vocabulary_size"], "vocabulary_size")
        check_kind(COUNTS, content["sources"], "sources")
        if not content["sources"]:
            raise ValueError("it has no sources")
    return content


def read_probe(file: Path) -> Record:
    """Reads the record of a probe."""
    with reading(file, AGAIN):
        return Record.from_json(file.read_text(encoding="utf-8"), str(file))


def read_caches(file: Path) -> CacheRecord:
    """Reads the record of cache methods on one model."""
    with reading(file, AGAIN):
        return CacheRecord.from_json(file.read_text(encoding="utf-8"), str(file))


def read_explored(folder: Path) -> Exploration | None:
    """Reads what the evaluations left for the token explorer; None where they left nothing."""
    found = []
    for file in sorted(folder.glob("*.json")):
        with reading(file, AGAIN):
            found.append(Exploration.from_json(file.read_text(encoding="utf-8")))
    return Exploration.of(found) if found else None


def read_survey(
    evaluated: Sequence[Record], *, surveyed: Path, trained: Path, benchmark: Path
) -> Section | None:
    """Makes the survey's section of the models evaluated; None where nothing was surveyed.

    Records of other checkpoints are left out, and named.
    """
    records = read_folder(surveyed) if any(surveyed.glob("*.json")) else []
    variants = read_folder(trained) if any(trained.glob("*.json")) else []
    timed = load_json(benchmark, *TIMED, remedy=AGAIN) if benchmark.exists() else {}
    if not records and not variants and not timed:
        return None
    known = {record.hashes.get("checkpoint") for record in evaluated}
    own = [record for record in records if record.hashes.get("checkpoint") in known]
    others = [record.model for record in records if record not in own]
    section = survey_section(own, variants, timed)
    if not others:
        return section
    said = f"Left out, of other checkpoints than the evaluation's: {', '.join(others)}."
    return replace(section, lead=f"{section.lead} {said}")
