"""Approximations of attention, one idea per file, all behind one interface."""

from value_aware_attention.approximations.approximation import (
    Approximation,
    Exact,
    SparseApproximation,
)
from value_aware_attention.approximations.feature_attention import LinearAttention
from value_aware_attention.approximations.halves_of_the_gain import (
    ObliviousKeysOptimalWeights,
    ValueAwareKeysAttentionWeights,
)
from value_aware_attention.approximations.linformer import Linformer
from value_aware_attention.approximations.lsh import LSH
from value_aware_attention.approximations.missing_mass import MeanValueSlot, UnrenormalisedKeys
from value_aware_attention.approximations.nystrom import Nystrom
from value_aware_attention.approximations.optimal_value_aware import OptimalValueAware
from value_aware_attention.approximations.random_features import (
    OrthogonalRandomFeatures,
    RandomFourierFeatures,
)
from value_aware_attention.approximations.random_keys import RandomKeys, SampledKeys
from value_aware_attention.approximations.ranked_keys import (
    LeaveOneOutKeys,
    NormWeightedKeys,
    OptimalValueOblivious,
)
from value_aware_attention.approximations.sparse_transformer import Fixed, Strided
from value_aware_attention.approximations.sparse_weights import SparseWeights
from value_aware_attention.approximations.windows import (
    BigBird,
    DilatedWindow,
    Longformer,
    SlidingWindow,
)
from value_aware_attention.call import chunked

__all__ = [
    "LSH",
    "Approximation",
    "BigBird",
    "DilatedWindow",
    "Exact",
    "Fixed",
    "LeaveOneOutKeys",
    "LinearAttention",
    "Linformer",
    "Longformer",
    "MeanValueSlot",
    "NormWeightedKeys",
    "Nystrom",
    "ObliviousKeysOptimalWeights",
    "OptimalValueAware",
    "OptimalValueOblivious",
    "OrthogonalRandomFeatures",
    "RandomFourierFeatures",
    "RandomKeys",
    "SampledKeys",
    "SlidingWindow",
    "SparseApproximation",
    "SparseWeights",
    "Strided",
    "UnrenormalisedKeys",
    "ValueAwareKeysAttentionWeights",
    "chunked",
]
