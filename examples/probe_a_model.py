"""How many keys does each layer of a model need on a text?

    python examples/probe_a_model.py [MODEL [TEXT_FILE]]

MODEL is a folder, a GGUF file, a name such as smollm2, or a name on the Hugging Face hub. Without
arguments it is the packaged encoder on README.md. The script prints the keys that each layer needs
for an output error of 5%, chosen by weight and for the output, then the finding in one sentence.
"""

import sys

from value_aware_attention import probe
from value_aware_attention.texts import read_texts

name, file = (sys.argv[1:] + ["minilm", "README.md"][len(sys.argv) - 1 :])[:2]
model, tokenizer = probe.loaded(name)
report = probe.probe(
    model, tokenizer, read_texts(file), windows=4, length=64, sizes=[1, 4], search="fast", name=name
)
for layer in range(report.record.attention[0].output_error.layers):
    print(f"layer {layer}: {report.keys_needed(share=0.05, layer=layer)}")
print(report.headline)
