"""The tokenizer of a GGUF file cuts and merges text as the file says: slow rules are beside it."""

import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.refusals import assert_refused
from value_aware_attention.models.checkpoints import load_tokenizer

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")
BYTES = bytes_to_unicode()
MERGES = [
    "Ġ Ġ", "Ċ Ġ", "Ġ w", "Ġw a", "Ġwa s", "1 9", "Ġ 1", "Ġ ĠĠ", "i t", "' s", "č Ċ", "w e", "' l",
    "'l l", "a a", "9 0", "19 90", "Ã ©", "a b",
]  # fmt: skip
SPECIAL, ADDED = ["<s>", "</s>", "<unk>"], ["<b>", "  "]
TOKENS = [*BYTES.values(), *(merge.replace(" ", "") for merge in MERGES), "wasn", *SPECIAL, *ADDED]
KINDS = [1] * (len(TOKENS) - 5) + [3, 3, 2, 4, 4]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab1.'s中"]
PIECES += ["ab", "▁a", "▁ab", "ba", "▁▁", "11", "▁1", "b▁", "'s", "aba", "中a", "<b>", "  ", "\n\n"]
FRAGMENTS = [
    *"ab1 \n.'éA中½²", "  ", "   ", "\r\n", "\t", "19", "1990", " was", "wasn", "it's", "WE'LL",
    "'re", "e\u0301", "\u0307", "ﬁ", "한글", "🤗", "\u200d", "\u00a0", "<b>", "<s>", "--",
]  # fmt: skip
LETTERS = st.characters(exclude_categories=["Cs"])
TEXT = st.lists(st.sampled_from(FRAGMENTS) | LETTERS, max_size=12).map("".join)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "gpt-2": [GPT2], "smollm": [r"\p{N}", GPT2], "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA], "llama3": [LLAMA], "llama-v3": [LLAMA],
    "qwen2": [LLAMA.replace(r"\p{N}{1,3}", r"\p{N}")],
}  # fmt: skip


