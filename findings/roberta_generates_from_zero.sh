#!/usr/bin/env bash
# One would guess that generate numbers the tokens of a prompt as the model's forward does, which is how the model was trained.
# RoBERTa's forward counts from pad_token_id + 1, so that the first token is at position 2. generate gives every decoder position_ids
# from 0 on: two positions that no training reaches, and then each token two places early. A text learnt by heart is told at the level
# of chance (5 of 20 tokens, with four letters), and no message speaks of it. With position_ids from 2 on all of it is right.
# The same holds for XLM-RoBERTa and CamemBERT, and for generate of 4.57.6 (run on 2026-11-29). BERT counts from 0 and is right.
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
from transformers import (
    BertConfig, BertLMHeadModel, CamembertConfig, CamembertForCausalLM, RobertaConfig, RobertaForCausalLM,
    XLMRobertaConfig, XLMRobertaForCausalLM,
)

torch.set_num_threads(1)
KINDS = {
    "BERT": (BertConfig, BertLMHeadModel, 0),
    "RoBERTa": (RobertaConfig, RobertaForCausalLM, 1),
    "XLM-RoBERTa": (XLMRobertaConfig, XLMRobertaForCausalLM, 1),
    "CamemBERT": (CamembertConfig, CamembertForCausalLM, 1),
}
text = torch.randint(5, 9, (1, 28), generator=torch.Generator().manual_seed(0))  # of four letters


def learnt(config, build, pad):
    """A small decoder that has learnt the text by heart."""
    torch.manual_seed(0)
    model = build(config(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=12, max_position_embeddings=40,
        is_decoder=True, pad_token_id=pad, bos_token_id=2, eos_token_id=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    return model.eval()


def told(model, **more):
    """How many of the 20 tokens after the first 8 generate tells rightly."""
    output = model.generate(text[:, :8], attention_mask=torch.ones(1, 8).long(), max_new_tokens=20, do_sample=False, **more)[0, 8:]
    return sum(a == b for a, b in zip(output.tolist(), text[0, 8:].tolist()))


print("transformers", transformers.__version__, "torch", torch.__version__)
print("guess: generate tells what forward tells, all 20 tokens that follow the first 8 of a text learnt by heart")
results = {}
for name, (config, build, pad) in KINDS.items():
    model = learnt(config, build, pad)
    with torch.no_grad():
        spoken = text[:, :8]
        for _ in range(20):
            spoken = torch.cat((spoken, model(spoken).logits[:, -1:].argmax(-1)), 1)
    by_forward = (spoken == text)[0, 8:].sum().item()
    by_generate = told(model)
    start = 0 if name == "BERT" else pad + 1
    by_positions = told(model, position_ids=torch.arange(start, start + 8)[None])
    results[name] = by_forward, by_generate, by_positions
    print(f"seen:  {name}: forward {by_forward}, generate {by_generate}, generate with position_ids from {start} on {by_positions} of 20 tokens")
if results.pop("BERT") != (20, 20, 20) or any((a, c) != (20, 20) for a, _, c in results.values()):
    sys.exit("changed: a number is not 20 that was")
if any(b > 15 for _, b, _ in results.values()):
    sys.exit("changed: generate numbers the tokens as forward does")
PYTHON
