"""Lists the methods of every test that holds for all approximations."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from hydra.utils import get_class
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from docs.methods_table import Support, support
from value_aware_attention import approximations, kernels
from value_aware_study.cards import Card, cards

HEAD_DIM = 8
KEYS = 24
KERNELS = {
    "exponential": kernels.Exponential(),
    "polynomial": kernels.Polynomial(),
    "elu": kernels.Elu(),
}


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draws queries, keys and values of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(3)]


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.size = max(self.size, *(x.untyped_storage().nbytes() for x in tensors), 0)
        return made


class Counted(TorchDispatchMode):
    """Counts the operations that PyTorch dispatches by name; indexing by a mask has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        indices = args[1] if function.overloadpacket == torch.ops.aten.index else ()
        is_masked = any(x is not None and x.dtype == torch.bool for x in indices)
        self.counts["masked indexing" if is_masked else str(function.overloadpacket)] += 1
        return function(*args, **(kwargs or {}))


class Method(NamedTuple):
    """Builds a method, and tells what its class supports."""

    build: Callable[[], approximations.Approximation]
    exact_when_full: Callable[[], approximations.Approximation] | None = None
    looks_back_when_causal: bool = False
    """is_causal chooses other keys than a triangular mask leaves."""
    keys_counted: float | None = None
    """Its budget for 4096 queries and keys of 64 numbers, in keys of exact attention."""

    @property
    def supported(self) -> Support:
        return support(type(self.build()))

    @property
    def kernel(self) -> str | None:
        """Names the only kernel that it approximates; None: all of them."""
        names = [kernel.__name__.lower() for kernel in self.supported.kernels]
        return names[0] if len(names) == 1 else None

    @property
    def causal(self) -> bool:
        return self.supported.causal

    @property
    def any_mask(self) -> bool:
        return self.supported.any_mask


