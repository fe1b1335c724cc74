#!/usr/bin/env bash
# One would guess that position_ids which start again at 0 either keep packed texts apart or do not, whatever the other arguments are.
# They do only where attention_mask is None and use_cache is False. A mask of ones, or the default use_cache=True, joins the texts.
# Losses and hidden states of packed batches then change with arguments that should change nothing, and no warning is given.
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
texts = torch.randint(5, 128, (2, 30))
packed = texts.reshape(1, 60)
positions = torch.arange(30).repeat(2)[None]
ones = torch.ones_like(packed)
calls = {
    "use_cache=False": {"use_cache": False},
    "use_cache=False, a mask of ones": {"use_cache": False, "attention_mask": ones},
    "no other argument": {},
    "a mask of ones": {"attention_mask": ones},
}
with torch.no_grad():
    alone = model(texts[1:]).logits
    errors = {
        name: ((model(packed, position_ids=positions, **call).logits[:, 30:] - alone).abs().max() / alone.abs().max()).item()
        for name, call in calls.items()
    }

print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: the second text's logits are the same in all four calls")
for name, error in errors.items():
    print(f"seen:  {name}: they differ from those of the text alone by {error:.1e} of the largest")
first, *others = errors.values()
if first > 1e-4 or min(others) < 0.1:
    sys.exit("changed: packed texts are treated alike in the four calls")
PYTHON
