"""LSH with Reformer's shared queries and keys, against its reference and a public Reformer."""

import importlib
import warnings

import pytest
import torch
from methods import KERNELS
from torch import Tensor

from tests.reference import approximations as reference
from value_aware_attention.approximations import LSH


def draw(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, value = (torch.randn(*shape, generator=generator).double() for _ in range(2))
    return query, value


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("r", "rounds"), [(4, 1), (8, 3), (24, 2)])
def test_against_its_reference(name: str, r: int, rounds: int) -> None:
    """What stands in `key` is not read."""
    length, chunk = 24, r // 2
    query, value = draw(r, length, 5)
    generator = torch.Generator().manual_seed(7)
    rotations = [
        torch.randn(length // chunk, 5, generator=generator).double() for _ in range(rounds)
    ]
    weights = reference.reformer_weights(query, getattr(reference, name), rotations, chunk)
    assert (weights.diagonal() == 0).all()
    method = LSH(r, rounds, seed=7, share_query_key=True)
    output = method(query, torch.full_like(query, 9.0), value, kernel=KERNELS[name])
    torch.testing.assert_close(output, weights @ value)


def test_a_token_that_sees_nothing_else_attends_to_itself() -> None:
    """One visible token among hidden ones has itself; the hidden ones' rows do not matter."""
    query, value = draw(1, 6, 4)
    method = LSH(4, 2, 0, share_query_key=True)
    mask = torch.arange(6)[None] == 2
    output = method(query, query, value, attn_mask=mask)
    torch.testing.assert_close(output[2], value[2])
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
    query, value = (x.float() for x in draw(4, 24, 5))
    torch.manual_seed(0)
    drawn = torch.randn(1, 5, rounds, 3)  # what it draws for 24 / 4 buckets
    torch.manual_seed(0)
    output = peer(query[None], value[None])[0][0]
    rotations = [-drawn[0, :, i].T.double() for i in range(rounds)]  # its hash is [Rx; -Rx]
    weights = reference.reformer_weights(query.double(), reference.exponential, rotations, 4)
    assert torch.allclose(output, (weights @ value.double()).float(), atol=1e-5) == agree
