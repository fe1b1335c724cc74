"""Makes names and texts from outside safe: as files and folders, and in Markdown."""

import os
import re
from html import escape
from pathlib import Path

SUMMARY, TIMES = "summary.json", "seconds.json"
"""Files of a published run next to its page: end metrics of each model, seconds of each stage"""
LONGEST = 200
"""Most bytes of a name: file systems allow 255, and endings and unfinished files need some"""


def inside(folder: str | Path, name: str | int, ending: str = "") -> Path:
    """Returns <folder>/<name><ending>, for a name that does not lead out of the folder.

    Raises ValueError for an empty name, `.` and `..`, and for names with a separator, with
    characters that cannot be printed (such as newlines) or of more than 200 bytes.
    """
    name = str(name)  # YAML reads digits as a number
    unfit = name in ("", ".", "..") or set(name) & {"/", "\\"} or not name.isprintable()
    if unfit or len(os.fsencode(name)) > LONGEST:
        raise ValueError(
            f"{name!r} cannot name a file in {folder}: a name has 1 to {LONGEST} bytes, all "
            f"printable, none of them / or \\, and is not . or .."
        )
    return Path(folder) / f"{name}{ending}"


def check_apart(written: Path, read: Path) -> None:
    """Raises ValueError if `written` is the folder `read`, contains it or lies in it."""
    target, source = written.resolve(), read.resolve()
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise ValueError(
            f"{written} cannot be written from {read}: one of them is or holds the other; give "
            f"another folder"
        )


def escaped(text: str) -> str:
    r"""Returns the text on one line, with entities for & < >, and a backslash before \ | ` [ ]."""
    return re.sub(r"([\\|`\[\]])", r"\\\1", escape(" ".join(text.splitlines()), quote=False))
