"""Checkpoints on disk that outlive a kill at any moment, and runs that share no folder."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from pytorch_lightning.plugins.io import CheckpointIO

from value_aware_attention.files import held, new_file, remove_left_overs

__all__ = ["CheckpointFiles", "read_checkpoint"]


class CheckpointFiles(CheckpointIO):
    """Keeps last.ckpt and the one before it, previous.ckpt, in a folder that one run has at a time.

    Lightning's own files go through the machine's temporary folder, where a kill leaves them
    behind, and are not flushed to the disk before they take the place of older ones.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last, self.previous = folder / "last.ckpt", folder / "previous.ckpt"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other runs out of the folder. The system ends it with the process, however killed.

        Raises ValueError where another run has the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with held(self.folder, "a training run", "train in another folder"):
            remove_left_overs(self.folder)
            yield

    def newest_first(self) -> list[tuple[Path, bool]]:
        """Yields the checkpoints, newest first, and whether their bytes are as written."""
        return [(path, _is_whole(path)) for path in (self.last, self.previous) if path.is_file()]

    def remove(self) -> None:
        for path in (self.last, self.previous):
            path.unlink(missing_ok=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Writes so that at every moment, also of a power cut, one name is a whole checkpoint."""
        with new_file(self.last) as unfinished:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if self.last.exists():
                os.replace(self.last, self.previous)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        return read_checkpoint(path, "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def read_checkpoint(path: Path, device: str) -> dict[str, Any]:
    """Reads tensors and plain values; ValueError for a pickle of more, of which nothing is run."""
    try:
        loaded: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} is no checkpoint of this program: it holds more than weights, and was not "
            f"read; remove it to start anew"
        ) from None
    return loaded


def _is_whole(path: Path) -> bool:
    # torch reads a file with flipped bits without a word; the checksums it wrote are the archive's
    try:
        with ZipFile(path) as archive:
            return archive.testzip() is None
    except (BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError):
        return False