SETTINGS = {
    "exact": Method(approximations.Exact, approximations.Exact, keys_counted=4096),
    "optimal_value_oblivious": Method(
        lambda: approximations.OptimalValueOblivious(4),
        lambda: approximations.OptimalValueOblivious(KEYS),
        keys_counted=4,
    ),
    "optimal_value_aware_1": Method(lambda: approximations.OptimalValueAware(1), keys_counted=1),
    "optimal_value_aware_9": Method(
        lambda: approximations.OptimalValueAware(HEAD_DIM + 1),
        lambda: approximations.OptimalValueAware(HEAD_DIM + 1),
        keys_counted=9,
    ),
    **{
        f"optimal_value_aware_3_{search}": Method(
            lambda search=search: approximations.OptimalValueAware(3, search), keys_counted=3
        )
        for search in ("fast", "default", "best")
    },
    **{
        f"optimal_value_aware_3_{search}_mean": Method(
            lambda search=search: approximations.OptimalValueAware(3, search, mean=True),
            lambda search=search: approximations.OptimalValueAware(KEYS, search, mean=True),
            keys_counted=3,
        )
        for search in ("default", "best")
    },
    "oblivious_keys_optimal_weights": Method(
        lambda: approximations.ObliviousKeysOptimalWeights(4),
        lambda: approximations.ObliviousKeysOptimalWeights(KEYS),
        keys_counted=4,
    ),
    "oblivious_keys_and_the_mean": Method(
        lambda: approximations.ObliviousKeysOptimalWeights(4, mean=True),
        lambda: approximations.ObliviousKeysOptimalWeights(KEYS + 1, mean=True),
        keys_counted=4,
    ),
    "value_aware_keys_attention_weights": Method(
        lambda: approximations.ValueAwareKeysAttentionWeights(4),
        lambda: approximations.ValueAwareKeysAttentionWeights(KEYS),
        keys_counted=4,
    ),
    "norm_weighted_keys_2": Method(
        lambda: approximations.NormWeightedKeys(4),
        lambda: approximations.NormWeightedKeys(KEYS),
        keys_counted=4,
    ),
    "norm_weighted_keys_1": Method(
        lambda: approximations.NormWeightedKeys(4, norm=1),
        lambda: approximations.NormWeightedKeys(KEYS, norm=1),
        keys_counted=4,
    ),
    "leave_one_out_keys": Method(
        lambda: approximations.LeaveOneOutKeys(4),
        lambda: approximations.LeaveOneOutKeys(KEYS),
        keys_counted=4,
    ),
    "sampled_keys": Method(lambda: approximations.SampledKeys(4, 0), keys_counted=4),
    **{
        f"mean_value_slot_{mass}": Method(
            lambda mass=mass: approximations.MeanValueSlot(4, mass),
            lambda mass=mass: approximations.MeanValueSlot(KEYS + 1, mass),
            keys_counted=4,
        )
        for mass in ("mean_key", "exact")
    },
    "unrenormalised_keys": Method(
        lambda: approximations.UnrenormalisedKeys(4),
        lambda: approximations.UnrenormalisedKeys(KEYS),
        keys_counted=4,
    ),
    "streaming_window": Method(
        lambda: approximations.SlidingWindow(5, sinks=2),
        looks_back_when_causal=True,
        keys_counted=5,
    ),
    "sliding_window": Method(
        lambda: approximations.SlidingWindow(5),
        lambda: approximations.SlidingWindow(KEYS),
        looks_back_when_causal=True,
        keys_counted=5,
    ),
    "dilated_window": Method(
        lambda: approximations.DilatedWindow(4, 3),
        lambda: approximations.DilatedWindow(KEYS, 1),
        looks_back_when_causal=True,
        keys_counted=4,
    ),
    "random_keys": Method(
        lambda: approximations.RandomKeys(4, 0),
        lambda: approximations.RandomKeys(KEYS, 0),
        looks_back_when_causal=True,
        keys_counted=4,
    ),
    "strided": Method(
        lambda: approximations.Strided(4),
        lambda: approximations.Strided(KEYS),
        keys_counted=2 * 4 - 1 + 4096 / 4 - 1,
    ),
    "fixed": Method(
        lambda: approximations.Fixed(6, 2),
        lambda: approximations.Fixed(6, 6),
        keys_counted=6 + 2 * (4096 / 6 - 1),
    ),
    "longformer": Method(
        lambda: approximations.Longformer(3, 2, (0, 11)),
        lambda: approximations.Longformer(2 * KEYS),
        looks_back_when_causal=True,
        keys_counted=3 + 2 * 2,
    ),
    "big_bird": Method(
        lambda: approximations.BigBird(3, 2, (0, 11), 0),
        lambda: approximations.BigBird(1, KEYS, (), 0),
        looks_back_when_causal=True,
        keys_counted=3 + 2 + 2 * 2,
    ),
    "linear_attention": Method(
        approximations.LinearAttention,
        approximations.LinearAttention,
        keys_counted=2 * 64 / 2,
    ),
    "linformer": Method(lambda: approximations.Linformer(6, 0), keys_counted=2 * 6),
    "linformer_learned": Method(
        lambda: approximations.Linformer(6, 0, length=40),
        keys_counted=2 * 6,
    ),
    "lsh": Method(
        lambda: approximations.LSH(8, 2, 0),
        lambda: approximations.LSH(KEYS, 3, 0),
        keys_counted=2 * (8 + 2 * 4096 / 8),
    ),
    "lsh_share_query_key": Method(
        lambda: approximations.LSH(8, 2, 0, share_query_key=True),
        keys_counted=2 * (8 + 4096 / 8),
    ),
    "nystrom": Method(
        lambda: approximations.Nystrom(5),
        lambda: approximations.Nystrom(KEYS),
        keys_counted=2 * 5,
    ),
    "nystrom_6_iterations": Method(
        lambda: approximations.Nystrom(5, iterations=6),
        keys_counted=2 * 5,
    ),
    "orf_performer": Method(
        lambda: approximations.OrthogonalRandomFeatures(16, 0),
        keys_counted=2 * 16,
    ),
    "orf_paper": Method(
        lambda: approximations.OrthogonalRandomFeatures(16, 0, scaling="paper"),
        keys_counted=2 * 16,
    ),
    "random_fourier_features": Method(
        lambda: approximations.RandomFourierFeatures(16, 0),
        keys_counted=2 * 16 * 3 / 2,
    ),
}


def by_card(card: Card) -> Method:
    """Builds a method without a setting above from its card.

    A method that keeps r keys keeps 4 of them, costs as many, and is exact attention with all.
    """
    made, arguments = get_class(card.target), dict(card.arguments)
    if not issubclass(made, approximations.SparseApproximation):
        return Method(partial(made, **arguments))
    build, full = (partial(made, **arguments | {"r": r}) for r in (4, KEYS))
    return Method(build, exact_when_full=full, keys_counted=4)


LISTED = {type(method.build()) for method in SETTINGS.values()}
METHODS = SETTINGS | {
    name: by_card(card) for name, card in cards().items() if get_class(card.target) not in LISTED
}
