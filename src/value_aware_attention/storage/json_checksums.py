"""JSON objects that hold the sha256 of their own content, so that a changed digit is noticed."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

__all__ = ["with_checksum", "without_checksum"]

KEY = "content_sha256"


def with_checksum(text: str) -> str:
    """Adds the sha256 of a JSON object's content as its last key; the rest of the text stays.

    It is that of the content, not of the text: layout and the order of keys change nothing.
    """
    end = text.rindex("}")
    body = text[:end].rstrip()
    line = f'"{KEY}": "{_digest(json.loads(text))}"'
    indent = "\n " if "\n" in text[len(body) : end] else ""
    return f"{body},{indent}{line}{text[len(body) :]}"


def without_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Takes the sha256 off; an object that has none is taken as it is.

    Raises ValueError where it is not that of the content.
    """
    rest = {key: part for key, part in content.items() if key != KEY}
    if KEY in content and content[KEY] != _digest(rest):
        raise ValueError("it has changed since it was written")
    return rest


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
