#!/usr/bin/env bash
# One would guess that model(next_token, past_key_values=cache) needs no position_ids, as in Llama, where the cache's length tells them.
# In Bamba and MiniMax (attention layers between recurrent ones) the positions then start at 0 again: the token is turned as if it came first.
# generate passes the positions and is right, so a loop written by hand, a probe or a scorer is silently wrong where generate is not.
# transformers 5.23.0 with torch 2.13.0. 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
venv/bin/python -I - 2> messages <<'PYTHON' || { cat messages >&2; exit 1; }
import sys

import torch
import transformers
from transformers import BambaConfig, BambaForCausalLM, LlamaConfig, LlamaForCausalLM, MiniMaxConfig, MiniMaxForCausalLM

sizes = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
recurrent = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
torch.manual_seed(0)
models = {
    "Llama": LlamaForCausalLM(LlamaConfig(**sizes)),
    "Bamba": BambaForCausalLM(BambaConfig(**sizes, **recurrent, attn_layer_indices=[1])),
    "MiniMax": MiniMaxForCausalLM(
        MiniMaxConfig(
            **sizes,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=2,
            num_experts_per_tok=1,
        )
    ),
}
tokens = torch.randint(5, 128, (1, 24))


def error(model, with_positions):
    """How far the last 8 tokens' logits, read one at a time over the cache of 16, are from those of one pass."""
    exact = model(tokens).logits[:, 16:]
    cache, logits = model(tokens[:, :16], use_cache=True).past_key_values, []
    for index in range(16, 24):
        positions = {"position_ids": torch.tensor([[index]])} if with_positions else {}
        logits.append(model(tokens[:, index : index + 1], past_key_values=cache, **positions).logits)
    return ((torch.cat(logits, 1) - exact).abs().max() / exact.abs().max()).item()


with torch.no_grad():
    errors = {(name, explicit): error(model.eval(), explicit) for name, model in models.items() for explicit in (False, True)}

print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: tokens over the cache of 16 have the logits of one pass, with position_ids and without")
for name in models:
    print(f"seen:  {name}: off by {errors[name, False]:.1e} of the largest without position_ids, by {errors[name, True]:.1e} with them")
right = [errors["Llama", False], *(errors[name, True] for name in models)]
if max(right) > 1e-4 or min(errors["Bamba", False], errors["MiniMax", False]) < 0.1:
    sys.exit("changed: Bamba and MiniMax take the positions from the cache")
PYTHON
