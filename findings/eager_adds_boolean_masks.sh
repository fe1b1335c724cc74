#!/usr/bin/env bash
# One would guess that a four-dimensional boolean mask, True where a query may look, means the same in every attention implementation.
# With "sdpa" it hides the rest. With "eager" it is added to the scores as 1 and 0, so that nothing is hidden, the future included.
# Attention weights can only be read with "eager", so that what is inspected is not what the model was run with.
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
tokens = torch.randint(5, 128, (1, 40))
visible = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
errors = {}
with torch.no_grad():
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        plain = model(tokens).logits
        masked = model(tokens, attention_mask=visible).logits
        errors[implementation] = ((masked - plain).abs().max() / plain.abs().max()).item()
    weights = model(tokens, attention_mask=visible, output_attentions=True).attentions[0]
future = weights.masked_fill(visible, 0).sum(-1)[..., 0].mean().item()

print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: the causal mask as booleans changes nothing")
for implementation, error in errors.items():
    print(f"seen:  {implementation}: it changes the logits by {error:.1e} of the largest")
print(f"seen:  eager: the first query gives {future:.2f} of its attention to later tokens")
if errors["sdpa"] > 1e-4 or errors["eager"] < 0.1 or future < 0.1:
    sys.exit("changed: eager attention and sdpa agree on boolean masks")
PYTHON
