#!/usr/bin/env bash
# One would guess that several tokens read over a cache give what one pass gives, as they do for Llama, Mamba 2 and Falcon-H1.
# In Mamba and Jamba they do only one at a time: for several at once the recurrent state starts at zero, though the cache holds it.
# The second turn of a conversation, a prompt read in chunks, or a score of a continuation over a cached prompt is silently wrong.
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
from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM

sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "initializer_range": 0.3, "pad_token_id": 0}
torch.manual_seed(0)
models = {
    "Mamba": MambaForCausalLM(MambaConfig(**sizes, state_size=8)),
    "Jamba": JambaForCausalLM(
        JambaConfig(
            **sizes,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_layer_period=4,
            attn_layer_offset=3,
            num_experts=1,
            num_experts_per_tok=1,
            mamba_d_state=8,
        )
    ),
}
arguments = {"Mamba": "cache_params", "Jamba": "past_key_values"}
tokens = torch.randint(5, 128, (1, 33))


def error(model, argument, lengths):
    """How far the logits are from one pass, where the tokens are read in calls of these lengths."""
    exact = model(tokens).logits
    cache, start, logits = None, 0, []
    for length in lengths:
        output = model(tokens[:, start : start + length], use_cache=True, **{argument: cache})
        cache, start = output[argument], start + length
        logits.append(output.logits)
    return ((torch.cat(logits, 1) - exact).abs().max() / exact.abs().max()).item()


print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: 20 tokens and then 13 over their cache give the logits of one pass")
changed = False
with torch.no_grad():
    for name, model in models.items():
        model.eval()
        single, several = (error(model, arguments[name], lengths) for lengths in ([20] + [1] * 13, [20, 13]))
        print(f"seen:  {name}: 13 calls of one token are off by {single:.1e} of the largest, one call of 13 by {several:.2f}")
        changed |= single > 1e-3 or several < 0.1
    jamba, choice = models["Jamba"], {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    afresh = jamba.generate(tokens, **choice)[0, 33:]
    first = jamba.generate(tokens[:, :20], max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    second = jamba.generate(tokens, past_key_values=first.past_key_values, **choice)[0, 33:]
equal = (afresh == second).sum().item()
print(f"seen:  Jamba: the second turn of generate over the first's cache has {equal} of 8 tokens of a fresh one")
if changed:
    sys.exit("changed: several tokens over a cache give what one pass gives")
PYTHON
