"""Records kept on disk as they are computed, so that work that was ended goes on where it was."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from value_aware_attention.distributed import broadcast, is_first
from value_aware_attention.measurement.strict_json import from_json, to_json

__all__ = ["RecordCache"]

R = TypeVar("R")


class RecordCache:
    """Computed records as JSON files, named by a hash of everything that determines them.

    `identity` is what all of them depend on: data, weights, source, machine. Of several processes
    the first one reads and writes, and all do what it found.
    """

    def __init__(self, folder: Path | str, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = dict(identity)

    def get(self, key: Mapping[str, Any], compute: Callable[[], R]) -> R:
        """The record of `key`, from the folder or computed and then kept.

        A file that holds no record is removed and the record computed again. Raises ValueError,
        and keeps nothing, where the computed record holds NaN or infinity.
        """
        text = json.dumps(self.identity | dict(key), sort_keys=True)
        path = self.folder / f"{sha256(text.encode()).hexdigest()}.json"
        found: list[R] = broadcast(lambda: _read(path))
        if found:
            return found[0]
        record = compute()
        content = to_json(record)
        if is_first():
            self._keep(path, content)
        return record

    def _keep(self, path: Path, content: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(content)
        partial.replace(path)


def _read(path: Path) -> list[Any]:
    """The record in a file; empty where there is none, or what is there is none."""
    if not path.exists():
        return []
    try:
        record = from_json(path.read_text())
        if isinstance(record, dict) and record:
            return [record]
        reason = "it holds no record"
    except ValueError as error:
        reason = str(error)
    logging.getLogger(__name__).warning("%s is damaged (%s): computed again", path, reason)
    path.unlink()
    return []
