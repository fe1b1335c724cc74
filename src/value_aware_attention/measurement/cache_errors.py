"""What a shared set of keys costs each layer and head on the queries that it is kept for."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from value_aware_attention.approximations import Exact
from value_aware_attention.caches import AfterPrefix
from value_aware_attention.error import squared_output_error
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.kernels import Kernel
from value_aware_attention.layer import Layer

__all__ = ["CacheCall", "CacheErrors", "cache_calls"]


@dataclass(frozen=True)
class CacheCall:
    """What one layer's attention is called with, query heads grouped by their key-value head."""

    query: Float[Tensor, "B H G N D"]
    key: Float[Tensor, "B H 1 N D"]
    value: Float[Tensor, "B H 1 N V"]
    kernel: Kernel
    is_causal: bool
    attn_mask: Bool[Tensor, "#B 1 1 #N N"] | None
    layer: Layer

    def arguments(self) -> dict[str, Any]:
        """Returns what an `AfterPrefix` is called with."""
        return dict(vars(self))

    def exact(self) -> Float[Tensor, "B H G N V"]:
        """Computes exact attention's output."""
        inputs = [x.expand(*self.query.shape[:3], -1, -1) for x in (self.key, self.value)]
        mask = self.attn_mask
        return Exact()(
            self.query, *inputs, kernel=self.kernel, attn_mask=mask, is_causal=self.is_causal
        )


class _CacheRecorder(nn.Module):
    """Exact attention that keeps what a layer's heads are called with, in groups."""

    shares_keys = True
    """What `AfterPrefix` has: groups, and a layer's own facts"""

    def __init__(self, repeated: int | None) -> None:
        super().__init__()
        self.observed = "last" if repeated is None else "repeat"
        self.prefix = repeated
        self.calls: list[CacheCall] = []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, kernel: Kernel, layer: Layer,
        attn_mask: Tensor | None = None, is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        call = CacheCall(query, key, value, kernel, is_causal, attn_mask, layer)
        self.calls.append(call)
        return call.exact()


@torch.inference_mode()
def cache_calls(
    model: PreTrainedModel, repeated: int | None = None, **inputs: Any
) -> list[CacheCall]:
    """Records every layer's call as the exact model reads a batch.

    `repeated` is the length of a prefix to be read once more, for methods that observe "repeat".
    """
    recorders: dict[int, _CacheRecorder] = {}

    def recorder(layer: int) -> nn.Module:
        return recorders.setdefault(layer, _CacheRecorder(repeated))

    with replace_attention(model, recorder):
        model(**inputs)
    return [call for layer in sorted(recorders) for call in recorders[layer].calls]


@dataclass(frozen=True)
class CacheErrors:
    """Exact outputs of a layer for the queries that methods are judged by."""

    call: CacheCall
    rows: Int[Tensor, " n"]
    """Places of the queries: of those after a prefix, or those that no method has observed."""
    output: Float[Tensor, "B H G n V"]

    @classmethod
    def of(cls, call: CacheCall, rows: Int[Tensor, " n"]) -> "CacheErrors":
        """Computes the exact outputs once for all methods."""
        return cls(call, rows, call.exact()[..., rows, :])

    def squared_norm(self) -> Float[Tensor, "B H"]:
        """Sums ||o||^2 over the rows of each key-value head's group."""
        return self.output.double().square().sum(dim=(2, 3, 4))

    def squared_error(self, method: AfterPrefix) -> Float[Tensor, "B H"]:
        """Sums ||o - o~||^2 of a method over the rows of each key-value head's group."""
        output = method(**self.call.arguments())[..., self.rows, :]
        return squared_output_error(output, self.output).double().sum(dim=(2, 3))
