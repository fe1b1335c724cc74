#!/usr/bin/env bash
# One would guess that a BlockMask built from block indices selects the same keys whether flex_attention is compiled or not.
# Without torch.compile the block indices are not read at all: only mask_mod is, and from_kv_blocks takes one that hides nothing.
# A block-sparse method that is tried uncompiled, on a CPU for instance, then is dense attention and looks perfect. Its warning tells of speed alone.
# torch 2.13.0, CPU. 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
venv/bin/python -I - <<'PYTHON'
import sys
import warnings

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

warnings.simplefilter("ignore")
torch.manual_seed(0)
query, key, value = (torch.randn(1, 1, 256, 32) for _ in range(3))
# Two blocks of 128 queries: each may see the one block of keys at its own place.
counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
indices = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
blocks = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128)

output = flex_attention(query, key, value, block_mask=blocks)
place = torch.arange(256) // 128
sparse = scaled_dot_product_attention(query, key, value, attn_mask=place[:, None] == place)
dense = scaled_dot_product_attention(query, key, value)
to_sparse = (output - sparse).abs().max().item()
to_dense = (output - dense).abs().max().item()

print("torch", torch.__version__)
print("blocks that the mask selects:", blocks.to_dense()[0, 0].tolist())
print("guess: the output is that of the two diagonal blocks")
print(f"seen:  it differs from them by {to_sparse:.2f}, and from dense attention by {to_dense:.0e}")
if to_sparse < 0.1 or to_dense > 1e-5:
    sys.exit("changed: the block indices are read without torch.compile")
PYTHON
