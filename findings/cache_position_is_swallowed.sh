#!/usr/bin/env bash
# One would guess that a cache is rewound by cache_position: the tokens at 10 to 19 are written there again, as transformers 4.57.6 does it.
# In 5.23.0 forward takes the argument among its **kwargs and does not read it. The tokens go behind the twenty that the cache holds,
# at positions 20 to 29, and all their logits are others. Nothing is raised and nothing is warned of.
# The same call in 4.57.6 gives the first reading's logits (run on 2026-11-29: difference 0). Cache.crop, or a copy, rewinds in both.
# transformers 5.23.0. 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 "transformers==${TRANSFORMERS:-5.23.0}" numpy==2.4.6
venv/bin/python -I - <<'PYTHON'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100, eos_token_id=None, bos_token_id=None, initializer_range=0.3,
)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(1, 100, (1, 20))
print("transformers", transformers.__version__)
print("guess: read again at cache_position 10 to 19, the last ten tokens have the logits that they had")
with torch.no_grad():
    cache = StaticCache(config=config, max_cache_len=64)
    first = model(tokens, past_key_values=cache, cache_position=torch.arange(20)).logits[:, 10:]
    again = model(tokens[:, 10:], past_key_values=cache, cache_position=torch.arange(10, 20)).logits
difference = ((again - first).abs().max() / first.abs().max()).item()
print(f"seen:  they differ by {difference:.2f} of the largest logit, and the cache holds {int(cache.get_seq_length())} tokens")
if difference < 0.1 or int(cache.get_seq_length()) != 30:
    sys.exit("changed: cache_position is read, or refused")
PYTHON
