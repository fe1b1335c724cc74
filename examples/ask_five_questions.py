"""Compress the cache of a text once, then ask five questions about it.

    python examples/ask_five_questions.py

SmolLM2-135M-Instruct reads a text, and its cache keeps half of the keys. Each question reads a copy
of the kept keys, so that the text is read and compressed once. The script prints each question with
its answer, then the size of the cache before and after. So small a model answers some wrongly.
"""

from copy import deepcopy

import torch
from transformers import DynamicCache

from value_aware_attention import caches, hugging_face, probe

TEXT = (
    "<|im_start|>user\nThe lighthouse at Cape Morrow was built in 1871. Its keeper was Anna Weiss. "
    "She had a grey cat named Pilot. The lamp burned whale oil. In the storm of 1911 the ship "
    "Aurora sank below the cliff, and Anna saved nine men. The town gave her a silver watch."
)
QUESTIONS = ("Who was the keeper?", "When was the lighthouse built?", "What did the lamp burn?",
             "How many men did Anna save?", "What did the town give Anna?")  # fmt: skip

model, tokenizer = probe.loaded("smollm2")
text = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(model.device)
with hugging_face.compressed_cache(model, caches.LeaveOneOut, keep=1 / 2) as report:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text, past_key_values=cache)
    for question in QUESTIONS:
        asked = f"\n{question}<|im_end|>\n<|im_start|>assistant\n"
        asked = tokenizer(asked, return_tensors="pt")["input_ids"].to(model.device)
        tokens = torch.cat([text, asked], dim=1)
        output = model.generate(tokens, past_key_values=deepcopy(cache), max_new_tokens=16)
        answer = tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)
        print(question, answer.strip())
print(str(report).splitlines()[0])
