"""Approximations of attention, one idea per file, all behind one interface."""

from value_aware_attention.approximations.approximation import (
    Approximation,
    SparseApproximation,
    SparseWeights,
)
from value_aware_attention.approximations.exact import Exact
from value_aware_attention.approximations.lsh import LSH
from value_aware_attention.approximations.optimal_value_aware import OptimalValueAware
from value_aware_attention.approximations.optimal_value_oblivious import OptimalValueOblivious
from value_aware_attention.approximations.orthogonal_random_features import (
    OrthogonalRandomFeatures,
)
from value_aware_attention.approximations.sliding_window import SlidingWindow

__all__ = [
    "LSH",
    "Approximation",
    "Exact",
    "OptimalValueAware",
    "OptimalValueOblivious",
    "OrthogonalRandomFeatures",
    "SlidingWindow",
    "SparseApproximation",
    "SparseWeights",
]
