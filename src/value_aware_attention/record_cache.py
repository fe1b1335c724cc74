"""Records kept on disk as they are computed, so that work that was ended goes on where it was."""

import json
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["RecordCache"]

R = TypeVar("R")


class RecordCache:
    """Computed records as JSON files, named by a hash of everything that determines them.

    `identity` is what all of them depend on: data, weights, source, machine.
    """

    def __init__(self, folder: Path | str, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = dict(identity)

    def get(self, key: Mapping[str, Any], compute: Callable[[], R]) -> R:
        """The record of `key`, from the folder or computed and then kept."""
        text = json.dumps(self.identity | dict(key), sort_keys=True)
        path = self.folder / f"{sha256(text.encode()).hexdigest()}.json"
        if path.exists():
            return json.loads(path.read_text())
        record = compute()
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(record))
        partial.replace(path)
        return record
