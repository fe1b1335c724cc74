"""What a number was made from."""

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from value_aware_attention.storage import CHECKSUMS

MODEL_CARD = "README.md"


def file_hash(paths: Iterable[Path | str]) -> str:
    """sha256 over the bytes of files and of every file below folders, in order of their names.

    A model's card and checksums are left out: no number depends on them.
    """
    digest = sha256()
    for path in map(Path, paths):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files = [file for file in files if file.name not in (MODEL_CARD, CHECKSUMS)]
        for file in files:
            digest.update(file.name.encode() + b"\0")
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()
