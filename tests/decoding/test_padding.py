"""A text keeps in a padded batch what it keeps alone, whatever the method and what it observes."""

import pytest
import torch
from torch import Tensor

from tests.caches.methods import DRAWING, METHODS
from tests.caches.seen import rotary
from value_aware_attention.caches import AfterPrefix
from value_aware_attention.caches.observed import OBSERVED
from value_aware_attention.call import Layer

SLOWLY = pytest.mark.slow
PREFIX, LATER, D, V, R = 20, 4, 4, 3, 7
ROWS = 6
"""Fewer than the tokens of each text"""
TOKENS = {
    "left": range(8, PREFIX),
    "right": range(12),
    "hole": [*range(2, 7), *range(10, 17)],
}
CACHES = {name: build for name, build in METHODS.items() if name not in DRAWING}
"""Random and VaSE draw other keys for each text of a batch, by definition"""


def batch() -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Draws two texts of two groups of two heads, and the prefix read once more."""
    generator = torch.Generator().manual_seed(0)

    def drawn(length: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = ((2, D, 3.0), (1, D, 1.0), (1, V, 1.0))
        return tuple(
            torch.randn(2, 2, heads, length, width, generator=generator, dtype=torch.float64) * size
            for heads, width, size in sizes
        )

    return list(drawn(PREFIX + LATER)), drawn(PREFIX)


@pytest.mark.parametrize(
    "observed",
    [
        name if name in ("continued", "repeat") else pytest.param(name, marks=SLOWLY)
        for name in OBSERVED
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOWLY) if "best" in n else n for n in CACHES]
)
def test_a_text_keeps_in_a_batch_what_it_keeps_alone(name: str, observed: str) -> None:
    """With padding at either side and within."""
    tensors, repeated = batch()
    projection = torch.randn(2, 2, V, 5, generator=torch.Generator().manual_seed(1)).double()
    options = {"observed": observed, "rows": ROWS, "sinks": 1, "recent": 2}
    for side, tokens in TOKENS.items():
        mask = torch.ones(2, 1, 1, 1, PREFIX + LATER, dtype=torch.bool)
        mask[0, ..., :PREFIX] = False
        mask[0, ..., list(tokens)] = True
        layer = Layer(projection, rotary, repeated)
        method = AfterPrefix(CACHES[name](R), prefix=PREFIX, **options)
        found = method(*tensors, attn_mask=mask, is_causal=True, layer=layer)
        own, later = list(tokens), list(range(PREFIX, PREFIX + LATER))
        again = tuple(x[:1, ..., own, :] for x in repeated)
        expected = AfterPrefix(CACHES[name](R), prefix=len(own), **options)(
            *(x[:1, ..., own + later, :] for x in tensors),
            is_causal=True, layer=Layer(projection, rotary, again),
        )  # fmt: skip
        torch.testing.assert_close(found[:1, ..., own + later, :], expected, msg=side)


def test_a_choice_is_made_without_a_kernel_and_by_masks_of_heads() -> None:
    """The kernel is the exponential by default; a head keeps no key that it hides."""
    tensors, _ = batch()
    method = AfterPrefix(METHODS["recent"](2), prefix=PREFIX, sinks=0, recent=0)
    query, key, value = tensors
    (kept,) = method.choose([{"query": query, "key": key, "value": value, "is_causal": True}])
    assert (kept.indices == torch.tensor([PREFIX - 2, PREFIX - 1])).all()
    mask = torch.ones(1, 2, 1, 1, PREFIX + LATER, dtype=torch.bool)
    mask[:, 1, ..., PREFIX - 5 :] = False
    encoder = AfterPrefix(METHODS["recent"](2), prefix=None, observed="noncausal")
    found = encoder(*tensors, attn_mask=mask)
    own = encoder(*(x[:, 1:, :, : PREFIX - 5] for x in (query, key, value)))
    torch.testing.assert_close(found[:, 1:, :, : PREFIX - 5], own)


@pytest.mark.parametrize("every", [None, 2])
def test_windows_leave_a_text_what_it_has_alone(every: int | None) -> None:
    """Also where a later query sees no key of the prefix."""
    tensors, _ = batch()
    places = torch.arange(PREFIX + LATER)
    for window in (1, 3, 9):
        mask = (places <= places[:, None]) & (places > places[:, None] - window)
        mask = mask.expand(2, 1, 1, -1, -1).clone()
        mask[0, ..., PREFIX - 3 : PREFIX] = False
        for name in ("value_aware", "snapkv", "attention_matching", "recent"):
            method = METHODS[name](R)
            options = {"every": None if method.refits else every, "sinks": 1, "recent": 2}
            after = AfterPrefix(method, prefix=PREFIX, rows=ROWS, **options)
            found = after(*tensors, attn_mask=mask)
            for text in range(2):
                own = slice(text, text + 1)
                alone = after(*(x[own] for x in tensors), attn_mask=mask[own])
                torch.testing.assert_close(found[own], alone)
