"""Similarity kernels: the function kappa of Eq. 1 that turns a query and a key into a weight.

A kernel is given by its log-similarity, because attention normalises: softmax over log-similarities
*is* kernel attention, in a form that neither overflows nor divides zero by zero.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import relu

__all__ = ["Elu", "Exponential", "Kernel", "Polynomial"]


@runtime_checkable
class Kernel(Protocol):
    """kappa(q, k) >= 0 for every pair of a query and a key."""

    def log_similarity(
        self, query: Float[Tensor, "*#batch N D"], key: Float[Tensor, "*#batch M D"]
    ) -> Float[Tensor, "*batch N M"]:
        """log kappa(q_n, k_m), finite, in the dtype of the inputs."""
        ...


def _clamped_log(similarity: Tensor) -> Tensor:
    """log with zero replaced by the smallest normal number: its gradient is 0 there, not NaN."""
    return similarity.clamp_min(torch.finfo(similarity.dtype).tiny).log()


@dataclass(frozen=True)
class Exponential:
    """exp(scale <q, k>), the kernel of dot-product attention; scale None = head_dim ** -0.5."""

    scale: float | None = None

    def log_similarity(
        self, query: Float[Tensor, "*#batch N D"], key: Float[Tensor, "*#batch M D"]
    ) -> Float[Tensor, "*batch N M"]:
        """scale <q, k>."""
        return (query * self.scale_for(query.shape[-1])) @ key.transpose(-2, -1)

    def scale_for(self, head_dim: int) -> float:
        """The factor of <q, k> for queries of `head_dim` numbers."""
        return head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Polynomial:
    """<q, k> ** degree with an even degree (section 2); degree 0 weighs every key alike."""

    degree: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.degree, int) or self.degree < 0 or self.degree % 2:
            raise ValueError(f"degree is {self.degree!r}; it must be an even integer >= 0")

    def log_similarity(
        self, query: Float[Tensor, "*#batch N D"], key: Float[Tensor, "*#batch M D"]
    ) -> Float[Tensor, "*batch N M"]:
        """degree * log |<q, k>|, no less than that of the smallest normal number (1e-38 in fp32).

        So <q, k> = 0 has a logarithm; queries and keys so small that all products lie below weigh
        every key alike.
        """
        return self.degree * _clamped_log((query @ key.transpose(-2, -1)).abs())


@dataclass(frozen=True)
class Elu:
    """<1 + elu(q), 1 + elu(k)>, the kernel of Linear Transformers (Katharopoulos et al., 2020)."""

    def features(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Phi(x) = 1 + elu(x), elementwise and positive: 1 + x above 0, exp(x) below."""
        # 1 + (exp(x) - 1), as elu computes it, has no digits left at x = -17 in fp32.
        return relu(x) + x.clamp_max(0).exp()

    def log_similarity(
        self, query: Float[Tensor, "*#batch N D"], key: Float[Tensor, "*#batch M D"]
    ) -> Float[Tensor, "*batch N M"]:
        """log <Phi(q), Phi(k)>, no less than that of the smallest normal number (1e-38 in fp32)."""
        return _clamped_log(self.features(query) @ self.features(key).transpose(-2, -1))
