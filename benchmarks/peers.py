"""Ours beside the public implementation of each method: time, memory, and how far apart they are.

    python -m benchmarks.peers            # about two minutes on two cores

The attention core alone, forward, on the same Gaussian q, k and v (8 heads of 64, L = 2048, fp32);
where a peer has projections of its own, they are put out of action, and random matrices are ours.
Needs requirements-dev.txt; a peer that is not installed is left out and named. Writes
results/benchmarks/peers.json and .md, or with --only just prints.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks import peers  # by the name that other processes import it under
from pipelines.provenance import run_on
from value_aware_attention.approximations import (
    LSH,
    Exact,
    Linformer,
    Longformer,
    Nystrom,
    OrthogonalRandomFeatures,
    SlidingWindow,
)
from value_aware_attention.benchmarking.process import import_once, in_fresh_process, resident_peak
from value_aware_attention.models.mixing import FourierMixing

LENGTH, HEADS, HEAD_DIM = 2048, 8, 64
WIDTH = HEADS * HEAD_DIM
ROUNDS = 15
FOLDER = Path("results/benchmarks")
Work = Callable[[], Tensor]


@dataclass(frozen=True)
class Pair:
    """One comparison; both return (1, heads, L, head_dim), or hidden states for a mixing."""

    ours: Work
    peer: Work
    settings: tuple[str, str]
    """Ours and the peer's, with every argument that matters."""
    compared: str
    """On what the largest difference is taken, or why they do not compute the same."""
    same: bool = True
    margin: int = 0
    """Queries left out of it at either end."""


class Given(nn.Module):
    """Stands in for a projection: returns a copy of what it was given, as a projection would.

    A peer may write into it. For a peer with a length of its own in front, its first rows.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.output[: len(x)].clone()


def inputs(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """(1, heads, L, head_dim): PyTorch's fused CPU kernel takes no fewer dimensions."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, length, HEAD_DIM, generator=generator).unbind()
    return query, key, value


def merged(x: Tensor) -> Tensor:
    """(1, heads, L, head_dim) -> (1, L, width)."""
    return x.transpose(1, 2).flatten(-2)


def split(x: Tensor) -> Tensor:
    """(1, L, width) -> (1, heads, L, head_dim)."""
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def dense(length: int) -> Pair:
    q, k, v = inputs(length)
    return Pair(
        partial(Exact(), q, k, v),
        partial(nn.functional.scaled_dot_product_attention, q, k, v),
        ("Exact()", "torch scaled_dot_product_attention"),
        "all",
    )


def local_attention(length: int) -> Pair:
    from local_attention import LocalAttention

    peer = LocalAttention(
        64, look_forward=1, exact_windowsize=True, use_rotary_pos_emb=False, autopad=True
    )
    q, k, v = inputs(length)
    arguments = "window_size=64, look_forward=1, exact_windowsize=True, use_rotary_pos_emb=False"
    return Pair(
        partial(SlidingWindow(129), q, k, v),
        partial(peer, q, k, v),
        ("SlidingWindow(129)", f"LocalAttention({arguments})"),
        "queries 64 or more from the ends, where our window is shifted inwards",
        margin=64,
    )


def longformer(length: int) -> Pair:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[128], num_hidden_layers=1
    )
    peer = LongformerSelfAttention(config, 0).eval()
    q, k, v = inputs(length)
    for name, given in (("query", q), ("key", k), ("value", v)):
        for projection in (name, f"{name}_global"):
            setattr(peer, projection, Given(merged(given).transpose(0, 1)))  # length first
    everywhere = torch.arange(length)[None] == 0
    options = {
        "attention_mask": torch.where(everywhere, 10000.0, 0.0),
        "is_index_masked": torch.zeros(1, length, dtype=torch.bool),
        "is_index_global_attn": everywhere,
        "is_global_attn": True,
    }
    hidden = merged(q)
    return Pair(
        partial(Longformer(129, 1, (0,)), q, k, v),
        lambda: split(peer(hidden, **options)[0]),
        (
            "Longformer(window=129, dilation=1, global_positions=(0,))",
            "transformers LongformerSelfAttention(attention_window=128), one global token",
        ),
        "all",
    )


