"""Gives every head its own number of keys, and measures a model with all heads at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.measurement.measure import Method, Setting
from value_aware_attention.records.headline import keys_by_head
from value_aware_attention.records.record import AWARE, OBLIVIOUS, SHARES, OutputError

WINDOW, SINKS_AND_WINDOW = "sliding_window", "first_tokens_and_window"
NEEDED_BY = {OBLIVIOUS: OBLIVIOUS, AWARE: AWARE} | dict.fromkeys(
    (WINDOW, SINKS_AND_WINDOW), OBLIVIOUS
)
"""Method with budgets -> the choice of keys that determines the budgets"""


class HeadBudgets(nn.Module):
    """Attends in head h with `method(counts[h])`, a module that keeps this many keys per query.

    For `hugging_face.replace_attention`, which passes a layer's query heads:
    `lambda layer: HeadBudgets(OptimalValueOblivious, report.keys_by_head()[layer])`.
    """

    def __init__(self, method: Callable[[int], nn.Module], counts: Sequence[int]) -> None:
        super().__init__()
        self.counts = tuple(counts)
        self.sizes = sorted(set(counts))
        self.methods = nn.ModuleList(method(r) for r in self.sizes)

    def forward(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B H M D"],
        value: Float[Tensor, "B H M V"],
        *,
        attn_mask: Tensor | None = None,
        **options: object,
    ) -> Float[Tensor, "B H N V"]:
        """Returns the output of every head. Raises ValueError unless there is a count per head."""
        if query.shape[1] != len(self.counts):
            raise ValueError(f"{len(self.counts)} heads have counts; there are {query.shape[1]}")
        output = value.new_empty(*query.shape[:-1], value.shape[-1])
        by_head = attn_mask is not None and attn_mask.ndim > 3 and attn_mask.shape[1] > 1
        for r, method in zip(self.sizes, self.methods, strict=True):
            heads = [head for head, count in enumerate(self.counts) if count == r]
            mask = attn_mask[:, heads] if attn_mask is not None and by_head else attn_mask
            output[:, heads] = method(
                *(x[:, heads] for x in (query, key, value)), attn_mask=mask, **options
            )
        return output

    def extra_repr(self) -> str:
        return f"counts={self.counts}"


def budget_settings(measured: OutputError, methods: Mapping[str, Method]) -> Iterator[Setting]:
    """Yields the methods with budgets by head for each of `SHARES`, starting with the largest.

    A setting has the `share`, the mean number of `keys` per head, and `each`. "own" gives each head
    the keys that it needs for this error. "equal" gives all heads the mean (rounded up); it is
    measured only for the choice by weight. A window gets as many keys as the choice by weight.
    """
    for share in sorted(SHARES, reverse=True):
        for name in (name for name in NEEDED_BY if name in methods):
            counts = keys_by_head(measured, NEEDED_BY[name], share)
            mean = float(np.mean(counts))
            yield _setting(methods[name], name, counts, share=share, keys=mean, each="own")
            if name == OBLIVIOUS:
                equal = [[int(np.ceil(mean))] * measured.heads] * measured.layers
                yield _setting(methods[name], name, equal, share=share, keys=mean, each="equal")


def _setting(
    method: Method, name: str, counts: Sequence[Sequence[int]], **parameters: float | str
) -> Setting:
    def build(layer: int) -> nn.Module:
        return HeadBudgets(lambda r: method(r, layer), counts[layer])

    return Setting(name, parameters, build)
