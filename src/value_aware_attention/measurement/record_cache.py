"""Records kept on disk as they are computed, so that interrupted work resumes."""

import json
import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from value_aware_attention.distributed import broadcast, is_first
from value_aware_attention.files import load_json, save_json
from value_aware_attention.measurement.strict_json import to_json

__all__ = ["RecordCache"]

R = TypeVar("R")
NAME, RECORD = "name", "record"


class RecordCache:
    """Keeps computed records as JSON files, named by a hash of everything that determines them.

    All of them depend on `identity`: data, weights, source, machine. Of several processes the first
    one reads and writes, and the others follow it. A file has the sha256 of its name and record, so
    that a file under another's name is noticed.
    """

    def __init__(self, folder: Path | str, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = dict(identity)

    def get(self, key: Mapping[str, Any], compute: Callable[[], R]) -> R:
        """Reads the record of `key` from the folder, or computes and keeps it.

        A file that has changed since it was written is removed, and its record computed again with
        a line in the log. Raises ValueError, and keeps nothing, for a record with NaN or infinity.
        """
        text = json.dumps(self.identity | dict(key), sort_keys=True)
        name = sha256(text.encode()).hexdigest()
        path = self.folder / f"{name}.json"
        found: list[R] = broadcast(lambda: _read(path))
        if found:
            return found[0]
        record = compute()
        to_json(record)  # refuses NaN by its keys, in every process
        if is_first():
            save_json(path, json.dumps({NAME: name, RECORD: record}))
        return record


def _read(path: Path) -> list[Any]:
    """The record in a file; empty where there is none, or what is there is none."""
    if not path.exists():
        return []
    try:
        kept = load_json(path, NAME, RECORD, remedy="computed again")
        if kept[NAME] == path.stem:
            return [kept[RECORD]]
        reason = f"{path} has changed since it was written: computed again"
    except ValueError as error:
        reason = str(error)
    logging.getLogger(__name__).warning(reason)
    path.unlink(missing_ok=True)
    return []
