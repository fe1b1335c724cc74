"""Pinned versions, hashes and licences list the same packages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def pins(*files: str) -> dict[str, str]:
    """Maps normalised names to versions."""
    found = [pair for file in files for pair in PIN.findall((ROOT / file).read_text())]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


PINNED = pins(*(f"requirements{kind}.txt" for kind in ("", "-cluster", "-dev", "-models")))


def test_the_lock_has_a_hash_for_every_pinned_version() -> None:
    locked_pins = pins("requirements.lock")
    assert locked_pins | PINNED == locked_pins
    of_cuda = locked_pins.keys() - PINNED.keys()  # what torch of PyPI needs beside
    assert all(name.startswith(("cuda-", "nvidia-", "triton")) for name in of_cuda)
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in locked)
    assert not any("//" in line for line in lines), "versions and hashes, no addresses"


def test_every_dependency_has_a_licence_in_the_docs() -> None:
    rows = re.findall(
        r"^\| (\S+) +\| (\S+) +\| (\S.*?) +\|",
        (ROOT / "docs/licences.md").read_text(),
        re.MULTILINE,
    )
    found = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version, _ in rows}
    assert {name: found.get(name) for name in PINNED} == PINNED
