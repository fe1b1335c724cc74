"""Lists the cache methods of conf/cache for every test that holds for all of them."""

from collections.abc import Callable

from value_aware_attention import kernels
from value_aware_attention.caches import CacheMethod, KeptKeys, Observed
from value_aware_study.cache_cards import cache_cards

KERNELS = {
    "exponential": kernels.Exponential(),
    "polynomial": kernels.Polynomial(),
    "elu": kernels.Elu(),
}

METHODS: dict[str, Callable[[int], CacheMethod]] = {
    name: card.method for name, card in cache_cards().items()
}

DRAWING, JOINED = ("random", "vase"), ("tova", "defensive_kv")
"""Those whose numbers are drawn for all caches at once, or depend on all heads of a layer"""

SEEING = {name: build for name, build in METHODS.items() if name not in DRAWING + JOINED}
"""Those whose choice for a cache depends on that cache alone."""

SCORING = {
    name: build for name, build in SEEING.items() if type(build(1)).scores is not CacheMethod.scores
}
"""Those that choose keys one by one, by what they see."""

SCALE_FREE = [name for name, build in METHODS.items() if build(1).scale_free]

REFITTING = {name: build for name, build in SEEING.items() if build(1).refits}


class Spy(CacheMethod):
    """Keeps what a method keeps, and records that and what the method was shown."""

    def __init__(self, method: CacheMethod) -> None:
        super().__init__(method.r)
        self.method, self.refits = method, method.refits
        self.kept: list[KeptKeys] = []
        self.seen: list[Observed] = []

    def keep(self, seen: Observed) -> KeptKeys:
        self.seen.append(seen)
        self.kept.append(self.method.keep(seen))
        return self.kept[-1]


def refuses(method: CacheMethod, kernel: kernels.Kernel) -> bool:
    """Tells whether a method has no meaning for a kernel."""
    return bool(method.kernels) and not isinstance(kernel, method.kernels)
