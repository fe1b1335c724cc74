#!/usr/bin/env bash
# One would guess that a text's logits do not depend on the other texts of a padded batch.
# With rope_type "longrope" (Phi-3 and later) the longest row chooses short or long factors for every row of the batch.
# A short text next to one token too many is read with the long factors, so scores change with the batch size and the order.
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
from transformers import Phi3Config, Phi3ForCausalLM

torch.manual_seed(0)
config = Phi3Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=512,
    original_max_position_embeddings=64,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    },
)
model = Phi3ForCausalLM(config).eval()
tokens = torch.randint(5, 128, (1, 65))
errors = {}
with torch.no_grad():
    alone = model(tokens[:, :40]).logits
    for length in (64, 65):
        batch = tokens[:, :length].repeat(2, 1)
        mask = torch.ones_like(batch)
        batch[0, 40:], mask[0, 40:] = 0, 0
        together = model(batch, attention_mask=mask).logits[:1, :40]
        errors[length] = ((together - alone).abs().max() / alone.abs().max()).item()

print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: 40 tokens have the same logits next to 64 tokens and next to 65")
for length, error in errors.items():
    print(f"seen:  next to {length} tokens they differ from the text alone by {error:.1e} of the largest")
if errors[64] > 1e-4 or errors[65] < 0.1:
    sys.exit("changed: a longer neighbour does not change a text's logits any more")
PYTHON
