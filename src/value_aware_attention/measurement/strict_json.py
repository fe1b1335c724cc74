"""JSON without NaN and infinity, which Python writes and no other reader knows."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from value_aware_attention.files import parse_json


def to_json(content: Any, **options: Any) -> str:
    """Serializes numbers, text, lists and dictionaries; `options` are those of `json.dumps`.

    Raises ValueError with the keys that lead to the first number that is not finite.
    """
    for keys, number in _not_finite(content):
        raise ValueError(f"{keys or 'the number'} is {number}, which JSON does not have")
    return json.dumps(content, allow_nan=False, **options)


def from_json(text: str) -> Any:
    """Parses JSON; raises ValueError for anything else, NaN and numbers above 1e308 included."""
    content = parse_json(text)
    for keys, number in _not_finite(content):
        raise ValueError(f"{keys or 'the number'} is {number}, which JSON does not have")
    return content


def _not_finite(content: Any, keys: str = "") -> Iterator[tuple[str, float]]:
    """Yields NaN and infinite numbers, each with its keys: "cells.0.value"."""
    if isinstance(content, float) and not math.isfinite(content):
        yield keys, content
    parts: Any = ()
    if isinstance(content, Mapping):
        parts = content.items()
    elif isinstance(content, (list, tuple)):
        parts = enumerate(content)
    for key, part in parts:
        yield from _not_finite(part, f"{keys}.{key}" if keys else str(key))
