"""Draws queries and keys of every kind for methods that choose keys."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from value_aware_attention.attention import attention_state
from value_aware_attention.caches import Observed
from value_aware_attention.kernels import Exponential, Kernel

HEAD_DIM, VALUE_DIM = 4, 3


def observed(
    keys: int = 8,
    *,
    batch: tuple[int, ...] = (2,),
    group: int = 2,
    rows: int = 5,
    seed: int = 0,
    sharpness: float = 1.0,
    outlier: float = 1.0,
    causal: bool = False,
    beside: bool = False,
    padding: int = 0,
    protected: int = 0,
    kernel: Kernel = Exponential(),
    dtype: torch.dtype = torch.float64,
) -> Observed:
    """Draws queries, keys and values; the first `padding` keys of the first cache are padding.

    `causal`: row i sees the keys up to i, and the first row nothing. `beside`: three other keys,
    which a last row sees alone where it is causal too. `protected`: so many of the last keys.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = drawn(*batch, group, rows, HEAD_DIM) * sharpness
    key, value = drawn(*batch, keys, HEAD_DIM), drawn(*batch, keys, VALUE_DIM)
    value[..., keys // 2, :] *= outlier
    others = drawn(*batch, 1, 3, HEAD_DIM), drawn(*batch, 1, 3, VALUE_DIM)
    visible = torch.ones(*batch, group, rows, keys, dtype=torch.bool)
    if causal:
        visible &= torch.arange(keys) < torch.arange(rows)[:, None] * keys // rows
    available = torch.ones(*batch, keys, dtype=torch.bool)
    available.view(-1, keys)[0, :padding] = False
    return Observed(
        query=query,
        key=key,
        value=value.where(available[..., None], 0.0),
        kernel=kernel,
        visible=visible & available[..., None, None, :],
        protected=torch.arange(keys - protected, keys) if protected else None,
        available=available,
        beside=(
            attention_state(kernel.log_similarity(query, others[0]), others[1]) if beside else None
        ),
    )


def rotary(query: Tensor, shift: Tensor) -> Tensor:
    """Turns two pairs of coordinates, the second one slower, as a rotary embedding does."""
    angle = shift[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    cos, sin = (x.to(query.dtype).repeat(1, 2) for x in (angle.cos(), angle.sin()))
    return query * cos + torch.cat([-query[..., 2:], query[..., :2]], dim=-1) * sin


def kinds(**fixed: object) -> st.SearchStrategy[Observed]:
    """Draws caches of every kind that is not fixed."""
    drawn = {
        "seed": st.integers(0, 2**20),
        "sharpness": st.sampled_from([0.1, 1.0, 6.0]),
        "outlier": st.sampled_from([1.0, 1e4]),
        "causal": st.booleans(),
        "beside": st.booleans(),
        "padding": st.sampled_from([0, 0, 2]),
        "protected": st.sampled_from([0, 0, 1, 2]),
    }
    return st.builds(observed, **drawn | {name: st.just(x) for name, x in fixed.items()})


def one_of(seen: Observed, number: int) -> Observed:
    """Returns a batch of one of its caches."""
    part = slice(number, number + 1)
    options = {
        name: x if x is None else x[part]
        for name, x in vars(seen).items()
        if name in ("query", "key", "value", "visible", "available")
    }
    beside = None if seen.beside is None else seen.beside.rearranged(lambda x: x[part])
    return Observed(**options, kernel=seen.kernel, protected=seen.protected, beside=beside)