def linformer(length: int) -> Pair:
    from linformer import LinformerSelfAttention

    rank = min(256, length)
    ours = Linformer(rank, seed=0, length=length).eval()
    peer = LinformerSelfAttention(WIDTH, length, k=rank, heads=HEADS).eval()
    q, k, v = inputs(length)
    for name, given in (("to_q", q), ("to_k", k), ("to_v", v)):
        setattr(peer, name, Given(merged(given)))
    peer.to_out = nn.Identity()
    key, value = ours.projections(length)
    peer.proj_k, peer.proj_v = (nn.Parameter(x.T.contiguous()) for x in (key, value))
    hidden = merged(q)
    return Pair(
        partial(ours, q, k, v),
        lambda: split(peer(hidden)),
        (
            f"Linformer(rank={rank}, length={length})",
            f"LinformerSelfAttention(dim={WIDTH}, seq_len={length}, k={rank}, heads={HEADS})",
        ),
        "all",
    )


def nystrom(length: int) -> Pair:
    from nystrom_attention import NystromAttention

    settings = {"heads": HEADS, "num_landmarks": 64, "pinv_iterations": 6, "residual": False}
    peer = NystromAttention(WIDTH, HEAD_DIM, **settings).eval()
    q, k, v = inputs(length)
    peer.to_qkv, peer.to_out = nn.Identity(), nn.Identity()
    hidden = torch.cat([merged(x) for x in (q, k, v)], dim=-1)
    return Pair(
        partial(Nystrom(64, iterations=6), q, k, v),
        lambda: split(peer(hidden)),
        (
            "Nystrom(landmarks=64, iterations=6)",
            "NystromAttention(num_landmarks=64, pinv_iterations=6, residual=False)",
        ),
        "all; the peer starts its iteration from the largest norms of all heads",
    )


def performer(length: int) -> Pair:
    from performer_pytorch import FastAttention

    ours = OrthogonalRandomFeatures(256, seed=0)
    peer = FastAttention(HEAD_DIM, nb_features=256).eval()
    peer.projection_matrix.copy_(ours.projection(HEAD_DIM))
    q, k, v = inputs(length)
    return Pair(
        partial(ours, q, k, v),
        partial(peer, q, k, v),
        ("OrthogonalRandomFeatures(256)", "FastAttention(dim_heads=64, nb_features=256)"),
        "the peer adds 1e-4 to every feature, more than most of them are",
        same=False,
    )


def reformer(length: int) -> Pair:
    from reformer_pytorch import LSHAttention

    peer = LSHAttention(bucket_size=64, n_hashes=8, causal=False).eval()
    q, _, v = inputs(length)
    return Pair(
        partial(LSH(128, 8, seed=0, share_query_key=True), q, q, v),
        lambda: peer(q[0], v[0])[0][None],
        (
            "LSH(128, rounds=8, share_query_key=True)",
            "LSHAttention(bucket_size=64, n_hashes=8)",
        ),
        "the peer draws its own rotations and sorts all rounds in one list",
        same=False,
    )


def fourier(length: int) -> Pair:
    from transformers import FNetConfig
    from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

    peer = FNetBasicFourierTransform(FNetConfig(hidden_size=WIDTH))
    hidden = merged(inputs(length)[0])
    return Pair(
        partial(FourierMixing(), hidden),
        lambda: peer(hidden)[0],
        ("FourierMixing()", f"transformers FNetBasicFourierTransform, width {WIDTH}"),
        "all",
    )


