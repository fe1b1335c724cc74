"""Files that are read: what is wrong with one is said with its name."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from value_aware_attention.storage.json_checksums import without_checksum

__all__ = ["from_json", "read_json", "reading"]


@contextmanager
def reading(path: Path | str, remedy: str = "make it again") -> Iterator[None]:
    """Raises ValueError, with the file's name, for whatever a damaged file leads to in its reader.

    What says the name by itself is left as it is, and so is a file that cannot be opened.
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:  # readers of damaged bytes raise all kinds, Rust's Exception itself
        if str(path) in str(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = f"it has no {error}" if isinstance(error, KeyError) else lines[0]
        raise ValueError(f"{path} is damaged ({what}): {remedy}") from error


def read_json(path: Path | str, *keys: str, remedy: str = "make it again") -> dict[str, Any]:
    """Reads a JSON object that has these keys.

    Raises ValueError, with the file's name, for anything else, NaN and infinity included, and for
    content that is not of the checksum that it holds.
    """
    with reading(path, remedy):
        content = from_json(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
        content = without_checksum(content)
        for key in keys:
            content[key]
    return content


def from_json(text: str) -> Any:
    """Parses JSON; raises ValueError for anything else, NaN and infinity included."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}")
