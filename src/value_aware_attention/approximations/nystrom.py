"""Computes Nystromformer's attention, reconstructed from landmark queries and keys."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.arguments import check_at_least
from value_aware_attention.attention import weights_over
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes


class Nystrom(Approximation):
    """Computes alpha(Q, K~) alpha(Q~, K~)^+ alpha(Q~, K) V; Q~, K~ are means (Xiong et al., 2021).

    alpha(., .) are rows of normalised similarities; the paper uses the exponential kernel, other
    kernels are our extension. The visible positions are cut in order into `landmarks` segments of
    nearly equal size, each represented by its mean. Padding enters no mean and is masked among the
    keys, so padding does not change the output. With as many queries as keys, a hidden key also
    hides the query at its position. As many landmarks as keys are exact; more raise ValueError.
    `iterations` None uses the Moore-Penrose pseudo-inverse in fp64; a number runs that many steps
    of the paper's iteration. The paper's 6 steps leave errors of a few percent, but do not amplify
    noise as the exact inverse of a nearly singular matrix does, so use them for training. The
    paper's depthwise convolution of the values, which is trained with a model, is left out. The
    cost is O(L landmarks). Landmarks are means over all positions, so there is no causal form.
    """

    supports_causal = False
    needs_shared_keys = True

    def __init__(self, landmarks: int, iterations: int | None = None) -> None:
        super().__init__()
        self.landmarks = check_at_least(1, landmarks=landmarks)
        self.iterations = None if iterations is None else check_at_least(1, iterations=iterations)

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        query, key, kernel, visible = call.query, call.key, call.kernel, call.visible
        if self.landmarks > call.keys:
            raise ValueError(
                f"landmarks is {self.landmarks}; it must be at most the {call.keys} keys given"
            )
        of_keys = None if visible is None else visible[..., 0, :]
        of_queries = of_keys if query.shape[-2] == call.keys else None
        queries, query_used = _segment_means(
            query, min(self.landmarks, query.shape[-2]), of_queries
        )
        keys, key_used = _segment_means(key, self.landmarks, of_keys)
        to_landmarks = weights_over(query, keys, kernel, key_used)
        between = weights_over(queries, keys, kernel, key_used)
        if query_used is not None:
            between = between * query_used.transpose(-2, -1)
        from_landmarks = weights_over(queries, key, kernel, visible)
        return to_landmarks @ (self._pseudo_inverse(between) @ (from_landmarks @ call.value))

    def _pseudo_inverse(
        self, matrix: Float[Tensor, "*batch R1 R2"]
    ) -> Float[Tensor, "*batch R2 R1"]:
        if self.iterations is not None:
            return iterated_pseudo_inverse(matrix, self.iterations)
        # fp64, because a nearly singular matrix multiplies fp32 rounding by its condition number.
        noise = max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps
        try:
            return torch.linalg.pinv(matrix.double(), rtol=noise).to(matrix.dtype)
        except torch.linalg.LinAlgError:
            raise ValueError(
                "query or key holds NaN or infinity, or numbers whose similarity overflows; "
                "Nystrom has no pseudo-inverse of that"
            ) from None

    def multiply_adds(self, sizes: Sizes) -> float:
        """Counts both outer factors, their products, and a query's share of the inverse."""
        outer = self.landmarks * sizes.one_key * (1 + sizes.keys / sizes.queries)
        inverse = 4 * (self.iterations or 6) * self.landmarks**3  # exact: about as much as 6 steps
        return outer + (inverse + self.landmarks**2 * sizes.one_key) / sizes.queries


def iterated_pseudo_inverse(
    matrix: Float[Tensor, "*batch R1 R2"], iterations: int
) -> Float[Tensor, "*batch R2 R1"]:
    """Iterates Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from A' / (||A||_1 ||A||_inf)."""
    rows, columns = (matrix.abs().sum(dim=dim).amax(dim=-1) for dim in (-1, -2))
    scale = (rows * columns).clamp_min(torch.finfo(matrix.dtype).tiny)
    inverse = matrix.transpose(-2, -1) / scale[..., None, None]
    identity = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        bracket = 15 * identity - product @ (7 * identity - product)
        inverse = inverse @ (13 * identity - product @ bracket) / 4
    return inverse


def _segment_means(
    x: Float[Tensor, "*#batch L D"], segments: int, visible: Bool[Tensor, "*#batch L"] | None
) -> tuple[Float[Tensor, "*batch R D"], Bool[Tensor, "*batch 1 R"] | None]:
    """Averages the visible positions of each segment; also returns a mask of nonempty segments."""
    length = x.shape[-2]
    if visible is None and segments and length % segments == 0:
        return x.unflatten(-2, (segments, -1)).mean(dim=-2), None
    if visible is None:
        visible = torch.ones(length, dtype=torch.bool, device=x.device)
    rank = visible.cumsum(dim=-1) - 1
    count = visible.sum(dim=-1, keepdim=True)
    used = count.clamp_max(segments)
    segment = (rank * used // count.clamp_min(1)).where(
        visible, segments
    )  # the last one is in no segment
    batch = torch.broadcast_shapes(x.shape[:-2], visible.shape[:-1])
    index = segment.expand(*batch, length)
    rows = x.expand(*batch, *x.shape[-2:])
    none = x.new_zeros(*batch, segments + 1, x.shape[-1])
    sums = none.scatter_add(-2, index[..., None].expand_as(rows), rows)
    sizes = none[..., 0].scatter_add(-1, index, torch.ones_like(index, dtype=x.dtype))
    means = sums / sizes.clamp_min(1)[..., None]
    return means[..., :segments, :], (sizes > 0)[..., None, :segments]
