"""Records the calls of a model's attention layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from value_aware_attention.call import Call
from value_aware_attention.hugging_face.adapter import replace_attention
from value_aware_attention.hugging_face.attending import exact
from value_aware_attention.kernels import Kernel


class _Recorder(nn.Module):
    """Computes exact attention and records its calls."""

    def __init__(self, shares_keys: bool, repeated: int | None) -> None:
        super().__init__()
        self.shares_keys = shares_keys
        self.observed = "last" if repeated is None else "repeat"  # as in `AfterPrefix`
        self.prefix, self.pool = repeated, None
        self.calls: list[Call] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        call = Call.of(query, key, value, **options)
        self.calls.append(call)
        return exact(call)


@contextmanager
def recording(
    model: PreTrainedModel,
    *,
    kernel: Kernel | None = None,
    shares_keys: bool = False,
    repeated: int | None = None,
) -> Iterator[list[Call]]:
    """Records the call of every layer while the model reads within the context.

    On exit the list holds the calls, ordered by layer; a layer that ran several times has several.
    With `shares_keys` they have the shapes for `AfterPrefix`: query (B, H, G, N, D) by key-value
    head, key and value (B, H, 1, N, .). `repeated` is the length of a prefix that is read a second
    time, for methods that observe "repeat".
    """
    recorders: dict[int, _Recorder] = {}
    calls: list[Call] = []

    with replace_attention(
        model,
        lambda layer: recorders.setdefault(layer, _Recorder(shares_keys, repeated)),
        kernel=kernel,
    ):
        yield calls
    calls += [call for layer in sorted(recorders) for call in recorders[layer].calls]
