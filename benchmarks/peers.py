"""Compares ours with the public implementation of each method: time, memory, and outputs.

    python -m benchmarks.peers                # at most ten minutes
    python -m benchmarks.peers --seconds 5    # at most 5 seconds a method, but three rounds

The attention core alone, forward, on the same Gaussian q, k and v (8 heads of 64, L = 2048, fp32);
a peer's own projections are disabled, and its random matrices are ours. Both start from the same
tensors and end with the same. If a peer takes and returns (1, L, width) and splits the heads
itself, ours does so too within its time; if a peer overwrites its queries, both copy them.
PyTorch's fused dense attention is timed in every round too: a method that is faster than its peer
need not be faster than computing all pairs. Needs requirements-dev.txt; a peer that is not
installed is left out and named. Writes results/benchmarks/peers.json and .md, or with --only just
prints.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from benchmarks.memory import tensor_peak
from benchmarks.record import HOW, finish, header, markdown, options, setting
from benchmarks.rounds import cells, in_rounds, ratio, seconds
from benchmarks.survey import EagerAttention
from value_aware_attention.approximations import (
    LSH,
    Exact,
    Linformer,
    Longformer,
    Nystrom,
    OrthogonalRandomFeatures,
    SlidingWindow,
)
from value_aware_attention.models.mixing import FourierMixing

LENGTH, HEADS, HEAD_DIM = 2048, 8, 64
WIDTH = HEADS * HEAD_DIM
SECONDS = 60.0
DENSE = "fused dense attention"
Work = Callable[[], Tensor]


@dataclass(frozen=True)
class Pair:
    """Holds two sides that both return (1, heads, L, head_dim), or both (1, L, width)."""

    ours: Work
    peer: Work
    settings: tuple[str, str]
    """Calls of ours and of the peer, with every argument that matters."""
    compared: str
    """Outputs to compare, or the reason why the two compute different things."""
    same: bool = True
    margin: int = 0
    """Number of queries at either end that the difference leaves out."""


class Given(nn.Module):
    """Replaces a projection: returns a given output at no cost.

    A peer of shorter inputs gets the first rows. `copied` is for a peer that writes into its
    input; the other side then copies as much.
    """

    def __init__(self, output: Tensor, *, copied: bool = False) -> None:
        super().__init__()
        self.output, self.copied = output, copied

    def forward(self, x: Tensor) -> Tensor:
        rows = self.output[: len(x)]
        return rows.clone() if self.copied else rows


def inputs(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Draws (1, heads, L, head_dim): PyTorch's fused CPU kernel takes no fewer dimensions."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, length, HEAD_DIM, generator=generator).unbind()
    return query, key, value


def merged(x: Tensor) -> Tensor:
    """Merges heads: (1, heads, L, head_dim) -> (1, L, width)."""
    return x.transpose(1, 2).flatten(-2)


def split(x: Tensor) -> Tensor:
    """Splits heads: (1, L, width) -> (1, heads, L, head_dim)."""
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def from_hidden(
    method: Callable[..., Tensor], *hidden: Tensor, query_copied: bool = False
) -> Tensor:
    """Calls a method from and to (1, L, width), with heads split and merged."""
    query, *rest = hidden
    heads = [split(x) for x in (query.clone() if query_copied else query, *rest)]
    return merged(method(*heads))


def dense(length: int) -> Pair:
    q, k, v = inputs(length)
    return Pair(
        partial(Exact(), q, k, v),
        partial(scaled_dot_product_attention, q, k, v),
        ("Exact()", "torch scaled_dot_product_attention"),
        "all",
    )


def eager(length: int) -> Pair:
    q, k, v = inputs(length)
    return Pair(
        partial(Exact(), q, k, v),
        partial(EagerAttention(), q, k, v),
        ("Exact()", "softmax(QK'/sqrt(d))V with all weights held"),
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
    q, k, v = (merged(x) for x in inputs(length))
    for name, hidden in (("query", q), ("key", k), ("value", v)):
        for projection in (name, f"{name}_global"):  # these have the length first
            standing = Given(hidden.transpose(0, 1), copied=name == "query")
            setattr(peer, projection, standing)
    everywhere = torch.arange(length)[None] == 0
    options = {
        "attention_mask": torch.where(everywhere, 10000.0, 0.0),
        "is_index_masked": torch.zeros(1, length, dtype=torch.bool),
        "is_index_global_attn": everywhere,
        "is_global_attn": True,
    }
    return Pair(
        partial(from_hidden, Longformer(129, 1, (0,)), q, k, v, query_copied=True),
        lambda: peer(q, **options)[0],
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
    q, k, v = (merged(x) for x in inputs(length))
    for name, hidden in (("to_q", q), ("to_k", k), ("to_v", v)):
        setattr(peer, name, Given(hidden))
    peer.to_out = nn.Identity()
    key, value = ours.projections(length)
    peer.proj_k, peer.proj_v = (nn.Parameter(x.T.contiguous()) for x in (key, value))
    return Pair(
        partial(from_hidden, ours, q, k, v),
        lambda: peer(q),
        (
            f"Linformer(rank={rank}, length={length})",
            f"LinformerSelfAttention(dim={WIDTH}, seq_len={length}, k={rank}, heads={HEADS})",
        ),
        "all",
    )


def nystrom(length: int) -> Pair:
    from nystrom_attention import NystromAttention

    settings = {"heads": HEADS, "num_landmarks": 64, "pinv_iterations": 6, "residual": False}
    ours = Nystrom(64, iterations=6)
    peer = NystromAttention(WIDTH, HEAD_DIM, **settings).eval()
    q, k, v = (merged(x) for x in inputs(length))
    peer.to_qkv, peer.to_out = nn.Identity(), nn.Identity()
    hidden = torch.cat([q, k, v], dim=-1)
    return Pair(
        lambda: from_hidden(ours, *hidden.chunk(3, dim=-1)),
        lambda: peer(hidden),
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
    "dense attention, eager": ("torch", eager),
    "sliding window": ("local-attention", local_attention),
    "Longformer": ("transformers", longformer),
    "Linformer": ("linformer", linformer),
    "Nyströmformer": ("nystrom-attention", nystrom),
    "Performer": ("performer-pytorch", performer),
    "Reformer": ("reformer-pytorch", reformer),
    "FNet": ("transformers", fourier),
}


def main() -> None:
    parser = options(__doc__, SECONDS)
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="METHOD", help=", ".join(PEERS))
    arguments = parser.parse_args()
    rows, missing = [], []
    for method in tqdm(arguments.only or PEERS):
        try:
            rows.append(compare(method, 0.0 if arguments.quick else arguments.seconds))
        except ImportError as error:
            missing.append(f"{PEERS[method][0]} ({error})")
    record = header("peers") | {
        "inputs": f"Gaussian q, k, v; {HEADS} heads of {HEAD_DIM}, L = {LENGTH}, fp32, forward",
        "rows": rows,
        "not_installed": missing,
    }
    finish("peers", record, page(record), keep=not (arguments.only or arguments.quick))


def built(method: str, length: int = LENGTH) -> Pair:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the peers' own imports
        return PEERS[method][1](length)


@torch.inference_mode()
def compare(method: str, limit: float, length: int = LENGTH) -> dict[str, Any]:
    """Times both sides in rounds with fused dense attention; measures the memory of each."""
    pair = built(method, length)
    fused = partial(scaled_dot_product_attention, *inputs(length))
    works = {"ours": pair.ours, "peer": pair.peer, DENSE: fused}
    apart = difference(pair, pair.ours(), pair.peer()) if pair.same else None
    clocks = {name: partial(seconds, work) for name, work in works.items()}
    spent = in_rounds(clocks, [("ours", "peer"), ("ours", DENSE)], limit)
    return {
        "method": method,
        "peer": PEERS[method][0],
        "settings": pair.settings,
        "milliseconds": {name: round(1000 * median(spent[name]), 3) for name in works},
        "beside": {name: asdict(ratio(spent, "ours", name)) for name in ("peer", DENSE)},
        "peak_mib": [round(tensor_peak(work, "cpu"), 2) for work in (pair.ours, pair.peer)],
        "compared": pair.compared,
        "largest_difference": apart,
    }


def difference(pair: Pair, ours: Tensor, peer: Tensor) -> float:
    """Computes max |ours - peer| over the largest |peer|."""
    rows = slice(pair.margin, ours.shape[-2] - pair.margin)
    ours, peer = ours[..., rows, :], peer[..., rows, :]
    return float((ours - peer).abs().max() / peer.abs().max())


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    headers = ["method", "peer", "ours, ms", "peer, ms", "ours / peer", "verdict"]
    headers += ["ours / fused dense", "verdict", "rounds", "ours, MiB", "peer, MiB", "difference"]
    table = markdown(headers, [_cells(row) for row in record["rows"]], names=2)
    missing = ", ".join(record["not_installed"])
    return (
        "# Ours beside the public implementations\n\n"
        f"{record['inputs']}. {setting(record)} {HOW} Both sides take and give the same tensors, "
        "heads split and merged within the time of both or of neither. Fused dense: "
        "PyTorch's scaled_dot_product_attention on the same q, k and v, heads split. Memory: the "
        "most that tensors hold at once in one call, above its inputs. Difference: largest, over "
        f"the largest output.\n\n{table}\n\nWhat was run:\n\n"
        + "".join(f"- {_settings(row)}.\n" for row in record["rows"])
        + (f"\nNot installed: {missing}.\n" if missing else "")
    )


def _cells(row: dict[str, Any]) -> list[str]:
    apart = row["largest_difference"]
    return [
        row["method"], row["peer"],
        *(f"{row['milliseconds'][side]:.1f}" for side in ("ours", "peer")),
        *cells(row["beside"]["peer"], row["beside"][DENSE]),
        *(f"{mib:.1f}" for mib in row["peak_mib"]), "–" if apart is None else f"{apart:.1e}",
    ]  # fmt: skip


def _settings(row: dict[str, Any]) -> str:
    same = "compared on" if row["largest_difference"] is not None else "not the same:"
    return f"{row['method']}: {' against '.join(row['settings'])}; {same} {row['compared']}"


if __name__ == "__main__":
    main()
