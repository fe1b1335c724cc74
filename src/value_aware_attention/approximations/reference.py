"""Slow, obvious versions of attention and its approximations: the truth the fast ones are held to.

Everything is fp64, one query at a time, written as in the paper. Inputs have no leading dimensions:
query (D,), key (M, D), value (M, V), visible (M,) boolean.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = [
    "attention_weights",
    "caratheodory",
    "lsh_weights",
    "optimal_value_aware_1",
    "optimal_value_oblivious",
    "random_feature_weights",
    "sliding_window",
]

Similarity = Callable[[Tensor, Tensor], float]


def exponential(query: Tensor, key: Tensor) -> float:
    """exp(<q, k> / sqrt(D))."""
    return math.exp(float(query @ key) / math.sqrt(len(query)))


def polynomial(query: Tensor, key: Tensor) -> float:
    """<q, k> ** 2."""
    return float(query @ key) ** 2


def elu(query: Tensor, key: Tensor) -> float:
    """<1 + elu(q), 1 + elu(k)>."""
    one_plus_elu = [torch.where(x > 0, x + 1, x.exp()) for x in (query, key)]
    return float(one_plus_elu[0] @ one_plus_elu[1])


def attention_weights(
    query: Float[Tensor, " D"],
    key: Float[Tensor, "M D"],
    similarity: Similarity,
    visible: Bool[Tensor, " M"],
) -> Float[Tensor, " M"]:
    """alpha of Eq. 1: similarities divided by their sum; all zero where nothing is visible."""
    scores = [similarity(query, k) if sees else 0.0 for k, sees in zip(key, visible, strict=True)]
    total = sum(scores)
    return torch.tensor([score / total if total else 0.0 for score in scores], dtype=torch.float64)


def optimal_value_oblivious(alpha: Float[Tensor, " M"], r: int) -> Float[Tensor, " M"]:
    """The r largest weights, renormalised (Eq. 2)."""
    kept = set(sorted(range(len(alpha)), key=lambda i: -float(alpha[i]))[:r])
    total = sum(float(alpha[i]) for i in kept)
    return torch.tensor(
        [float(alpha[i]) / total if i in kept and total else 0.0 for i in range(len(alpha))],
        dtype=torch.float64,
    )


def optimal_value_aware_1(
    alpha: Float[Tensor, " M"], value: Float[Tensor, "M V"], visible: Bool[Tensor, " M"]
) -> int:
    """argmin_i ||o - v_i||^2 over visible keys, by trying all of them (section 3, r = 1)."""
    output = sum(a * v for a, v in zip(alpha, value, strict=True))
    distances = {
        i: float(((output - value[i]) ** 2).sum()) for i in range(len(value)) if visible[i]
    }
    return min(distances, key=distances.__getitem__)


def sliding_window(position: int, keys: int, r: int) -> list[int]:
    """Keys of the bidirectional window: r // 2 to the left, shifted inwards at the edges."""
    window = [position - r // 2 + offset for offset in range(min(r, keys))]
    while window[0] < 0:
        window = [key + 1 for key in window]
    while window[-1] >= keys:
        window = [key - 1 for key in window]
    return window


def caratheodory(alpha: Float[Tensor, " M"], value: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    """The textbook proof: move along an affine dependency until a weight reaches 0, and repeat."""
    weights = alpha.double().clone()
    points = torch.cat([value.double(), torch.ones(len(value), 1, dtype=torch.float64)], dim=1)
    while True:
        support = weights.nonzero()[:, 0]
        if len(support) <= torch.linalg.matrix_rank(points[support]):
            return weights
        dependency = torch.linalg.svd(points[support].T).Vh[-1]
        dependency = dependency if (dependency > 0).any() else -dependency
        ratios = torch.where(dependency > 0, weights[support] / dependency, torch.inf)
        step, first = ratios.min(dim=0)
        moved = (weights[support] - step * dependency).clamp_min(0)
        moved[first] = 0
        weights[support] = moved


def lsh_weights(
    query: Float[Tensor, "M D"],
    key: Float[Tensor, "M D"],
    similarity: Similarity,
    rotations: list[Float[Tensor, "C D"]],
    chunk: int,
) -> Float[Tensor, "M M"]:
    """A.1: per round sort by hash, chunk, score the previous and the own chunk; normalise once."""
    length = len(key)
    scores = torch.zeros(length, length, dtype=torch.float64)
    for rotation in rotations:
        hashes = [
            [int(torch.cat([-rotation @ x, rotation @ x]).argmax()) for x in vectors]
            for vectors in (query, key)
        ]
        orders = [sorted(range(length), key=lambda i: (h[i], i)) for h in hashes]
        chunks = [[order[i : i + chunk] for i in range(0, length, chunk)] for order in orders]
        for number, queries in enumerate(chunks[0]):
            for q in queries:
                for k in chunks[1][number - 1] + chunks[1][number]:
                    scores[q, k] += similarity(query[q], key[k])
    return scores / scores.sum(dim=1, keepdim=True)


def random_feature_weights(
    query: Float[Tensor, " D"], key: Float[Tensor, "M D"], projection: Float[Tensor, "F D"]
) -> Float[Tensor, " M"]:
    """A.1's ORF: <Phi(q), Phi(k)> normalised, with q and k divided by D ** (1/4)."""
    scale = len(query) ** -0.25

    def features(x: Tensor) -> Tensor:
        x = x * scale
        return torch.exp(projection @ x - (x @ x) / 2) / math.sqrt(len(projection))

    scores = torch.stack([features(query) @ features(k) for k in key])
    return scores / scores.sum()
