"""Reads the records of a run: the one place where the report opens files of other stages.

Published records are compressed, and have the paths of a run's own below another folder. A run's
own record is read, else the published one with its path.
"""

import csv
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from value_aware_attention.files import CONTENT_SHA256, load_json, reading
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.record import Record
from value_aware_attention.records.record import read as check_kind
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report.claim import Key, Spread, key_of
from value_aware_study.report.frame import Results, Row
from value_aware_study.report.words import grouped

Parsed = TypeVar("Parsed")
REPRODUCE, RESTORE_RESULTS = (
    "make it again (dvc repro)",
    "restore it (git restore results), or remove it",
)
COMPRESSED = ".xz"
"""The suffix of a published record, after the name of a run's own"""
Numbers = Mapping[str, float | None]
CURVE_KINDS = {"model": str, "curve": tuple[Numbers, ...], "hyperparameters": Mapping[str, Any]}
"""Kinds of the entries that a report shows of a training."""
TOKEN_KINDS = {"vocabulary_size": int, "sources": Mapping[str, Mapping[str, Numbers]]}
"""Kinds of the entries that a report shows of the text; `sources` by source and split."""


def read(places: Mapping[str, Path]) -> Results:
    """Reads every record of a run from the folders and files that conf/report.yaml names.

    Evaluations, trainings and the counts of the text are required, other records are read if they
    exist. Raises FileNotFoundError if a required one is missing, and ValueError, naming the file,
    for a damaged one.
    """
    metrics, roots = places["metrics"], (places["records"], places["published"])
    training = [_checked(file, CURVE_KINDS) for file in files_of(metrics / "train")]
    explored = explorations(places["explored"], *roots)
    surveyed, variants, survey_of = survey(*roots)
    return Results.of(
        read_folder(places["records"]),
        {content["model"]: content for content in training},
        _checked(metrics / "tokens.json", TOKEN_KINDS),
        surveyed=surveyed,
        variants=variants,
        survey_of=survey_of,
        spreads=published_spreads(places["spread"]),
        verdicts=published_verdicts(places["results"]),
        probed=[*read_all(Record.from_json, "probe/*/record.json", *roots).values()],
        pretrained=pretrained(*roots),
        prompted=caches(*roots),
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


def pretrained(*roots: Path) -> list[Record]:
    """Reads the records of pretrained models below roots, in the order of `matching`.

    Decoders come first, then shorter windows. A small cut is shown if there is nothing else.
    """
    records = read_all(Record.from_json, "pretrained/*.json", *roots)
    models = {record.model for name, record in records.items() if not name.endswith("-cut.json")}
    whole = [
        record
        for name, record in records.items()
        if not (name.endswith("-cut.json") and record.model in models)
    ]
    return sorted(whole, key=lambda r: (r.task != "causal", r.length, r.text.description))


def caches(*roots: Path) -> list[CacheRecord]:
    """Reads the records of caches: short prompts, running text first."""
    return sorted(
        read_all(CacheRecord.from_json, "caches/*.json", *roots).values(),
        key=lambda r: (r.prefix, -len(r.cells), r.task != "running_text"),
    )


def explorations(explored: Path, *roots: Path) -> list[Exploration]:
    """Reads the tokens that probes and evaluations left for the token explorer.

    Evaluations come last, so that they replace probes in `Exploration.labelled`. Published tokens
    are left out if the run's own have other sizes or methods and do not join them.
    """
    probes, evaluations = matching("probe/*/explorer.json", *roots), matching("*.json", explored)
    by_file = {
        file: _parsed(lambda text, _: Exploration.from_json(text), file)
        for file in (*probes.values(), *evaluations.values())
    }
    ours = [content for file, content in by_file.items() if file.suffix != COMPRESSED]
    return [
        exploration
        for file, exploration in by_file.items()
        if file.suffix != COMPRESSED or all(map(exploration.joins, ours))
    ]


def survey(records: Path, published: Path) -> tuple[list[Record], list[Record], str]:
    """Reads the survey's records, those of models trained with a method, and their scale.

    If the run has none of either, they are the published ones; the scale is "" for a run's own.
    """
    names = ("survey", "trained")
    root = records if any(matching(f"{name}/*.json", records) for name in names) else published
    surveyed, variants = (
        read_folder(root / name) if matching("*.json", root / name) else [] for name in names
    )
    return surveyed, variants, surveyed[0].scale if surveyed and root == published else ""


def read_all(parse: Callable[[str, str], Parsed], pattern: str, *roots: Path) -> dict[str, Parsed]:
    """Parses the records that `matching` finds, by their paths."""
    return {name: _parsed(parse, file) for name, file in matching(pattern, *roots).items()}


def matching(pattern: str, *roots: Path) -> dict[str, Path]:
    """Finds the files that match below the roots, compressed or not: path below the root -> file.

    Files with equal paths are the same record: the first root's is returned. The roots are the
    records of a run, then the published ones.
    """
    return {
        file.relative_to(root).as_posix().removesuffix(COMPRESSED): file
        for root in reversed(roots)
        for file in sorted([*root.glob(pattern), *root.glob(pattern + COMPRESSED)])
    }


def read_folder(folder: Path | str) -> list[Record]:
    """Reads the evaluation records of a folder, in the order of their files' names.

    Raises FileNotFoundError for a folder without records; ValueError, naming the files, if their
    scales or corpora differ, if one has another schema version or is damaged, or if two have one
    model.
    """
    records = {str(file): _parsed(Record.from_json, file) for file in files_of(folder)}
    _check_alike("scales", {name: record.scale for name, record in records.items()})
    _check_alike("corpora", {name: record.text.description for name, record in records.items()})
    for model, files in grouped((record.model, name) for name, record in records.items()).items():
        if len(files) > 1:
            raise ValueError(
                f"{files[0]} and {files[1]} are both records of {model}: remove one of them"
            )
    return list(records.values())


def files_of(folder: Path | str) -> list[Path]:
    """Returns a folder's JSON files by name; raises FileNotFoundError if there are none."""
    if files := [*matching("*.json", Path(folder)).values()]:
        return files
    raise FileNotFoundError(f"{folder} holds no records; run dvc repro first")


def _parsed(parse: Callable[[str, str], Parsed], file: Path) -> Parsed:
    """Parses a file; raises ValueError, with the file's name and a remedy, if it is damaged."""
    is_published = file.suffix == COMPRESSED
    with reading(file, RESTORE_RESULTS if is_published else REPRODUCE):
        content = file.read_bytes()
        return parse((lzma.decompress(content) if is_published else content).decode(), str(file))


def published_spreads(folder: Path) -> dict[Key, Spread]:
    """Reads the spread over trainings of the comparisons of a published run; {} without them."""
    spreads = {}
    for file in filter(Path.exists, (folder / name for name in ("findings.csv", "strength.csv"))):
        with reading(file, RESTORE_RESULTS), file.open(encoding="utf-8", newline="") as text:
            for row in csv.DictReader(text):
                if row.get("seeds"):
                    spreads[key_of(row["what"], row["model"])] = Spread(
                        float(row["spread"]), int(row["seeds"]), folder.name
                    )
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
    """Raises ValueError, naming the files, if they do not all have the same value."""
    if len(names := grouped((value, name) for name, value in values.items())) > 1:
        different = "; ".join(f"{value!r}: {', '.join(files)}" for value, files in names.items())
        raise ValueError(f"the records of a report have one of its {what}, these have {different}")


def _unchecked(places: Mapping[str, Path]) -> list[str]:
    """Names the files, with their folder's name, that hold no checksum of their content."""
    files = [
        *(places["metrics"] / "tokens.json", *places["metrics"].glob("train/*.json")),
        *(*places["explored"].glob("*.json"), *places["records"].rglob("*.json")),
    ]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    return sorted(
        f"{file.parent.name}/{file.name}"
        for file in texts
        if f'"{CONTENT_SHA256}": ' not in texts[file]
    )
