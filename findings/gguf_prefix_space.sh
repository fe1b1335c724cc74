#!/usr/bin/env bash
# One would guess that transformers obeys tokenizer.ggml.add_space_prefix of a GGUF file, since it reads the key.
# It reads the key and does not use it: a SentencePiece vocabulary always gets a blank before the text.
# Where a file says false, a prompt begins with another token than in llama.cpp (b11549 was asked: 264 for true, 263 for false).
# transformers 5.23.0 with gguf 0.19.0. 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 gguf==0.19.0 sentencepiece==0.2.1 numpy==2.4.6
venv/bin/python -I - <<'PYTHON'
import sys

import gguf
import numpy
import transformers
from transformers import AutoTokenizer

letters = ["\u2581", "h", "i", "\u2581h", "hi", "\u2581hi"]
tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
kinds = [2, 3, 3, *[6] * 256, *[1] * len(letters)]  # unknown, control, byte, normal


def first_tokens(flag):
    """The token numbers of "hi" by a file with this flag."""
    writer = gguf.GGUFWriter(f"{flag}.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -2.0, -0.5])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(flag)
    writer.add_tensor("token_embd.weight", numpy.zeros((len(tokens), 32), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(".", gguf_file=f"{flag}.gguf")("hi", add_special_tokens=False)["input_ids"]


print("transformers", transformers.__version__, "gguf 0.19.0")
print("guess: 'hi' is the piece with a blank (264) where the flag is true, the piece 'hi' (263) where it is false")
pieces = {flag: first_tokens(flag) for flag in (True, False)}
for flag, numbers in pieces.items():
    print(f"seen:  {flag}: {numbers}")
if pieces != {True: [264], False: [264]}:
    sys.exit("changed: add_space_prefix is obeyed")
PYTHON
