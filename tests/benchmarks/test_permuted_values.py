"""Permuted values: every query keeps its weights, in another order, and sees nothing hidden."""

import torch

from benchmarks.permuted_values import permuted
from value_aware_attention.call import Call


def test_each_query_keeps_its_weights_among_the_keys_it_sees() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 12, 4, generator=generator) for _ in range(3))
    call = Call.of(query, key, value, is_causal=True)
    mixed = permuted(call)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    assert not mixed.weights[..., ~visible].any()
    torch.testing.assert_close(mixed.weights.sort(dim=-1)[0], call.weights.sort(dim=-1)[0])
    assert not torch.allclose(mixed.weights, call.weights)
    assert mixed.value.equal(call.value)