def write_tokenizer(path: Path, model: str, pre: str | None, **keys: Any) -> Path:
    """Writes a vocabulary; `keys` are written beside it."""
    tokens, kinds = TOKENS, KINDS
    if model == "llama":
        tokens, kinds = PIECES, [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 262) + [4, 4, 4]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_token_scores([-1.0 * place for place in range(len(tokens))])
    for name, token in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loads a tokenizer of a kind once, and as it is read again after it was saved."""
    made: dict[Any, Any] = {}

    def loaded(model: str, pre: str | None = None, **keys: bool) -> Any:
        name = (model, pre, *keys.items())
        if name not in made:
            folder = tmp_path_factory.mktemp("tokenizer")
            tokenizer = load_tokenizer(write_tokenizer(folder / "a.gguf", model, pre, **keys))
            tokenizer.save_pretrained(folder / "saved")
            made[name] = tokenizer, load_tokenizer(folder / "saved")
        return made[name]

    return loaded


def whole(text: str, tokens: list[str]) -> list[str]:
    """Cuts out the tokens that are never cut, the longest first."""
    longest = sorted(tokens, key=len, reverse=True)
    return regex.split("(" + "|".join(map(regex.escape, longest)) + ")", text)


def cut(text: str, rule: str) -> list[str]:
    """Cuts a text into what a rule finds, and what is between."""
    parts = regex.split(f"({rule})", text)
    return [part for part in parts if part]


def merged(symbols: list[str], ranks: dict[tuple[str, str], int] | dict[str, int]) -> list[str]:
    """Merges the pair of the lowest rank, the first of several, until no pair has one."""
    while True:
        pairs = list(pairwise(symbols))
        keys = pairs if ("a", "b") in ranks else ["".join(pair) for pair in pairs]
        known = [(ranks[key], place) for place, key in enumerate(keys) if key in ranks]
        if not known:
            return symbols
        _, place = min(known)
        symbols = [*symbols[:place], "".join(pairs[place]), *symbols[place + 2 :]]


def by_bytes(text: str, pre: str) -> list[int]:
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    ids: list[int] = []
    for part in whole(text, SPECIAL + ADDED):
        if part in SPECIAL + ADDED:
            ids.append(TOKENS.index(part))
            continue
        pieces = [unicodedata.normalize("NFC", part) if pre == "qwen2" else part]
        for rule in CUTS[pre]:
            pieces = [piece for one in pieces for piece in cut(one, rule)]
        for piece in pieces:
            symbols = [BYTES[byte] for byte in piece.encode()]
            if CUTS[pre] == [LLAMA] and "".join(symbols) in TOKENS:  # Llama 3 takes words whole
                symbols = ["".join(symbols)]
            ids += [TOKENS.index(token) for token in merged(symbols, ranks)]
    return ids


def by_pieces(text: str, begins: bool) -> list[int]:
    ranks = {piece: rank for rank, piece in enumerate(PIECES)}
    ids: list[int] = []
    for part in whole(text, [*PIECES[:3], "<b>", "  ", "\n\n"]):
        if part in PIECES[:3] or part in ("<b>", "  ", "\n\n"):
            ids.append(PIECES.index(part))
            continue
        symbols = [*(("▁" if begins and part else "") + part.replace(" ", "▁"))]
        for symbol in merged(symbols, ranks):
            found = [symbol] if symbol in ranks else [f"<0x{b:02X}>" for b in symbol.encode()]
            ids += [ranks[piece] for piece in found]
    return ids


@pytest.mark.parametrize("pre", CUTS)
@settings(max_examples=60)
@given(text=TEXT)
def test_bytes_are_merged_within_the_cuts_that_the_file_names(
    load: Any, pre: str, text: str
) -> None:
    for tokenizer in load("gpt2", pre):
        assert tokenizer(text, add_special_tokens=False).input_ids == by_bytes(text, pre)


@pytest.mark.parametrize("begins", [True, False])
@settings(max_examples=120)
@given(text=TEXT)
def test_pieces_are_merged_by_their_scores(load: Any, begins: bool, text: str) -> None:
    for tokenizer in load("llama", add_space_prefix=begins):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == by_pieces(text, begins)
        assert begins or "▁" in text or tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("model", "pre", "keys", "first", "last"),
    [
        ("gpt2", "smollm", {}, False, False),
        ("gpt2", "qwen2", {"add_bos_token": False}, False, False),
        ("gpt2", "qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("gpt2", "llama-bpe", {}, True, False),  # llama.cpp adds it where older files do not tell
        ("gpt2", "llama-bpe", {"add_bos_token": False}, False, False),
        ("llama", None, {}, True, False),
        ("llama", "default", {"add_bos_token": False, "add_eos_token": True}, False, True),
    ],
)
def test_it_begins_and_ends_a_text_as_the_file_says(
    load: Any, model: str, pre: str | None, keys: dict[str, bool], first: bool, last: bool
) -> None:
    for tokenizer in load(model, pre, **keys):
        ids = tokenizer("ab").input_ids
        assert (ids[0] == tokenizer.bos_token_id) is first
        assert (ids[-1] == tokenizer.eos_token_id) is last
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == tuple(SPECIAL)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(
    ("model", "pre", "line"),
    [
        ("gpt2", "default", "tokenizer.ggml.pre is default: read are"),
        ("gpt2", None, "tokenizer.ggml.pre is None: read are"),
        ("gpt2", "bloom", "tokenizer.ggml.pre is bloom: .* with gpt-2, smollm"),
        ("t5", "smollm", "tokenizer.ggml.model is t5 "),
    ],
)
def test_a_rule_that_is_not_known_is_refused(
    tmp_path: Path, model: str, pre: str | None, line: str
) -> None:
    assert_refused(line, load_tokenizer, write_tokenizer(tmp_path / "a.gguf", model, pre))