PEERS: dict[str, tuple[str, Callable[[int], Pair]]] = {
    "dense attention": ("torch", dense),
    "sliding window": ("local-attention", local_attention),
    "Longformer": ("transformers", longformer),
    "Linformer": ("linformer", linformer),
    "Nyströmformer": ("nystrom-attention", nystrom),
    "Performer": ("performer-pytorch", performer),
    "Reformer": ("reformer-pytorch", reformer),
    "FNet": ("transformers", fourier),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="METHOD", help=", ".join(PEERS))
    only = parser.parse_args().only
    import_once([peers.__name__])
    rows, missing = [], []
    for method in tqdm(only or PEERS):
        try:
            rows.append(compare(method))
        except ImportError as error:
            missing.append(f"{PEERS[method][0]} ({error})")
    record = {
        "run_on": run_on(),
        "inputs": f"Gaussian q, k, v; {HEADS} heads of {HEAD_DIM}, L = {LENGTH}, fp32, forward",
        "rounds": ROUNDS,
        "rows": rows,
        "not_installed": missing,
    }
    print(page(record))
    if only:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "peers.json").write_text(json.dumps(record, indent=1) + "\n")
    (FOLDER / "peers.md").write_text(page(record))


def built(method: str, length: int = LENGTH) -> Pair:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers' own imports
        return PEERS[method][1](length)


@torch.inference_mode()
def compare(method: str) -> dict[str, Any]:
    """Times in turn, after two calls that are not counted; memory of each in a fresh process."""
    pair = built(method)
    ours, peer, ratios = [], [], []
    outputs = [pair.ours(), pair.peer()]
    pair.ours(), pair.peer()
    for turn in range(ROUNDS):
        order = (pair.ours, pair.peer) if turn % 2 else (pair.peer, pair.ours)
        spent = [seconds(work) for work in order]
        first, second = spent if turn % 2 else reversed(spent)
        ours.append(first), peer.append(second), ratios.append(first / second)
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    memory = [in_fresh_process(peers.memory_of, method, side) for side in ("ours", "peer")]
    return {
        "method": method,
        "peer": PEERS[method][0],
        "settings": pair.settings,
        "milliseconds": [round(1000 * median(x), 3) for x in (ours, peer)],
        "ratio": [round(x, 3) for x in (low, median(ratios), high)],
        "peak_mib": [round(x, 2) for x in memory],
        "compared": pair.compared,
        "largest_difference": difference(pair, *outputs) if pair.same else None,
    }


def seconds(work: Work) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def difference(pair: Pair, ours: Tensor, peer: Tensor) -> float:
    """max |ours - peer| over the largest |peer|."""
    rows = slice(pair.margin, ours.shape[-2] - pair.margin)
    ours, peer = ours[..., rows, :], peer[..., rows, :]
    return float((ours - peer).abs().max() / peer.abs().max())


@torch.inference_mode()
def memory_of(method: str, side: str) -> float:
    """Peak MiB of one call, above what the process held after a short one."""
    getattr(built(method, 256), side)()
    return resident_peak(getattr(built(method), side))


def page(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    on = record["run_on"]
    lines = [
        "# Ours beside the public implementations",
        "",
        f"{record['inputs']}. {on['hardware']}, {on['threads']} threads; versions: "
        f"{json.dumps(on['versions'])}. Time: median of {record['rounds']} rounds in turn; the "
        "ratio's quartiles in brackets, under 1 = ours is faster. Memory: peak of one call in a "
        "fresh process above its inputs. Difference: largest, over the largest output.",
        "",
        "| method | peer | ours, ms | peer, ms | ours / peer | ours, MiB | peer, MiB "
        "| difference |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        low, middle, high = row["ratio"]
        apart = row["largest_difference"]
        lines.append(
            f"| {row['method']} | {row['peer']} | {row['milliseconds'][0]:.1f} "
            f"| {row['milliseconds'][1]:.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) "
            f"| {row['peak_mib'][0]:.1f} | {row['peak_mib'][1]:.1f} "
            f"| {'–' if apart is None else f'{apart:.1e}'} |"
        )
    lines += ["", "What was run:", ""]
    for row in record["rows"]:
        same = row["largest_difference"] is not None
        on_what = f"; {'compared on' if same else 'not the same:'} {row['compared']}"
        lines.append(f"- {row['method']}: {' against '.join(row['settings'])}{on_what}.")
    if record["not_installed"]:
        lines += ["", f"Not installed: {', '.join(record['not_installed'])}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
