"""Compress the cache of a text once, then ask five questions about it.

    python examples/ask_five_questions.py

SmolLM2-135M-Instruct reads a text, and the cache keeps half of its keys. Each question reads a copy
of the kept keys, so that the text is read and compressed once. The script prints the size of the
cache before and after, then each question with its answer. A small model answers some wrongly.
"""

from copy import deepcopy

import torch
from transformers import DynamicCache

from value_aware_attention import caches, hugging_face, probe

TEXT = (
    "The old lighthouse at Cape Morrow was built in 1871. Its keeper, Anna Weiss, had a grey cat "
    "named Pilot. The lamp burned whale oil until 1902, when it was changed to gas. In the storm "
    "of 1911 the ship Aurora ran aground below the cliff, and Anna rowed out and saved nine men. "
    "The town gave her a silver watch, which is now in the museum of Harwick.\n\n"
)
QUESTIONS = ("Who was the keeper?", "When was the lighthouse built?", "What was the cat's name?",
             "Which ship ran aground?", "What did the town give her?")  # fmt: skip

model, tokenizer = probe.loaded("smollm2")
text = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(model.device)
with hugging_face.compressed_cache(model, caches.LeaveOneOut, keep=1 / 2) as report:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text, past_key_values=cache)
    print(report, end="\n\n")
    for question in QUESTIONS:
        asked = tokenizer(f"Question: {question}\nAnswer:", return_tensors="pt")["input_ids"]
        tokens = torch.cat([text, asked.to(model.device)], dim=1)
        output = model.generate(
            tokens, past_key_values=deepcopy(cache), max_new_tokens=12, do_sample=False
        )
        print(question, tokenizer.decode(output[0, tokens.shape[1] :]).strip().split("\n")[0])
