"""Builds the tokenizers of GGUF files: their own vocabulary and merges, cut as they name it."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from value_aware_attention.models.gguf_files import read_gguf

# How text is cut before its pieces are merged, by the names that files have for it.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA.replace("{1,3}", "")
CUTS = {
    "gpt-2": [GPT2], "smollm": [r"\p{N}", GPT2], "starcoder": [r"\p{N}", GPT2], "qwen2": [QWEN],
    "llama-bpe": [LLAMA], "llama-v3": [LLAMA], "llama3": [LLAMA],
}  # fmt: skip
BLANK = "▁"
CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of a file, which adds its BOS and EOS where the file says so.

    Raises ValueError where the file names no way of cutting text that is known here.
    """
    values = read_gguf(file)[0]
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    pieces, cut = keys.get("model") == "llama", str(keys.get("pre"))
    if not pieces and (keys.get("model") != "gpt2" or cut not in CUTS):
        raise ValueError(
            f"its tokenizer.ggml.model is {keys.get('model')} and its tokenizer.ggml.pre is {cut}: "
            f"read are llama, and gpt2 with {', '.join(CUTS)}; give a folder with a tokenizer"
        )
    tokens = keys["tokens"]
    backend = _of_pieces(tokens, keys) if pieces else _of_bytes(tokens, keys)
    kinds = list(zip(tokens, keys["token_type"], strict=True))
    backend.add_special_tokens([token for token, kind in kinds if kind in (CONTROL, UNKNOWN)])
    plain = [token for token, kind in kinds if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    places = {name: keys.get(f"{key}_token_id") for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=values.get("tokenizer.chat_template"),
        add_bos_token=keys.get("add_bos_token", pieces or CUTS[cut] == [LLAMA]),
        add_eos_token=keys.get("add_eos_token", False),
        **{f"{name}_token": tokens[place] for name, place in places.items() if place is not None},
    )  # fmt: skip


def _of_bytes(tokens: list[str], keys: dict[str, Any]) -> Tokenizer:
    """Builds a tokenizer of GPT-2's kind, which merges bytes. Qwen's composes characters first."""
    merges = [tuple(merge.split(" ")) for merge in keys["merges"]]
    places, cuts = {token: place for place, token in enumerate(tokens)}, CUTS[keys["pre"]]
    backend = Tokenizer(BPE(places, merges, ignore_merges=cuts == [LLAMA]))
    if cuts == [QWEN]:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _of_pieces(tokens: list[str], keys: dict[str, Any]) -> Tokenizer:
    """Builds a tokenizer of SentencePiece's kind, which merges to the piece of the best score."""
    places, scores = {token: place for place, token in enumerate(tokens)}, keys["scores"]
    merges = [
        (token[:end], token[end:])
        for token in sorted(places, key=lambda token: -scores[places[token]])
        for end in range(1, len(token))
        if token[:end] in places and token[end:] in places
    ]
    unknown = tokens[keys.get("unknown_token_id", 0)]
    backend = Tokenizer(BPE(places, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    begins = keys.get("add_space_prefix", True)
    blank = normalizers.Replace(" ", BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK)] * begins + [blank])
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * begins)
    return backend
