"""Hashes of the files that a number was computed from."""

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from value_aware_attention.files import CARD, CHECKSUMS, checksum


def file_hash(paths: Iterable[Path | str]) -> str:
    """Computes a sha256 over names and sha256 of files and of every file below folders, in order.

    A model's card and checksums are left out: no number depends on them. A file whose checksum was
    compared before is not read again.
    """
    digest = sha256()
    for path in map(Path, paths):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.name not in (CARD, CHECKSUMS):
                digest.update(f"{file.name}\0{checksum(file)}\n".encode())
    return digest.hexdigest()
