"""Attention of a model's last layer for the scored queries alone."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from value_aware_attention.call import Call
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.recorded import answers_alone

__all__ = ["ScoredRows"]


class ScoredRows:
    """Saves a model's last layer the rows that no score depends on; no score changes.

    Nothing after the attention of the last layer mixes positions. Methods that answer each query
    alone get the rows of `asked` only, and leave 0 in the others; other methods get the whole call.
    """

    asked: Bool[Tensor, "B N"]
    """The positions that are scored in the batch that the model reads next."""

    def in_last_layer(
        self, method: Callable[[int], nn.Module], layers: int
    ) -> Callable[[int], nn.Module]:
        """Returns the same methods, the last of `layers` with the scored rows alone."""

        def build(layer: int) -> nn.Module:
            built = method(layer)
            alone = layer == layers - 1 and answers_alone(built)
            return _AskedRows(built, self) if alone else built

        return build


class _AskedRows(nn.Module):
    def __init__(self, method: nn.Module, scored: ScoredRows) -> None:
        super().__init__()
        self.method, self.scored = method, scored

    @torch.inference_mode()
    def forward(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N V"],
        *,
        kernel: Kernel,
        attn_mask: Bool[Tensor, "#B #H #N #N"] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "B H N V"]:
        """Returns the method's output at the rows asked for."""
        call = Call.of(query, key, value, kernel=kernel, attn_mask=attn_mask, is_causal=is_causal)
        asked = self.scored.asked
        # Where a sequence has fewer than the others, some of its other rows fill up.
        first = asked.long().argsort(dim=1, descending=True, stable=True)
        count = max(1, int(asked.sum(dim=1).max()))  # no method is called without a query
        position = first[:, None, :count].expand(-1, query.shape[1], -1)
        output = self.method(**call.at(position).arguments())
        place = position[..., None].expand_as(output)
        return value.new_zeros(*query.shape[:-1], value.shape[-1]).scatter(2, place, output)
