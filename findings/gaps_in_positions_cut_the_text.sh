#!/usr/bin/env bash
# One would guess that position_ids only turn the queries and keys: tokens at positions 0-29 and 40-69 still see those before them.
# With use_cache=False and no mask, each gap is read as the start of another text, and no token sees across it.
# It hurts whoever gives the kept tokens of a shortened prompt their own positions. Gradient checkpointing sets use_cache=False.
# transformers 5.23.0 with torch 2.13.0. 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
venv/bin/python -I - <<'PYTHON'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.3,
)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(5, 128, (1, 60))
positions = torch.cat([torch.arange(30), torch.arange(40, 70)])[None]
with torch.no_grad():
    cached = model(tokens, position_ids=positions, use_cache=True).logits[:, 30:]
    uncached = model(tokens, position_ids=positions, use_cache=False).logits[:, 30:]
    half = model(tokens[:, 30:], position_ids=positions[:, 30:], use_cache=True).logits
scale = cached.abs().max()
change = ((uncached - cached).abs().max() / scale).item()
to_half = ((uncached - half).abs().max() / scale).item()

print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: use_cache does not change the logits of the tokens after the gap")
print(f"seen:  it changes them by {change:.2f} of the largest; without a cache they are those of the second half alone ({to_half:.0e})")
if change < 0.1 or to_half > 1e-4:
    sys.exit("changed: a gap in the positions does not cut the text any more")
PYTHON
