"""Draws the directions of random feature maps, once for each seed and size."""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from value_aware_attention.kernels import Exponential, Kernel


def similarity_scale(kernel: Kernel, head_dim: int) -> float:
    """Returns the exponential kernel's factor of <q, k>, of which features take the square root."""
    assert isinstance(kernel, Exponential)
    return kernel.scale_for(head_dim)


@lru_cache(maxsize=128)  # a QR decomposition at every call cost more than the attention
@torch.inference_mode(False)  # drawn under inference_mode it could never be trained through
def orthogonal_gaussian(features: int, head_dim: int, seed: int) -> Float[Tensor, "F D"]:
    """Stacks D x D uniformly random orthogonal blocks whose rows have the norms of Gaussians.

    Each row is distributed as a standard Gaussian vector; those of one block are orthogonal, which
    lowers the variance of estimates with them (Choromanski et al., 2020, section 2.4).
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = math.ceil(features / head_dim)
    rows = torch.cat([_random_rotation(head_dim, generator) for _ in range(blocks)])
    norms = torch.randn(features, head_dim, generator=generator).norm(dim=-1)
    return norms[:, None] * rows[:features]


@lru_cache(maxsize=128)
@torch.inference_mode(False)
def orthonormal_columns(features: int, head_dim: int, seed: int) -> Float[Tensor, "F D"]:
    """Draws orthonormal columns for F > D, so rows of norm sqrt(D / F), as torch's initialiser."""
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.init.orthogonal_(torch.empty(features, head_dim), generator=generator)


def _random_rotation(head_dim: int, generator: torch.Generator) -> Float[Tensor, "D D"]:
    """Draws an orthogonal matrix uniformly: QR with the sign of R's diagonal taken out."""
    orthogonal, upper = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))
    return orthogonal * upper.diagonal().sign()
