"""Records kept on disk as they are computed, so that work that was ended goes on where it was."""

import json
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from value_aware_attention.distributed import from_first, is_first

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
        """The record of `key`, from the folder or computed and then kept."""
        text = json.dumps(self.identity | dict(key), sort_keys=True)
        path = self.folder / f"{sha256(text.encode()).hexdigest()}.json"
        found = from_first(lambda: [json.loads(path.read_text())] if path.exists() else [])
        if found:
            return found[0]
        record = compute()
        if is_first():
            self._keep(path, record)
        return record

    def _keep(self, path: Path, record: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(record))
        partial.replace(path)
