"""ORF attention (section A.1): positive random features of the exponential kernel."""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.approximations.approximation import (
    Approximation,
    Inputs,
    check_at_least,
)
from value_aware_attention.kernels import Exponential

__all__ = ["OrthogonalRandomFeatures"]

SCALINGS = ("performer", "paper")
QUERIES_AT_ONCE = 64


class OrthogonalRandomFeatures(Approximation):
    """exp(<q, k>) ~ <Phi(q), Phi(k)> with Phi(x) = exp(Rx - ||x||^2 / 2) / sqrt(F) (A.1).

    scaling "performer": R stacks D x D uniformly random orthogonal blocks whose rows are given the
    norms of Gaussian vectors (FAVOR+, Choromanski et al., 2020); it converges as F grows. "paper":
    R is `torch.nn.init.orthogonal_` of F x D, as A.1 is written; for F > D its rows are too short
    by sqrt(F / D) and it does not converge to the exponential kernel. Everything is evaluated in
    log space with a stabiliser per feature, which cancels exactly and never leaves 0/0.
    """

    kernels = (Exponential,)

    def __init__(self, features: int, seed: int, scaling: str = "performer") -> None:
        super().__init__()
        self.features = check_at_least(1, features=features)
        self.seed = check_at_least(0, seed=seed)
        if scaling not in SCALINGS:
            raise ValueError(f"scaling is {scaling!r}; it must be one of {', '.join(SCALINGS)}")
        self.scaling = scaling

    def approximate(self, inputs: Inputs) -> Float[Tensor, "*batch N V"]:
        assert isinstance(inputs.kernel, Exponential)
        head_dim = inputs.key.shape[-1]
        projection = self.projection(head_dim).to(inputs.key)
        scale = inputs.kernel.scale_for(head_dim) ** 0.5
        query = _log_features(inputs.query * scale, projection)
        key = _log_features(inputs.key * scale, projection)
        if inputs.visible is None or inputs.visible.shape[-2] == 1:
            return _linear(query, key, inputs.value, inputs.visible)
        return _masked(query, key, inputs.value, inputs.visible)

    def projection(self, head_dim: int) -> Float[Tensor, "F D"]:
        """The random matrix R, drawn from the seed on the CPU."""
        return _projection(self.features, head_dim, self.seed, self.scaling)

    def multiply_adds(self, *, queries: int, keys: int, head_dim: int, value_dim: int) -> float:
        """Features of a query, its share of the keys' features and their sum, and the product."""
        return self.features * (head_dim + value_dim) * (1 + keys / queries)

    def extra_repr(self) -> str:
        return f"features={self.features}, seed={self.seed}, scaling={self.scaling!r}"


@lru_cache(maxsize=128)
def _projection(features: int, head_dim: int, seed: int, scaling: str) -> Float[Tensor, "F D"]:
    # Cached: a QR decomposition at every call cost more than the attention.
    generator = torch.Generator().manual_seed(seed)
    if scaling == "paper":
        return torch.nn.init.orthogonal_(torch.empty(features, head_dim), generator=generator)
    blocks = math.ceil(features / head_dim)
    rows = torch.cat([_random_rotation(head_dim, generator) for _ in range(blocks)])
    norms = torch.randn(features, head_dim, generator=generator).norm(dim=-1)
    return norms[:, None] * rows[:features]


def _random_rotation(head_dim: int, generator: torch.Generator) -> Float[Tensor, "D D"]:
    """Uniform over orthogonal matrices: QR with the sign of R's diagonal taken out."""
    orthogonal, upper = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))
    return orthogonal * upper.diagonal().sign()


def _log_features(
    x: Float[Tensor, "*batch L D"], projection: Float[Tensor, "F D"]
) -> Float[Tensor, "*batch L F"]:
    """log Phi(x) = Rx - ||x||^2 / 2, without the factor 1/sqrt(F) that normalisation cancels."""
    return x @ projection.T - x.square().sum(dim=-1, keepdim=True) / 2


def _linear(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """O(L) evaluation: every query sees the same keys."""
    if visible is not None:
        key = key.masked_fill(~visible.transpose(-2, -1), -torch.inf)
    largest = key.amax(dim=-2, keepdim=True)  # per feature, moved from the keys to the queries
    shifted = (key - largest).exp().nan_to_num(0.0)
    weights = (query + largest).softmax(dim=-1).nan_to_num(0.0)  # of each feature
    sums = weights @ (shifted.transpose(-2, -1) @ value)
    total = weights @ shifted.sum(dim=-2)[..., None]
    return sums / total.clamp_min(torch.finfo(total.dtype).tiny)


def _masked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Evaluation under any mask: log-similarities of all pairs, so nothing hidden enters at all."""
    visible = visible.expand(*visible.shape[:-2], query.shape[-2], key.shape[-2])
    blocks = [
        _block(part, key, value, mask)
        for part, mask in zip(
            query.split(QUERIES_AT_ONCE, dim=-2),
            visible.split(QUERIES_AT_ONCE, dim=-2),
            strict=True,
        )
    ]
    return torch.cat(blocks, dim=-2)


def _block(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = (query[..., :, None, :] + key[..., None, :, :]).logsumexp(dim=-1)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return weights.masked_fill(~visible, 0.0) @ value
