"""LSH against slow references and a public Reformer, which shares queries and keys."""

import importlib
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import KERNELS, draw

from tests.reference import approximations as reference
from value_aware_attention import attention
from value_aware_attention.approximations import LSH


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("r", "rounds"), [(4, 1), (8, 3), (6, 2), (24, 2)])
@pytest.mark.parametrize("shared", [False, True])
def test_against_its_reference(name: str, r: int, rounds: int, shared: bool) -> None:
    """With shared queries and keys `key` is not read."""
    length, chunk = 24, r // 2
    query, key, value = draw(r, length, 5)
    generator = torch.Generator().manual_seed(7)
    buckets = length // chunk
    rotations = [torch.randn(buckets, 5, generator=generator).double() for _ in range(rounds)]
    similarity = getattr(reference, name)
    if shared:
        weights = reference.reformer_weights(query, similarity, rotations, chunk)
        assert (weights.diagonal() == 0).all()
    else:
        weights = reference.lsh_weights(query, key, similarity, rotations, chunk)
    output = LSH(r, rounds, 7, share_query_key=shared)(query, key, value, kernel=KERNELS[name])
    torch.testing.assert_close(output, weights @ value)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(2, 33), rounds=st.integers(1, 4), seed=st.integers(0, 99))
def test_lsh_with_two_chunks_is_exact_for_any_rounds(length: int, rounds: int, seed: int) -> None:
    query, key, value = draw(seed, length, 4)
    output = LSH(length + length % 2, rounds, seed)(query, key, value)
    torch.testing.assert_close(output, attention(query, key, value))


def test_lsh_sorts_padding_behind_everything_else() -> None:
    """With 16 tokens and 4 hidden ones in chunks of 4, the hidden ones fill the last chunk."""
    query, key, value = draw(4, 20, 5)
    rotation = torch.randn(5, 5, generator=torch.Generator().manual_seed(7)).double()
    hashes = [torch.cat([-x @ rotation.T, x @ rotation.T], -1).argmax(-1) for x in (query, key)]
    orders = [sorted(range(16), key=lambda i, h=h: (int(h[i]), i)) for h in hashes]
    output = LSH(8, 1, seed=7)(query, key, value, attn_mask=(torch.arange(20) < 16)[None])
    for place, row in enumerate(orders[0]):
        near = orders[1][max(0, place // 4 * 4 - 4) : place // 4 * 4 + 4]
        torch.testing.assert_close(
            output[row], attention(query[row : row + 1], key[near], value[near])[0]
        )


def test_a_token_that_sees_nothing_else_attends_to_itself() -> None:
    """A visible token among hidden ones attends to itself."""
    query, _, value = draw(1, 6, 4)
    method = LSH(4, 2, 0, share_query_key=True)
    mask = torch.arange(6)[None] == 2
    torch.testing.assert_close(method(query, query, value, attn_mask=mask)[2], value[2])
    torch.testing.assert_close(method(query[:1], query[:1], value[:1])[0], value[0])
    assert (method(query, query, value, attn_mask=mask & False) == 0).all()


@pytest.mark.parametrize(("rounds", "agree"), [(1, True), (2, False)])
def test_a_public_reformer_sorts_all_rounds_in_one_list(rounds: int, agree: bool) -> None:
    """LSHAttention(bucket_size, n_hashes) given our rotations: one round agrees, two do not.

    Its second round's first chunk looks back at the first round's last instead of its own.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reformer = importlib.import_module("reformer_pytorch.reformer_pytorch")
        peer = reformer.LSHAttention(bucket_size=4, n_hashes=rounds)
    query, _, value = (x.float() for x in draw(4, 24, 5))
    torch.manual_seed(0)
    drawn = torch.randn(1, 5, rounds, 3)  # what it draws for 24 / 4 buckets
    torch.manual_seed(0)
    output = peer(query[None], value[None])[0][0]
    rotations = [-drawn[0, :, i].T.double() for i in range(rounds)]  # its hash is [Rx; -Rx]
    weights = reference.reformer_weights(query.double(), reference.exponential, rotations, 4)
    assert torch.allclose(output, (weights @ value.double()).float(), atol=1e-5) == agree
