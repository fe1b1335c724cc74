"""The peers of the benchmark are given our q, k, v and matrices: where said, outputs agree."""

from functools import partial

import pytest
import torch

from benchmarks.peers import DENSE, PEERS, Given, Pair, built, compare, difference, page

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
    else:
        assert difference(pair, ours, peer) > 1e-3  # said not to be the same


@torch.inference_mode()
def test_performers_peer_agrees_without_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    from performer_pytorch import performer_pytorch

    without = partial(performer_pytorch.softmax_kernel, eps=0.0)
    monkeypatch.setattr(performer_pytorch, "softmax_kernel", without)
    pair = built("Performer", 256)
    assert difference(pair, pair.ours(), pair.peer()) < 1e-4


@torch.inference_mode()
def test_a_pair_gives_the_same_at_every_call() -> None:
    for method in ("Longformer", "Linformer"):
        peer = built(method, 256).peer
        torch.testing.assert_close(peer(), peer())


def test_a_projection_that_is_given_costs_nothing_but_where_it_is_written_into() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    assert Given(x)(x).data_ptr() == x.data_ptr()
    copied = Given(x, copied=True)(x)
    assert copied.data_ptr() != x.data_ptr() and torch.equal(copied, x)


@torch.inference_mode()
def test_both_sides_start_and_end_with_hidden_states_where_the_peer_does() -> None:
    for method in ("Longformer", "Linformer", "Nyströmformer"):
        pair = built(method, 256)
        assert pair.ours().shape == pair.peer().shape == (1, 256, 512)


def test_a_row_stands_beside_fused_dense_attention_too() -> None:
    row = compare("dense attention, eager", 0.0, 64)
    assert row["beside"][DENSE]["rounds"] == 3 and len(row["peak_mib"]) == 2
    record = {"command": "c", "date": "d", "source": "s", "inputs": "i", "not_installed": ["x"]}
    record |= {"run_on": {"hardware": "h", "threads": 1, "versions": {}}, "rows": [row]}
    text = page(record)
    assert "undecided" in text and "ours / fused dense" in text and "Not installed: x." in text


def test_difference_is_relative_and_leaves_the_margin_out() -> None:
    peer = torch.full((2, 5, 3), 4.0)
    ours = peer.clone()
    ours[0, 0, 0], ours[1, 2, 1] = 100.0, 5.0
    pair = Pair(lambda: ours, lambda: peer, ("", ""), "all", margin=1)
    assert difference(pair, ours, peer) == 0.25
