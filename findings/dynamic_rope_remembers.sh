#!/usr/bin/env bash
# One would guess that a model in eval mode gives the same logits for the same tokens whenever it is called.
# With rope_type "dynamic" the frequencies of the longest text so far stay until a text within the trained length comes along.
# Perplexities of long texts then depend on the order of the texts, and a repeated measurement is another measurement.
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
    max_position_embeddings=64,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(5, 128, (1, 200))
with torch.no_grad():
    before = model(tokens[:, :100]).logits
    model(tokens)
    after_longer = model(tokens[:, :100]).logits
    model(tokens[:, :10])
    after_short = model(tokens[:, :100]).logits
scale = before.abs().max()
longer = ((after_longer - before).abs().max() / scale).item()
short = ((after_short - before).abs().max() / scale).item()

print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: 100 tokens have the same logits before and after the model reads 200")
print(f"seen:  they move by {longer:.2f} of the largest, and after 10 tokens were read they are back ({short:.0e})")
if longer < 0.1 or short > 1e-6:
    sys.exit("changed: the logits do not depend on earlier texts any more")
PYTHON
