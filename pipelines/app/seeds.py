"""Keeps the records of a finished seed in results/seeds, and takes them from there.

A seed is one training of every model with its evaluation. Kept are the files of its stages except
the weights, with the fingerprints of these stages and the sha256 of the tokens that they read.
"""

import gzip
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dvc.repo import Repo
from dvc.stage import PipelineStage

from pipelines.app.checkpoint import file_hash
from pipelines.app.hydra_app import write_json
from pipelines.fingerprints import differences, needed, refusals_of_dvc
from value_aware_attention.files import from_json, load_json, new_file, reading, to_json, write_text
from value_aware_study.paths import TIMES, inside

FIRST, END = "first", ".json.gz"
GROUPS = ("train_causal", "train_masked", "evaluate_causal", "evaluate_masked")
"""Beginnings of the names of stages that belong to a seed"""
REMEDY = "restore it (git restore results), or remove it to train the seed again"


def seed_of(stage: str) -> str | None:
    """Returns the option of conf/replicate that a stage trains or evaluates; None for others."""
    group, _, cell = stage.partition("@")
    if not group.startswith(GROUPS):
        return None
    return cell.rpartition("-")[2] if group.endswith("_again") else FIRST


def stages_of(seed: str, stages: Mapping[str, PipelineStage]) -> dict[str, PipelineStage]:
    """Selects the stages of a seed. Raises ValueError where there are none."""
    own = {name: stage for name, stage in stages.items() if seed_of(name) == seed}
    if not own:
        known = dict.fromkeys(one for name in stages if (one := seed_of(name)))
        raise ValueError(f"the seed is {seed}; it must be {' or '.join(known)} at this scale")
    return own


def keep(seed: str, outputs: Path, folder: Path) -> Path:
    """Writes <folder>/<seed>.json.gz from the outputs of a scale; returns its path.

    Raises ValueError for a seed that the scale does not have, and for a stage that has yet to run.
    """
    own = stages_of(seed, needed(["report"]))
    with refusals_of_dvc():
        waiting = Repo().status(list(own))
    if waiting:
        raise ValueError(f"{next(iter(waiting))} has yet to run: python -m pipelines.repro {seed}")
    times = load_json(outputs / TIMES)
    content = {
        "tokens": file_hash([outputs / "tokens"]),
        "fingerprints": {name: load_json(_fingerprint(outputs, name)) for name in own},
        "files": {str(name): (outputs / name).read_text() for name in _files(own, outputs)},
        "seconds": {name: times[name] for name in own if name in times},
    }
    kept = inside(folder, seed, END)
    with new_file(kept) as partial:
        partial.write_bytes(gzip.compress(to_json(content).encode(), mtime=0))
    return kept


def take(stages: Mapping[str, PipelineStage], outputs: Path, folder: Path) -> set[str]:
    """Writes the files of every kept seed that today's code would make; returns its stages.

    A seed is taken if the fingerprints of its stages and the tokens are equal, and if the outputs
    hold no other files of it. Prints a line for each.
    """
    taken: set[str] = set()
    for kept in sorted(folder.glob(f"*{END}")):
        seed = kept.name.removesuffix(END)
        own = {name: stage for name, stage in stages.items() if seed_of(name) == seed}
        with reading(kept, REMEDY):
            content = from_json(gzip.decompress(kept.read_bytes()).decode())
            files = {
                outputs / name: content["files"].get(str(name)) for name in _files(own, outputs)
            }
            reason = next(_refusals(own, content, files, outputs), None)
            seconds = content["seconds"]
        if reason:
            print(f"{kept} is not used: {reason}", flush=True)
            continue
        for file, text in files.items():
            write_text(file, text)
        times = load_json(outputs / TIMES) if (outputs / TIMES).exists() else {}
        write_json(outputs / TIMES, seconds | times)
        taken |= set(own)
        print(f"{kept} has the records of seed {seed}: its stages are passed over", flush=True)
    return taken


def _refusals(
    own: Iterable[str], content: Mapping[str, Any], files: Mapping[Path, str], outputs: Path
) -> Iterator[str]:
    """Yields the reasons for which a kept seed cannot stand for its stages."""
    if not own:
        yield "this run has no such seed"
    for name in own:
        before, now = content["fingerprints"].get(name), load_json(_fingerprint(outputs, name))
        if before != now:
            changed = sorted(differences(before or {}, now))
            yield f"{name} has changed ({', '.join(changed[:3])}{', ...' if changed[3:] else ''})"
    if content["tokens"] != file_hash([outputs / "tokens"]):
        yield "the tokens are others"
    for file, text in files.items():
        if file.exists() and file.read_text() != text:
            yield f"{file} is of another training"


def _files(own: Mapping[str, PipelineStage], outputs: Path) -> Iterable[Path]:
    """Lists the outputs of stages that are no models, relative to the outputs of the scale."""
    paths = (Path(out.def_path) for stage in own.values() for out in stage.outs)
    return [path.relative_to(outputs) for path in paths if path.suffix]


def _fingerprint(outputs: Path, stage: str) -> Path:
    return outputs / "fingerprints" / f"{stage}.json"
