"""Reads the records of a run: the one place where the report opens files of other stages."""

import csv
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from value_aware_attention.files import CONTENT_SHA256, load_json, reading
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.record import JsonRecord, Record
from value_aware_attention.records.record import read as check_kind
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report.claim import Key, Spread, key_of
from value_aware_study.report.frame import Results, Row
from value_aware_study.report.words import grouped

AnyRecord = TypeVar("AnyRecord", bound=JsonRecord)
Parsed = TypeVar("Parsed")
REPRODUCE, RESTORE_RESULTS = (
    "make it again (dvc repro)",
    "restore it (git restore results), or remove it",
)
Numbers = Mapping[str, float | None]
CURVE_KINDS = {"model": str, "curve": tuple[Numbers, ...], "hyperparameters": Mapping[str, Any]}
"""Kinds of the entries that a report shows of a training."""
TOKEN_KINDS = {"vocabulary_size": int, "sources": Mapping[str, Mapping[str, Numbers]]}
"""Kinds of the entries that a report shows of the text; `sources` by source and split."""


def read(places: Mapping[str, Path]) -> Results:
    """Reads every record of a run from the folders and files that conf/report.yaml names.

    Evaluations, trainings and the counts of the text are required, other records are read where
    they are. Raises FileNotFoundError where a required one is missing, and ValueError, naming the
    file, for a damaged one.
    """
    training = [_checked(file, CURVE_KINDS) for file in files_of(places["training"])]
    tokens = _checked(places["tokens"], TOKEN_KINDS)
    explored = explorations(places)
    surveyed, variants, survey_of = survey(places)
    return Results.of(
        read_folder(places["records"]),
        {metrics["model"]: metrics for metrics in training},
        tokens,
        surveyed=surveyed,
        variants=variants,
        survey_of=survey_of,
        spreads=published_spreads(places["spread"]),
        verdicts=published_verdicts(places["published"]),
        probed=read_probed(places["probe"], places["probe_published"]),
        pretrained=pretrained(places["pretrained"], places["pretrained_published"]),
        prompted=caches(places["caches"], places["caches_published"]),
        explored=Exploration.of(explored) if explored else None,
        links=links_of(places["citation"]),
        unchecked=_unchecked(places),
    )


def links_of(citation: Path) -> dict[str, str]:
    """Reads the addresses of code, manual and archive that a CITATION.cff has."""
    cited = yaml.safe_load(citation.read_text(encoding="utf-8")) if citation.is_file() else {}
    links = {"Code": cited.get("repository-code"), "Manual": cited.get("url")}
    links["DOI"] = f"https://doi.org/{cited['doi']}" if cited.get("doi") else None
    return {name: address for name, address in links.items() if address}


def pretrained(folder: Path, published: Path) -> list[Record]:
    """Reads the records of pretrained models, of a run in the place of published ones.

    Decoders come first, then shorter windows. A small cut is shown where nothing else is there.
    """
    records = with_published(Record, folder, published)
    models = {record.model for name, record in records.items() if not name.endswith("-cut.json")}
    whole = [
        record
        for name, record in records.items()
        if not (name.endswith("-cut.json") and record.model in models)
    ]
    return sorted(whole, key=lambda r: (r.task != "causal", r.length, r.text.description))


def caches(folder: Path, published: Path) -> list[CacheRecord]:
    """Reads the records of caches, as `with_published` does: short prompts, running text first."""
    records = with_published(CacheRecord, folder, published).values()
    return sorted(records, key=lambda r: (r.prefix, -len(r.cells), r.task != "running_text"))


def read_probed(folder: Path, published: Path) -> list[Record]:
    """Reads the records of probed models, of a run in the place of published ones."""
    files = sorted(folder.glob("*/record.json"))
    ours = {f"record-{file.parent.name}.json": _parsed(Record, file) for file in files}
    return [*(unpacked(Record.from_json, published, "record-") | ours).values()]


def explorations(places: Mapping[str, Path]) -> list[Exploration]:
    """Reads the tokens that probes and evaluations left for the token explorer.

    Published ones come first, so that a run's own take their place in `Exploration.labelled`; they
    are left out beside ones of other sizes or methods.
    """
    ours = []
    for file in sorted(
        [*places["probe"].glob("*/explorer.json"), *places["explored"].glob("*.json")]
    ):
        with reading(file, REPRODUCE):
            ours.append(Exploration.from_json(file.read_text(encoding="utf-8")))
    published = unpacked(
        lambda text, _: Exploration.from_json(text), places["probe_published"], "explorer-"
    )
    shown = {(other.sizes, other.methods) for other in ours}
    alike = [other for other in published.values() if shown <= {(other.sizes, other.methods)}]
    return [*alike, *ours]


