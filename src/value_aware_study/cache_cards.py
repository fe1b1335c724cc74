"""Cards of cache methods. Each file of conf/cache is one card; no other list names them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from value_aware_attention.decoding.after_prefix import AfterPrefix
from value_aware_study.cards import CONF, MethodCard, read_cards

CACHE_METHODS = CONF / "cache"


@dataclass(frozen=True, kw_only=True)
class CacheCard(MethodCard):
    """Describes a cache method. Its arguments take the number of keys from `caches.r`.

    Attributes:
        after: Options of `AfterPrefix` in the authors' settings. A float is a share of r; "all"
            means the whole prefix. None = not published as a method.
    """

    after: Mapping[str, Any] | None = None

    def method(self, r: int) -> Any:
        return instantiate(
            OmegaConf.create({"caches": {"r": r}, "seed": 0, "method": self.build()}).method
        )

    def after_prefix(self, after: Mapping[str, Any], r: int, prefix: int) -> AfterPrefix:
        """Builds the method with r keys of a prefix, with options as cards write them."""
        return AfterPrefix(self.method(r), prefix=prefix, **self.options(after, r, prefix))

    @staticmethod
    def options(after: Mapping[str, Any], r: int, prefix: int) -> dict[str, Any]:
        """Converts a card's options of `AfterPrefix` to numbers."""
        return {
            name: round(x * r) if isinstance(x, float) else prefix if x == "all" else x
            for name, x in after.items()
        }


def cache_cards(folder: Path = CACHE_METHODS) -> Mapping[str, CacheCard]:
    """Reads the cards of cache methods as `read_cards` does."""
    return read_cards(CacheCard, folder)
