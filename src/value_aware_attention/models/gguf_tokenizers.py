"""Builds the tokenizers of GGUF files from their vocabulary, merges and splitting rules."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from value_aware_attention.models.gguf_files import read_gguf

# How text is split before its bytes are merged, by the names used in files.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "gpt-2": [GPT2], "smollm": [r"\p{N}", GPT2], "starcoder": [r"\p{N}", GPT2],
    "qwen2": [LLAMA.replace("{1,3}", "")],
    "llama-bpe": [LLAMA], "llama-v3": [LLAMA], "llama3": [LLAMA],
}  # fmt: skip
BLANK = "▁"


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of a file; it adds tokens before and after a text as set in the file.

    Raises ValueError if the file's way of splitting text is unknown.
    """
    values, _ = read_gguf(file)
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    model, cut = keys.get("model"), str(keys.get("pre"))
    if model != "llama" and (model != "gpt2" or cut not in CUTS):
        raise ValueError(
            f"its tokenizer.ggml.model is {model} and its tokenizer.ggml.pre is {cut}: read are "
            f"llama, and gpt2 with {', '.join(CUTS)}; give a folder that has a tokenizer"
        )
    backend = _of_pieces(keys) if model == "llama" else _of_bytes(keys)
    kinds = list(zip(keys["tokens"], keys.get("token_type", ()), strict=False))
    # Tokens that are never split: 2 is unknown, 3 control, 4 user-defined.
    backend.add_special_tokens([token for token, kind in kinds if kind in (2, 3)])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == 4])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    places = {f"{name}_token": keys.get(f"{names[name]}_token_id") for name in names}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=values.get("tokenizer.chat_template"),
        # llama.cpp adds BOS for these two if an older file has no such key
        add_bos_token=keys.get("add_bos_token", model == "llama" or CUTS[cut] == [LLAMA]),
        add_eos_token=keys.get("add_eos_token", False),
        **{name: keys["tokens"][place] for name, place in places.items() if place is not None},
    )  # fmt: skip


def _of_bytes(keys: dict[str, Any]) -> Tokenizer:
    """Builds a GPT-2 tokenizer, which splits text and merges bytes within each piece."""
    places = {token: place for place, token in enumerate(keys["tokens"])}
    merges, cuts = [tuple(merge.split(" ")) for merge in keys["merges"]], CUTS[keys["pre"]]
    backend = Tokenizer(BPE(places, merges, ignore_merges=cuts == [LLAMA]))  # whole words
    if keys["pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _of_pieces(keys: dict[str, Any]) -> Tokenizer:
    """Builds a SentencePiece tokenizer, which merges to the pieces with the best scores."""
    tokens, scores, begins = keys["tokens"], keys["scores"], keys.get("add_space_prefix", True)
    places = {token: place for place, token in enumerate(tokens)}
    merges = [
        (token[:end], token[end:])
        for token in sorted(places, key=lambda token: -scores[places[token]])
        for end in range(1, len(token))
        if token[:end] in places and token[end:] in places
    ]
    unknown = tokens[keys.get("unknown_token_id", 0)]
    backend = Tokenizer(BPE(places, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(BLANK)] * begins + [normalizers.Replace(" ", BLANK)]
    )
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * begins)
    return backend
