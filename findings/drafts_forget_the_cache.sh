#!/usr/bin/env bash
# One would guess that prompt lookup and an assistant write greedy decoding's tokens, with a cache of the prompt's beginning as without.
# With such a cache they do not: their first call gives the model the whole prompt, not only the part that the cache lacks. The cached
# tokens are read a second time, behind themselves, and the answer is another one. No message speaks of it.
# Greedy decoding cuts the prompt. So do these two from their second call on, and in 4.57.6 (run on 2026-11-29). They are right again
# if one cuts the prompt oneself and gives the mask in full.
# transformers 5.23.0 with torch 2.13.0. 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 "transformers==${TRANSFORMERS:-5.23.0}" numpy==2.4.6
venv/bin/python -I - 2> messages <<'PYTHON' || { cat messages >&2; exit 1; }
import sys

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=50, eos_token_id=0, bos_token_id=None, pad_token_id=0, initializer_range=0.3,
)
model, assistant = (LlamaForCausalLM(config).eval() for _ in range(2))
prompt = torch.randint(1, 50, (1, 30))
ways = {"greedy": {}, "prompt lookup": {"prompt_lookup_num_tokens": 3}, "an assistant": {"assistant_model": assistant}}


def answer(way, cached, given=0):
    """The new tokens and the length of the cache, where the first `cached` tokens are cached and those from `given` on are given."""
    cache = DynamicCache(config=config)
    if cached:
        model(prompt[:, :cached], past_key_values=cache)
    output = model.generate(
        prompt[:, given:], attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=False,
        max_new_tokens=8, return_dict_in_generate=True, **ways[way],
    )
    return output.sequences[0, 30 - given :].tolist(), int(output.past_key_values.get_seq_length())


print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: a prompt of 30 tokens, of which 0 or 20 are cached, has the same answer in every row, and 37 tokens are cached at its end")
with torch.no_grad():
    text = prompt
    for _ in range(8):  # greedy decoding by the definition
        text = torch.cat((text, model(text, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    seen = {}
    for way in ways:
        for cached, given in ((0, 0), (20, 0), (20, 20)):
            tokens, length = answer(way, cached, given)
            seen[way, cached, given] = sum(a == b for a, b in zip(tokens, text[0, 30:].tolist())), length
for (way, cached, given), (equal, length) in seen.items():
    print(f"seen:  {way}, {cached} cached, {30 - given} given: {equal} of 8 tokens, {length} cached at the end")
wrong = [seen.pop((way, 20, 0)) for way in ("prompt lookup", "an assistant")]
if any(result != (8, 37) for result in seen.values()):
    sys.exit("changed: a row is wrong that was right")
if any(equal > 4 or length < 50 for equal, length in wrong):
    sys.exit("changed: drafts and a cache go together")
PYTHON
