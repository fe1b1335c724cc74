"""Slow, obvious versions of attention and its approximations: the truth the fast ones are held to.

Everything is fp64, one query at a time, written as in the paper. Inputs have no leading dimensions:
query (D,), key (M, D), value (M, V), visible (M,) boolean.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tests.reference.solver import closest_in_hull

Similarity = Callable[[Tensor, Tensor], float]


def exponential(query: Tensor, key: Tensor) -> float:
    """Computes exp(<q, k> / sqrt(D))."""
    return math.exp(float(query @ key) / math.sqrt(len(query)))


def polynomial(query: Tensor, key: Tensor) -> float:
    """Computes <q, k> ** 2."""
    return float(query @ key) ** 2


def elu(query: Tensor, key: Tensor) -> float:
    """Computes <1 + elu(q), 1 + elu(k)>."""
    one_plus_elu = [torch.where(x > 0, x + 1, x.exp()) for x in (query, key)]
    return float(one_plus_elu[0] @ one_plus_elu[1])


def attention_weights(
    query: Float[Tensor, " D"],
    key: Float[Tensor, "M D"],
    similarity: Similarity,
    visible: Bool[Tensor, " M"],
) -> Float[Tensor, " M"]:
    """Divides similarities by their sum: alpha of Eq. 1, all zero where nothing is visible."""
    scores = [similarity(query, k) if sees else 0.0 for k, sees in zip(key, visible, strict=True)]
    total = sum(scores)
    return torch.tensor([score / total if total else 0.0 for score in scores], dtype=torch.float64)


def optimal_value_oblivious(alpha: Float[Tensor, " M"], r: int) -> Float[Tensor, " M"]:
    """Keeps the r largest weights, renormalised (Eq. 2)."""
    kept = set(sorted(range(len(alpha)), key=lambda i: -float(alpha[i]))[:r])
    total = sum(float(alpha[i]) for i in kept)
    return torch.tensor(
        [float(alpha[i]) / total if i in kept and total else 0.0 for i in range(len(alpha))],
        dtype=torch.float64,
    )


def oblivious_keys_optimal_weights(
    alpha: Float[Tensor, " M"], value: Float[Tensor, "M V"], visible: Bool[Tensor, " M"], r: int
) -> Float[Tensor, " M"]:
    """Keeps the r visible keys with the largest alpha, weighted to come closest to the output."""
    kept = _largest([float(a) for a in alpha], [i for i in range(len(alpha)) if visible[i]], r)
    weights = torch.zeros(len(alpha), dtype=torch.float64)
    if kept:
        weights[kept] = closest_in_hull(value[kept], alpha @ value)
    return weights


def value_aware_keys_attention_weights(
    alpha: Float[Tensor, " M"], value: Float[Tensor, "M V"], r: int
) -> Float[Tensor, " M"]:
    """Adds r times the key that leaves least error, and keeps the best of the sizes passed."""

    def error(kept: list[int]) -> float:
        return float((_renormalised(alpha, kept) @ value - alpha @ value).square().sum())

    passed: list[list[int]] = [[]]
    for _ in range(r):
        longer = [[*passed[-1], i] for i in _positive(alpha) if i not in passed[-1]]
        passed += [min(longer, key=error)] if longer else []
    return _renormalised(alpha, min(passed[1:], key=error, default=[]))


def norm_weighted_keys(
    alpha: Float[Tensor, " M"], value: Float[Tensor, "M V"], r: int, norm: int
) -> Float[Tensor, " M"]:
    """Keeps the r largest alpha_i ||v_i||, renormalised; norm 1 is the sum of |v|, 2 Euclidean."""
    sizes = [sum(abs(float(x)) ** norm for x in v) ** (1 / norm) for v in value]
    scores = [float(a) * size for a, size in zip(alpha, sizes, strict=True)]
    return _renormalised(alpha, _largest(scores, _positive(alpha), r))


def leave_one_out_keys(
    alpha: Float[Tensor, " M"], value: Float[Tensor, "M V"], r: int
) -> Float[Tensor, " M"]:
    """Keeps the r keys without which, each alone, the renormalised output would move the most."""
    keys = _positive(alpha)
    scores = [math.inf] * len(alpha)
    for i in keys:
        others = [j for j in keys if j != i]
        if others:
            without = _renormalised(alpha, others) @ value
            scores[i] = float((without - alpha @ value).norm())
    return _renormalised(alpha, _largest(scores, keys, r))


def sampled_keys(alpha: Float[Tensor, " M"], uniforms: list[float]) -> Float[Tensor, " M"]:
    """Draws one key per number u in [0, 1): the key at which the running sum of alpha passes u."""
    weights = torch.zeros(len(alpha), dtype=torch.float64)
    for u in uniforms if alpha.sum() else []:
        running = 0.0
        for i, a in enumerate(alpha):
            running += float(a)
            if running > u:
                weights[i] += 1 / len(uniforms)
                break
    return weights


def mean_value_slot(
    query: Float[Tensor, " D"], key: Float[Tensor, "M D"], value: Float[Tensor, "M V"],
    similarity: Similarity, visible: Bool[Tensor, " M"], r: int, mass: str,
) -> Float[Tensor, " V"]:  # fmt: skip
    """Attends to the r - 1 most similar visible keys and to the mean of the other values."""
    places = [i for i in range(len(key)) if visible[i]]
    similarities = [similarity(query, k) for k in key]
    largest = _largest(similarities, places, r - 1)
    others = [i for i in places if i not in largest]
    weights, vectors = [similarities[i] for i in largest], [value[i] for i in largest]
    if others:
        rest = sum(similarities[i] for i in others)
        if mass == "mean_key":
            rest = len(others) * similarity(query, key[others].mean(dim=0))
        weights, vectors = [*weights, rest], [*vectors, value[others].mean(dim=0)]
    total = sum(weights)
    zero = torch.zeros(value.shape[-1], dtype=torch.float64)
    return sum((w / total * v for w, v in zip(weights, vectors, strict=True)), zero)


def _positive(alpha: Float[Tensor, " M"]) -> list[int]:
    return [i for i in range(len(alpha)) if alpha[i] > 0]


def _largest(scores: list[float], keys: list[int], r: int) -> list[int]:
    return sorted(keys, key=lambda i: (-scores[i], i))[:r]


def _renormalised(alpha: Float[Tensor, " M"], kept: list[int]) -> Float[Tensor, " M"]:
    weights = torch.zeros(len(alpha), dtype=torch.float64)
    weights[kept] = alpha[kept] / (alpha[kept].sum() if kept else 1.0)
    return weights


def sliding_window(position: int, keys: int, r: int) -> list[int]:
    """Keeps the bidirectional window: r // 2 keys to the left, shifted inwards at the edges."""
    window = [position - r // 2 + offset for offset in range(min(r, keys))]
    while window[0] < 0:
        window = [key + 1 for key in window]
    while window[-1] >= keys:
        window = [key - 1 for key in window]
    return window


def dilated_window(position: int, keys: int, r: int, dilation: int) -> list[int]:
    """Keeps the sliding window among the positions that multiples of `dilation` lead to."""
    reached = [key for key in range(keys) if (key - position) % dilation == 0]
    window = sliding_window(reached.index(position), len(reached), r)
    return [reached[place] for place in window]


def strided(position: int, keys: int, stride: int) -> list[int]:
    """Keeps |i - j| < s or (i - j) mod s = 0 (Sparse Transformer)."""
    return [
        key for key in range(keys) if abs(position - key) < stride or (position - key) % stride == 0
    ]


def fixed(position: int, keys: int, stride: int, summary: int) -> list[int]:
    """Keeps floor(j / s) = floor(i / s) or j mod s >= s - c (Sparse Transformer)."""
    own = range(position - position % stride, position - position % stride + stride)
    return [key for key in range(keys) if key in own or key % stride >= stride - summary]


def longformer(
    position: int, keys: int, window: int, dilation: int, global_positions: Sequence[int]
) -> list[int]:
    """Keeps window // 2 keys left, the token, the rest right, and pairs with a global position."""
    first = position - window // 2 * dilation
    near = [first + place * dilation for place in range(window)]
    is_global = position in global_positions
    return [key for key in range(keys) if is_global or key in near or key in global_positions]


def big_bird(
    position: int, keys: int, window: int, global_positions: Sequence[int], drawn: Sequence[int]
) -> list[int]:
    """Keeps Longformer's keys without gaps, and the random keys drawn for this position."""
    return sorted({*longformer(position, keys, window, 1, global_positions), *drawn})


def random_keys(uniforms: Sequence[float], choices: int) -> list[int]:
    """Draws len(uniforms) different numbers below `choices`, or all of them (Floyd's algorithm)."""
    drawn: set[int] = set()
    r = len(uniforms)
    for last, u in zip(range(choices - r, choices), uniforms, strict=True):
        if last >= 0:
            number = int(u * (last + 1))
            drawn.add(last if number in drawn else number)
    return sorted(drawn)


def lsh_weights(
    query: Float[Tensor, "M D"],
    key: Float[Tensor, "M D"],
    similarity: Similarity,
    rotations: list[Float[Tensor, "C D"]],
    chunk: int,
) -> Float[Tensor, "M M"]:
    """Scores the previous and own chunk of the keys sorted by hash, per round (A.1)."""
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
    """Normalises <Phi(q), Phi(k)> of A.1's ORF, with q and k divided by D ** (1/4)."""
    scale = len(query) ** -0.25

    def features(x: Tensor) -> Tensor:
        x = x * scale
        return torch.exp(projection @ x - (x @ x) / 2) / math.sqrt(len(projection))

    scores = torch.stack([features(query) @ features(k) for k in key])
    return scores / scores.sum()


def random_fourier_weights(
    query: Float[Tensor, " D"], key: Float[Tensor, "M D"], frequencies: Float[Tensor, "F D"]
) -> Float[Tensor, " M"]:
    """Normalises exp((||q||^2 + ||k||^2) / 2) mean cos(Rq - Rk), q and k divided by D ** (1/4)."""
    q, keys = (x * len(query) ** -0.25 for x in (query, key))
    scores = [
        math.exp(float(q @ q + k @ k) / 2)
        * sum(math.cos(float(w @ (q - k))) for w in frequencies)
        / len(frequencies)
        for k in keys
    ]
    return torch.tensor(scores, dtype=torch.float64) / sum(scores)


def linformer(
    query: Float[Tensor, "N D"],
    key: Float[Tensor, "M D"],
    value: Float[Tensor, "M V"],
    similarity: Similarity,
    key_projection: Float[Tensor, "R M"],
    value_projection: Float[Tensor, "R M"],
) -> Float[Tensor, "N V"]:
    """Attends to E k and F v, each a sum over all positions (Eq. 7 of the paper)."""
    positions = range(len(key))
    projected_keys, projected_values = (
        torch.stack([torch.stack([row[i] * x[i] for i in positions]).sum(dim=0) for row in rows])
        for x, rows in ((key, key_projection), (value, value_projection))
    )
    every = torch.ones(len(key_projection), dtype=torch.bool)
    weights = [attention_weights(q, projected_keys, similarity, every) for q in query]
    return torch.stack(weights) @ projected_values


def nystrom(
    query: Float[Tensor, "M D"],
    key: Float[Tensor, "M D"],
    value: Float[Tensor, "M V"],
    similarity: Similarity,
    landmarks: int,
) -> Float[Tensor, "M V"]:
    """Computes the paper's formula with means of consecutive, nearly equal segments."""

    def means(x: Tensor) -> Tensor:
        members = [[i for i in range(len(x)) if i * landmarks // len(x) == s] for s in segments]
        return torch.stack([x[some].sum(dim=0) / len(some) for some in members])

    def alpha(queries: Tensor, keys: Tensor) -> Tensor:
        every = torch.ones(len(keys), dtype=torch.bool)
        return torch.stack([attention_weights(q, keys, similarity, every) for q in queries])

    segments = range(landmarks)
    few_queries, few_keys = means(query), means(key)
    inverse = torch.linalg.pinv(alpha(few_queries, few_keys), rtol=1e-12)
    return alpha(query, few_keys) @ inverse @ alpha(few_queries, key) @ value


def reformer_weights(
    query: Float[Tensor, "M D"],
    similarity: Similarity,
    rotations: list[Float[Tensor, "C D"]],
    chunk: int,
) -> Float[Tensor, "M M"]:
    """Computes A.1's LSH with keys q / ||q||; a token has itself only where it has nothing else."""
    length = len(query)
    key = torch.stack([q / q.norm() for q in query])
    scores = torch.zeros(length, length, dtype=torch.float64)
    for rotation in rotations:
        hashes = [int(torch.cat([-rotation @ q, rotation @ q]).argmax()) for q in query]
        order = [i for h in range(2 * len(rotation)) for i in range(length) if hashes[i] == h]
        chunks = [order[i : i + chunk] for i in range(0, length, chunk)]
        for number, members in enumerate(chunks):
            for q in members:
                for k in chunks[number - 1] + members:
                    scores[q, k] += similarity(query[q], key[k]) if q != k else 0.0
    isolated = scores.sum(dim=1) == 0
    scores[isolated, isolated] = 1.0
    return scores / scores.sum(dim=1, keepdim=True)
