"""Keeps the records of a scale's trainings in results/seeds, and takes them from there.

Kept are the files that the stages of the page wrote (their folders are weights, corpus, tokens),
the fingerprints of all stages, and dvc.lock, by which DVC tells whether the records still are
those of today's code. `dvc repro --allow-missing` then passes over the stages without the folders.
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZIP_BZIP2, ZipFile, ZipInfo

from dvc.output import Output
from dvc.repo import Repo
from dvc.stage import PipelineStage

from pipelines.fingerprints import refusals_of_dvc, stages_of_page
from value_aware_attention.files import new_file, new_folder, reading

LOCK = Path("dvc.lock")
REMEDY = "restore it (git restore results), or remove its folder to train again"


def files_of(stages: Iterable[PipelineStage]) -> Iterator[Output]:
    """Yields the outputs of stages that are files; weights, corpus and tokens are folders."""
    yield from (out for stage in stages for out in stage.outs if Path(out.def_path).suffix)


def keep(outputs: Path, folder: Path) -> int:
    """Replaces a folder by the records of a scale's trainings that are finished; counts them."""
    stages = stages_of_page().values()
    records = [Path(out.def_path) for out in files_of(stages) if out.exists]
    with new_folder(folder) as partial:
        pack(records, partial / "records.zip")
        pack(sorted((outputs / "fingerprints").iterdir()), partial / "fingerprints.zip")
        shutil.copy(LOCK, partial)
    return len(records)


def pack(files: Iterable[Path], archive: Path) -> None:
    """Packs files under their paths in the project; equal files make equal bytes."""
    with ZipFile(archive, "w") as packed:
        for file in files:
            packed.writestr(ZipInfo(file.as_posix()), file.read_bytes(), ZIP_BZIP2)


def take(folder: Path, scale: str, stages: Iterable[PipelineStage]) -> None:
    """Unpacks the kept files of stages that are missing here, and all missing fingerprints.

    Their dvc.lock takes the place of one that knows another scale. One of this scale stays, because
    it holds what was trained here.
    """
    kept_lock = folder / LOCK
    if not kept_lock.exists():
        return
    if not LOCK.exists() or f"outputs/{scale}/corpus" not in LOCK.read_text(encoding="utf-8"):
        shutil.copy(kept_lock, LOCK)
    written = {out.def_path for out in files_of(stages)}
    for archive in sorted(folder.glob("*.zip")):
        with reading(archive, REMEDY), ZipFile(archive) as packed:
            for name in packed.namelist():
                read_here = name in written or archive.stem == "fingerprints"
                if read_here and not Path(name).exists():
                    with new_file(name) as partial:
                        partial.write_bytes(packed.read(name))


def waiting(names: Iterable[str]) -> str | None:
    """Returns the first of some stages that has changed or lacks a file, if there is one.

    Its folders may be missing. Raises ValueError where DVC cannot read the project.
    """
    with refusals_of_dvc():
        repo = Repo()
        stages = {stage.addressing: stage for stage in repo.index.stages}
        with repo.lock:
            for name in names:
                stage = stages[name]
                # DVC itself lets any content pass that its cache does not know
                differs = any(out.workspace_status() for out in files_of([stage]))
                if differs or stage.changed(allow_missing=True):
                    return name
    return None
