"""The tokenizer of a GGUF file cuts text by the rule that the file names."""

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from value_aware_attention.models.checkpoints import load_tokenizer

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")
MERGES = [("Ġ", "Ġ"), ("Ċ", "Ġ"), ("Ġ", "w"), ("Ġw", "a"), ("Ġwa", "s"), ("1", "9"), ("Ġ", "1")]
TOKENS = [*bytes_to_unicode().values(), *map("".join, MERGES)]
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [
    "a  1",
    "x\n 1990 was",
    "a was  b",
    "\r\n1",
    "  1. item",
    "½ ² 1²",
    "it's we'll",
    "中文 19",
]


def write_tokenizer(path: Path, rule: str) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cutting_by(*regexes: str) -> Tokenizer:
    vocabulary = {token: place for place, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    cuts = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_takes_digits_apart_first(text: str, tmp_path: Path) -> None:
    loaded = load_tokenizer(write_tokenizer(tmp_path / "tokenizer.gguf", "smollm"))
    assert (
        loaded(text, add_special_tokens=False).input_ids
        == cutting_by(r"\p{N}", GPT2).encode(text).ids
    )
