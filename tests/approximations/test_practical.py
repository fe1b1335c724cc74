"""LSH against its slow reference, and LSH and ORF against the facts they are known by."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import KERNELS, draw

from tests.reference import approximations as reference
from value_aware_attention import attention
from value_aware_attention.approximations import (
    LSH,
    OrthogonalRandomFeatures,
)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("r", "rounds"), [(4, 1), (8, 3), (6, 2)])
def test_lsh_against_its_reference(name: str, r: int, rounds: int) -> None:
    length, chunk = 24, r // 2
    query, key, value = draw(r, length, 5)
    generator = torch.Generator().manual_seed(7)
    buckets = 2 * length // chunk
    rotations = [torch.randn(buckets // 2, 5, generator=generator).double() for _ in range(rounds)]
    weights = reference.lsh_weights(query, key, getattr(reference, name), rotations, chunk)
    output = LSH(r, rounds, seed=7)(query, key, value, kernel=KERNELS[name])
    torch.testing.assert_close(output, weights @ value)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(2, 33), rounds=st.integers(1, 4), seed=st.integers(0, 99))
def test_lsh_with_two_chunks_is_exact_for_any_rounds(length: int, rounds: int, seed: int) -> None:
    query, key, value = draw(seed, length, 4)
    output = LSH(length + length % 2, rounds, seed)(query, key, value)
    torch.testing.assert_close(output, attention(query, key, value))


def test_lsh_sorts_padding_behind_everything_else() -> None:
    """16 tokens and 4 hidden ones in chunks of 4: the hidden ones have the last to themselves."""
    query, key, value = draw(4, 20, 5)
    rotation = torch.randn(5, 5, generator=torch.Generator().manual_seed(7)).double()
    hashes = [torch.cat([-x @ rotation.T, x @ rotation.T], -1).argmax(-1) for x in (query, key)]
    orders = [sorted(range(16), key=lambda i, h=h: (int(h[i]), i)) for h in hashes]
    output = LSH(8, 1, seed=7)(query, key, value, attn_mask=(torch.arange(20) < 16)[None])
    for place, row in enumerate(orders[0]):
        first = max(0, place // 4 * 4 - 4)
        seen = orders[1][first : place // 4 * 4 + 4]
        torch.testing.assert_close(
            output[row], attention(query[row : row + 1], key[seen], value[seen])[0]
        )


def test_the_papers_projection_has_orthonormal_columns_and_performers_orthogonal_rows() -> None:
    paper = OrthogonalRandomFeatures(64, 0, "paper").projection(16)
    torch.testing.assert_close(paper.T @ paper, torch.eye(16), atol=1e-5, rtol=0)
    assert paper.norm(dim=1).mean() == pytest.approx(math.sqrt(16 / 64), rel=0.1)
    performer = OrthogonalRandomFeatures(16, 0).projection(16)
    gram = performer @ performer.T
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-4, rtol=0)
