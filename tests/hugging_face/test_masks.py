"""Converted masks of transformers (additive, boolean or none) show and hide the same pairs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.refusals import assert_refused
from value_aware_attention.call import Call
from value_aware_attention.hugging_face.masks import additive_mask, split_mask, trim
from value_aware_attention.kernels import Elu

LOWEST = torch.finfo(torch.float32).min


def tensors(queries: int, keys: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 1, queries, 2), torch.zeros(rows, 1, keys, 2)


def shown(mask: Tensor | None, queries: int, keys: int, is_causal: bool = False) -> Tensor:
    """Returns the pairs that `attn_mask` and `is_causal` show together."""
    query, key = tensors(queries, keys)
    attn_mask, causal = split_mask(mask, query, key, is_causal=is_causal)
    call = Call.of(query, key, key, kernel=Elu(), attn_mask=attn_mask, is_causal=causal)
    seen = call.visible
    return torch.ones(queries, keys, dtype=torch.bool) if seen is None else seen


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 2**20), st.integers(0, 3))
def test_nothing_is_shown_or_hidden_by_the_conversion(
    queries: int, past: int, seed: int, kind: int
) -> None:
    keys = queries + past
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(1, 1, queries, keys, generator=generator) < 0.6
    if kind == 1:  # the same keys for all queries
        visible = visible[..., :1, :].expand(visible.shape)
    if kind == 2:  # causal and padding
        visible = visible[..., -1:, :] & torch.ones(queries, keys, dtype=torch.bool).tril(past)
    if kind == 3:
        visible = torch.ones_like(visible)
    for mask in (visible, torch.where(visible, 0.0, LOWEST), torch.where(visible, 0.0, -torch.inf)):
        assert torch.equal(shown(mask, queries, keys).expand(visible.shape), visible)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (1, 4), (2, 5)])
def test_keys_that_all_queries_share_become_one_row_or_none(queries: int, keys: int) -> None:
    """A method without a mask for every pair can then take them."""
    query, key = tensors(queries, keys)
    padding = torch.arange(keys)[None, None, None] > 0
    for row, expected in ((padding, padding), (torch.ones_like(padding), None)):
        shared = row.expand(1, 1, queries, keys)
        for visible in (row, shared, shared.clone()):
            additive = torch.where(visible, 0.0, LOWEST)
            for mask in (visible, additive, additive[..., :1, :].expand(visible.shape)):
                found, causal = split_mask(mask, query, key, is_causal=True)
                assert not causal and (found is None) == (expected is None)
                assert found is None or torch.equal(found, expected)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (1, 4), (2, 5)])
def test_without_a_mask_causality_is_what_the_layer_says(queries: int, keys: int) -> None:
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    assert torch.equal(shown(None, queries, keys, is_causal=True), causal)
    assert shown(None, queries, keys, is_causal=False).all()


def test_a_bias_is_refused() -> None:
    query, key = tensors(2, 3)
    by_distance = -torch.arange(3.0).expand(1, 1, 2, 3)  # 0 where query and key are one
    for bias in (torch.full((1, 1, 2, 3), -0.5), torch.rand(1, 1, 2, 3), by_distance):
        for mask in (bias, bias[..., :1, :].expand(1, 1, 2, 3)):
            assert_refused(
                "adds a bias to its scores", split_mask, mask, query, key, is_causal=False
            )


def test_a_mask_is_never_left_out_and_padding_shares_its_rows() -> None:
    """Without a mask a decoder that sees everything looks like one that sees its past alone."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    padding = torch.tensor([[True, True, False]])
    for function, expected in (
        (bidirectional_mask_function, torch.ones(3, 3)),
        (causal_mask_function, torch.ones(3, 3).tril()),
    ):
        for hidden in (None, padding):
            mask = additive_mask(
                batch_size=1,
                q_length=3,
                kv_length=3,
                mask_function=function,
                attention_mask=hidden,
                allow_is_bidirectional_skip=True,
                allow_is_causal_skip=True,
                dtype=torch.bfloat16,
            )
            seen = expected.bool() if hidden is None else expected.bool() & hidden
            assert mask.dtype == torch.bfloat16
            assert torch.equal(mask[0, 0] == 0, seen)
            assert (mask[0, 0][~seen] == torch.finfo(torch.bfloat16).min).all()
            assert (mask.stride(-2) == 0) == (function is bidirectional_mask_function)


def test_the_unseen_end_of_a_static_cache_is_cut_and_nothing_else() -> None:
    key = torch.arange(6.0).view(1, 1, 6, 1)
    mask = torch.tensor([[[[0, 0, LOWEST, 0, LOWEST, LOWEST]]]])
    cut, value, short = trim(key, 2 * key, mask, queries=1)
    assert cut.flatten().tolist() == [0, 1, 2, 3] and torch.equal(value, 2 * cut)
    assert torch.equal(short, mask[..., :4])
    for queries, length in ((6, 6), (5, 5)):  # never fewer keys than queries
        cut, _, short = trim(key, key, mask.expand(1, 1, queries, 6), queries)
        assert cut.shape[2] == short.shape[-1] == length
    assert trim(key, key, torch.zeros(1, 1, 6, 9), queries=6)[2].shape == (1, 1, 6, 6)
    assert trim(key, key, None, queries=1)[0] is key