def survey(places: Mapping[str, Path]) -> tuple[list[Record], list[Record], str]:
    """Reads the survey's records, those of models trained with a method, and their scale.

    Where the run has none of either, they are the published ones; the scale is "" for a run's own.
    """
    names = ("survey", "trained")
    surveyed, variants = (
        read_folder(places[name]) if any(places[name].glob("*.json")) else [] for name in names
    )
    if surveyed or variants:
        return surveyed, variants, ""
    published = places["survey_published"]
    surveyed, variants = (
        [*unpacked(Record.from_json, published, f"{name}-").values()] for name in names
    )
    return surveyed, variants, surveyed[0].scale if surveyed else ""


def with_published(kind: type[AnyRecord], folder: Path, published: Path) -> dict[str, AnyRecord]:
    """Reads records of a run in the place of published ones, by the name of their files."""
    ours = {file.name: _parsed(kind, file) for file in sorted(folder.glob("*.json"))}
    return unpacked(kind.from_json, published) | ours


def unpacked(
    parse: Callable[[str, str], Parsed], published: Path, begins: str = ""
) -> dict[str, Parsed]:
    """Reads the published records whose files' names begin so, by the names they were made with."""
    with reading(published, RESTORE_RESULTS):
        return {
            file.stem: parse(lzma.decompress(file.read_bytes()).decode(), str(file))
            for file in sorted(published.glob(f"{begins}*.json.xz"))
        }


def read_folder(folder: Path | str) -> list[Record]:
    """Reads the evaluation records of a folder, in the order of their files' names.

    Raises FileNotFoundError for a folder without records; ValueError, naming the files, where
    their scales or corpora differ, where one is of another schema version or damaged, or where two
    are of one model.
    """
    records = {str(file): _parsed(Record, file) for file in files_of(folder)}
    _check_alike("scales", {name: record.scale for name, record in records.items()})
    _check_alike("corpora", {name: record.text.description for name, record in records.items()})
    for model, files in grouped((record.model, name) for name, record in records.items()).items():
        if len(files) > 1:
            twice = f"{files[0]} and {files[1]} are both records of {model}"
            raise ValueError(f"{twice}: remove one of them")
    return list(records.values())


def files_of(folder: Path | str) -> list[Path]:
    """Returns a folder's JSON files by name; raises FileNotFoundError where there are none."""
    if files := sorted(Path(folder).glob("*.json")):
        return files
    raise FileNotFoundError(f"{folder} holds no records; run dvc repro first")


def _parsed(kind: type[AnyRecord], file: Path) -> AnyRecord:
    """Returns a record of this kind; ValueError, with the file's name, for anything else."""
    with reading(file, REPRODUCE):
        return kind.from_json(file.read_text(encoding="utf-8"), str(file))


def published_spreads(folder: Path) -> dict[Key, Spread]:
    """Reads the spread over trainings of the comparisons of a published run; {} without them."""
    spreads = {}
    for file in filter(Path.exists, (folder / name for name in ("findings.csv", "strength.csv"))):
        with reading(file, RESTORE_RESULTS), file.open(encoding="utf-8", newline="") as text:
            for row in csv.DictReader(text):
                if row.get("seeds"):
                    spread = Spread(float(row["spread"]), int(row["seeds"]), folder.name)
                    spreads[key_of(row["what"], row["model"])] = spread
    return spreads


def published_verdicts(results: Path) -> dict[str, dict[str, str]]:
    """Reads the verdict on each claim of every published run, by the run's scale."""
    verdicts = {}
    for file in sorted(results.glob("*/claims.csv")):
        with reading(file, RESTORE_RESULTS), file.open(encoding="utf-8", newline="") as text:
            verdicts[file.parent.name] = {
                row["claim"]: row["verdict"] for row in csv.DictReader(text)
            }
    return verdicts


def _checked(file: Path, kinds: Mapping[str, Any]) -> Row:
    """Reads a JSON object whose entries are of these kinds; curves have steps, texts a source."""
    content = load_json(file, *kinds, remedy=REPRODUCE)
    with reading(file, REPRODUCE):
        for key, kind in kinds.items():
            check_kind(kind, content[key], key)
        for point in content.get("curve", ()):
            point["step"]
        if content.get("sources") == {}:
            raise ValueError("it has no sources")
    return content


def _check_alike(what: str, values: Mapping[str, str]) -> None:
    """Raises ValueError, naming the files, where they do not all have the same value."""
    names = grouped((value, name) for name, value in values.items())
    if len(names) > 1:
        different = "; ".join(f"{value!r}: {', '.join(files)}" for value, files in names.items())
        raise ValueError(f"the records of a report have one of its {what}, these have {different}")


def _unchecked(places: Mapping[str, Path]) -> list[str]:
    """Names the files, with their folder's name, that hold no checksum of their content."""
    folders = ("training", "records", "explored", "survey", "trained", "pretrained", "caches")
    files = [places["tokens"], *places["probe"].glob("*/record.json")]
    files += places["probe"].glob("*/explorer.json")
    files += [file for folder in folders for file in places[folder].glob("*.json")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.exists()}
    return sorted(
        f"{file.parent.name}/{file.name}"
        for file in texts
        if f'"{CONTENT_SHA256}": ' not in texts[file]
    )
