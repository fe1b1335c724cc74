"""Defines similarity kernels, the functions kappa of Eq. 1 that weigh a key for a query.

A kernel is defined by its log-similarity. Attention normalises, so a softmax over log-similarities
*is* kernel attention, and it neither overflows nor divides zero by zero.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import relu

from value_aware_attention.arguments import described, is_integer


@runtime_checkable
class Kernel(Protocol):
    """Computes kappa(q, k) >= 0 for every pair of a query and a key."""

    def log_similarity(
        self, query: Float[Tensor, "*#batch N D"], key: Float[Tensor, "*#batch M D"]
    ) -> Float[Tensor, "*batch N M"]:
        """Computes log kappa(q_n, k_m), finite, in the dtype of the inputs."""


def check_kernel(kernel: Kernel) -> None:
    """Raises ValueError unless the argument is a kernel, not the class or the name of one."""
    if isinstance(kernel, type) or not callable(getattr(kernel, "log_similarity", None)):
        raise ValueError(
            f"kernel is {described(kernel)}; it must be a kernel such as kernels.Polynomial(2)"
        )


def _clamped_log(similarity: Tensor) -> Tensor:
    """Takes the log, clamped at the smallest normal number; the gradient at 0 is 0."""
    return similarity.clamp_min(torch.finfo(similarity.dtype).tiny).log()


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Computes <q, k> of every pair; a plain batch of matrices is not broadcast."""
    is_plain = query.ndim == key.ndim == 3 and len(query) == len(key)
    return torch.bmm(query, key.mT) if is_plain else query @ key.mT


@dataclass(frozen=True)
class Exponential:
    """Computes exp(scale <q, k>), dot-product attention's kernel; scale None = head_dim ** -0.5."""

    scale: float | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.scale, Real) and not isinstance(self.scale, bool)
        if self.scale is not None and not (is_number and 0 <= self.scale < math.inf):
            raise ValueError(f"scale is {self.scale!r}; it must be None or a finite number >= 0")

    def log_similarity(
        self, query: Float[Tensor, "*#batch N D"], key: Float[Tensor, "*#batch M D"]
    ) -> Float[Tensor, "*batch N M"]:
        """Computes scale <q, k>."""
        return _products(query * self.scale_for(query.shape[-1]), key)

    def scale_for(self, head_dim: int) -> float:
        """Returns the factor of <q, k> for queries of `head_dim` numbers."""
        return head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Polynomial:
    """Computes <q, k> ** degree, degree even (section 2); degree 0 weighs all keys equally."""

    degree: int = 2

    def __post_init__(self) -> None:
        if not is_integer(self.degree) or self.degree < 0 or self.degree % 2:
            raise ValueError(f"degree is {self.degree!r}; it must be an even integer >= 0")
        object.__setattr__(self, "degree", int(self.degree))  # numpy integers have another repr

    def log_similarity(
        self, query: Float[Tensor, "*#batch N D"], key: Float[Tensor, "*#batch M D"]
    ) -> Float[Tensor, "*batch N M"]:
        """Computes degree * log |<q, k>|, the log clamped at the smallest normal number.

        The clamp keeps the log of <q, k> = 0 finite. If all products are below it, all keys weigh
        the same.
        """
        return self.degree * _clamped_log(_products(query, key).abs())


@dataclass(frozen=True)
class Elu:
    """Computes <1 + elu(q), 1 + elu(k)> of Linear Transformers (Katharopoulos et al., 2020)."""

    def features(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Computes Phi(x) = 1 + elu(x), elementwise and positive: 1 + x above 0, exp(x) below."""
        # elu's 1 + (exp(x) - 1) has no digits left at x = -17 in fp32.
        return relu(x) + x.clamp_max(0).exp()

    def log_similarity(
        self, query: Float[Tensor, "*#batch N D"], key: Float[Tensor, "*#batch M D"]
    ) -> Float[Tensor, "*batch N M"]:
        """Computes log <Phi(q), Phi(k)>, clamped at the log of the smallest normal number."""
        return _clamped_log(_products(self.features(query), self.features(key)))


KERNELS = (Exponential, Polynomial, Elu)
"""The kernels that have a name in configs"""
