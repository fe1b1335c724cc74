"""Keeps keys by the attention expected from future queries."""

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
    """Keeps the r keys with the largest E[exp(s q·k_j)], normalised to weights, times ||v_j||.

    With Gaussian queries, log E = s mu·k + s^2 k' Sigma k / 2 for the kernel's scale s, followed by
    a softmax over keys and a mean over the group (Devoto et al., 2025, arXiv 2510.00636). mu and
    Sigma are those of the observed queries. With rotary positions, they are those of the unrotated
    queries, rotated by the mean rotation of the `horizon` positions after the last key.
    """

    kernels: tuple[type, ...] = (Exponential,)

    def __init__(self, r: int, horizon: int = 512) -> None:
        super().__init__(r)
        self.horizon = check_at_least(1, horizon=horizon)

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        assert isinstance(observed.kernel, Exponential)
        key, value = working_precision(observed.key), working_precision(observed.value)
        mean, covariance = self._statistics(observed)
        scale = observed.kernel.scale_for(key.shape[-1])
        spread = torch.einsum("...md,...gde,...me->...gm", key, covariance, key)
        logits = scale * (mean @ key.mT) + scale**2 / 2 * spread
        logits = logits.masked_fill(~available(observed)[..., None, :], -torch.inf)
        return logits.softmax(dim=-1).nan_to_num().mean(dim=-2) * value.norm(dim=-1)

    def _statistics(
        self, observed: Observed
    ) -> tuple[Float[Tensor, "*batch G D"], Float[Tensor, "*batch G D D"]]:
        """Computes mean and covariance of the observed queries, rotated to later positions."""
        query = working_precision(observed.query)
        if observed.rotary is not None and observed.positions is not None:
            query = observed.rotary(query, -observed.positions)
        seeing = observed.log_similarity.amax(dim=-1, keepdim=True) > -torch.inf
        rows = seeing.to(query.dtype)  # 0 for padding
        count = rows.sum(dim=-2, keepdim=True).clamp_min(1)
        mean = (query * rows).sum(dim=-2, keepdim=True) / count
        centred = (query - mean) * rows
        covariance = centred.mT @ centred / count
        if observed.rotary is not None:
            turn = self._mean_rotation(observed)
            mean, covariance = mean @ turn, turn.mT @ covariance @ turn
        return mean.squeeze(-2), covariance

    def _mean_rotation(self, observed: Observed) -> Float[Tensor, "D D"]:
        """Averages the matrices that rotate a row vector to each of the later positions."""
        assert observed.rotary is not None
        width, device = observed.key.shape[-1], observed.key.device
        unit = torch.eye(width, dtype=observed.log_similarity.dtype, device=device)
        start = observed.keys if observed.start is None else observed.start
        places = start + torch.arange(self.horizon, device=device)
        turned = (  # in chunks: all matrices at once would take more memory than the keys
            observed.rotary(unit[:, None].expand(-1, len(shifts), -1), shifts).sum(dim=-2)
            for shifts in places.split(32)
        )
        return torch.stack(list(turned)).sum(dim=0) / self.horizon

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float((rows + keys) * head_dim**2)


class CapKV(ExpectedAttention):
    """Keeps the r keys with the largest w_j v_j' (I + sum_i w_i v_i v_i')^-1 v_j.

    This is CapKV (arXiv 2604.25975) as in its author's press for kvpress. w = exp(5 c), relative to
    the largest, where c is the cosine between a key and the mean query. The mean query is rotated
    by the mean rotation of the next `horizon` positions. Scores are averaged over the group. The
    author observes all queries but the first 4 (included here), with sinks = 4 and recent = 0.
    Protected keys are left out. Because of I, the choice depends on the scale of the values.
    """

    kernels = CacheMethod.kernels
    scale_free = False

    def scores(self, observed: Observed) -> Float[Tensor, "*batch M"]:
        key, value = (working_precision(x)[..., None, :, :] for x in (observed.key, observed.value))
        mean, _ = self._statistics(observed)
        cosine = cosine_similarity(mean[..., None, :], key, dim=-1)
        cosine = cosine.masked_fill(~candidates(observed)[..., None, :], -torch.inf)
        weights = (5 * (cosine - cosine.amax(dim=-1, keepdim=True))).exp().nan_to_num()
        factors = (weights + 1e-6).where(cosine > -torch.inf, 0.0)
        whole = (value.mT * factors[..., None, :]) @ value
        solved = torch.linalg.solve(whole + torch.eye(whole.shape[-1]).to(whole), value.mT).mT
        return (weights * (value * solved).sum(dim=-1)).mean(dim=-2)

    def multiply_adds(self, rows: int, keys: int, head_dim: int, value_dim: int) -> float:
        return float(rows * head_dim + keys * (head_dim + 2 * value_dim**2))
