"""Peers get our q, k, v and matrices, and outputs agree where the benchmark says so."""

import pytest
import torch

from benchmarks.peers import PEERS, Given, Pair, built, difference

# Six steps of the pseudo-inverse's iteration leave what they start from visible.
TOLERANCES = {"Nyströmformer": 3e-2}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("method", PEERS)
@torch.inference_mode()
def test_ours_and_the_peers_outputs_agree_where_said(method: str) -> None:
    pair = built(method, 256)
    ours, peer = pair.ours(), pair.peer()
    assert ours.shape == peer.shape and peer.std() > 0.01
    if pair.same:
        assert difference(pair, ours, peer) < TOLERANCES.get(method, 1e-5)
        torch.testing.assert_close(pair.peer(), peer)  # which wrote into none of its inputs
    else:
        assert difference(pair, ours, peer) > 1e-3  # said not to be the same


def test_a_projection_that_is_given_costs_nothing_but_where_it_is_written_into() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    assert Given(x)(x).data_ptr() == x.data_ptr()
    copied = Given(x, copied=True)(x)
    assert copied.data_ptr() != x.data_ptr() and torch.equal(copied, x)


def test_difference_is_relative_and_leaves_the_margin_out() -> None:
    peer = torch.full((2, 5, 3), 4.0)
    ours = peer.clone()
    ours[0, 0, 0], ours[1, 2, 1] = 100.0, 5.0
    pair = Pair(lambda: ours, lambda: peer, ("", ""), "all", margin=1)
    assert difference(pair, ours, peer) == 0.25
