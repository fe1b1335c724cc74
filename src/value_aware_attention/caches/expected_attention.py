"""Keeps keys by what queries to come are expected to give them."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from value_aware_attention.arguments import check_at_least
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.method import CacheMethod, available, candidates
from value_aware_attention.caches.observed import Observed
from value_aware_attention.kernels import Exponential


class ExpectedAttention(CacheMethod):
    """Keeps the r keys with the largest E[exp(s q·k_j)], as weights, times ||v_j||.

    With queries taken as Gaussian, log E = s mu·k + s^2 k' Sigma k / 2 for the kernel's scale s;
    softmax over keys, mean over the group (Devoto et al., 2025, arXiv 2510.00636). mu and Sigma
    are those of the observed queries; where the model rotates them, of the queries as they were
    before, turned by the mean rotation of the `horizon` positions after the last key.
    """

    kernels: tuple[type, ...] = (Exponential,)

    def __init__(self, r: int, horizon: int = 512) -> None:
        super().__init__(r)
        self.horizon = check_at_least(1, horizon=horizon)

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        assert isinstance(seen.kernel, Exponential)
        key, value = working_precision(seen.key), working_precision(seen.value)
        mean, covariance = self._statistics(seen)
        scale = seen.kernel.scale_for(key.shape[-1])
        spread = torch.einsum("...md,...gde,...me->...gm", key, covariance, key)
        logits = scale * (mean @ key.mT) + scale**2 / 2 * spread
        logits = logits.masked_fill(~available(seen)[..., None, :], -torch.inf)
        expected = logits.softmax(dim=-1).nan_to_num().mean(dim=-2)
        return expected * value.norm(dim=-1)

    def _statistics(
        self, seen: Observed
    ) -> tuple[Float[Tensor, "*batch G D"], Float[Tensor, "*batch G D D"]]:
        """Computes mean and covariance of the observed queries, at later positions."""
        query = working_precision(seen.query)
        if seen.rotary is not None and seen.positions is not None:
            query = seen.rotary(query, -seen.positions)
        seeing = seen.log_similarity.amax(dim=-1, keepdim=True) > -torch.inf
        rows = seeing.to(query.dtype)  # 0 for padding
        count = rows.sum(dim=-2, keepdim=True).clamp_min(1)
        mean = (query * rows).sum(dim=-2, keepdim=True) / count
        centred = (query - mean) * rows
        covariance = centred.mT @ centred / count
        if seen.rotary is not None:
            turn = self._mean_rotation(seen)
            mean, covariance = mean @ turn, turn.mT @ covariance @ turn
        return mean.squeeze(-2), covariance

    def _mean_rotation(self, seen: Observed) -> Float[Tensor, "D D"]:
        """Averages the matrices that turn a row vector to each of the later positions."""
        assert seen.rotary is not None
        width, device = seen.key.shape[-1], seen.key.device
        unit = torch.eye(width, dtype=seen.log_similarity.dtype, device=device)
        start = seen.keys if seen.start is None else seen.start
        places = start + torch.arange(self.horizon, device=device)
        turned = (  # in parts: all matrices at once would take more memory than a prompt's keys
            seen.rotary(unit[:, None].expand(-1, len(part), -1), part).sum(dim=-2)
            for part in places.split(32)
        )
        return torch.stack(list(turned)).sum(dim=0) / self.horizon

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float((rows + keys) * head_dim**2)


class CapKV(ExpectedAttention):
    """Keeps the r keys with the largest w_j v_j' (I + sum_i w_i v_i v_i')^-1 v_j.

    CapKV (arXiv 2604.25975) as its author's press in kvpress has it: w = exp(5 c) of the cosine c
    of a key to the mean query, over the largest of them; the mean query is turned by the mean
    rotation of the `horizon` positions to come; the mean over the group. Its author looks at all
    queries but the first 4 (here at these too), with sinks = 4 and recent = 0; protected keys are
    left out. The unit I makes the choice depend on the scale of the values.
    """

    kernels = CacheMethod.kernels

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        key, value = (working_precision(x)[..., None, :, :] for x in (seen.key, seen.value))
        mean, _ = self._statistics(seen)
        cosine = cosine_similarity(mean[..., None, :], key, dim=-1)
        cosine = cosine.masked_fill(~candidates(seen)[..., None, :], -torch.inf)
        weights = (5 * (cosine - cosine.amax(dim=-1, keepdim=True))).exp().nan_to_num()
        factors = (weights + 1e-6).where(cosine > -torch.inf, 0.0)
        whole = (value.mT * factors[..., None, :]) @ value
        solved = torch.linalg.solve(whole + torch.eye(whole.shape[-1]).to(whole), value.mT).mT
        return (weights * (value * solved).sum(dim=-1)).mean(dim=-2)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * head_dim + keys * (head_dim + 2 * value_dim**2))
