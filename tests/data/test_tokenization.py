import itertools
import random
from unittest.mock import Mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, BertTokenizer

from tests.refusals import assert_refused
from value_aware_study.data.tokenization import (
    SPECIALS,
    ByteLevelBPE,
    PretrainedTokenizer,
    WordLevel,
    sample,
)

WORDS = ["attention", "value", "kernel", "queries", "keys", "näïve", "“quoted”", "r=65", "\t"]


def texts(count=60, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=12)) for _ in range(count)]


@pytest.fixture(scope="module")
def bpe():
    return ByteLevelBPE(vocabulary_size=300, training_characters=10**6).build(texts())


def test_specials_come_first(bpe):
    assert bpe.convert_ids_to_tokens(range(5)) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    named = (bpe.bos_token, bpe.pad_token, bpe.eos_token, bpe.unk_token, bpe.mask_token)
    assert bpe.convert_tokens_to_ids(list(named)) == [0, 1, 2, 3, 4] and len(bpe) == 300


def test_merges_equal_those_of_the_tokenizers_library(bpe):
    reference = ByteLevelBPETokenizer()
    reference.train_from_iterator(
        texts(), vocab_size=300, min_frequency=0, special_tokens=list(SPECIALS.values())
    )
    assert reference.get_vocab() == bpe.get_vocab()


@given(st.text())
def test_any_text_comes_back(bpe, text):
    assume(not any(special in text for special in SPECIALS.values()))  # they are no text
    ids = bpe(text)["input_ids"]
    assert bpe.unk_token_id not in ids
    assert bpe.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_tokenizer_of_bytes_survives_being_saved(bpe, tmp_path):
    bpe.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == bpe.get_vocab()
    assert loaded(texts()[0])["input_ids"] == bpe(texts()[0])["input_ids"]
    assert loaded.mask_token_id == 4


def test_a_vocabulary_below_the_bytes_or_too_large_for_the_texts_is_refused():
    line, characters = "vocabulary_size must be at least 261, not 260", 10**6
    assert_refused(line, ByteLevelBPE, vocabulary_size=260, training_characters=characters)
    build = ByteLevelBPE(vocabulary_size=5000, training_characters=characters).build
    assert_refused(r"the texts hold \d+ tokens, vocabulary_size is 5000", build, ["a b c"])


@given(
    st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=30),
    st.integers(1, 200),
    st.randoms(),
)
def test_a_sample_is_bounded_and_independent_of_the_order(items, bound, rng):
    drawn = sample(items, bound)
    assert sum(map(len, drawn)) <= bound
    shuffled = list(items)
    rng.shuffle(shuffled)
    assert sample(shuffled, bound) == drawn
    if sum(map(len, items)) <= bound:
        assert sorted(drawn) == sorted(items)


def test_a_sample_fills_most_of_the_bound_from_everywhere():
    drawn = sample([f"{i:04d}" + "x" * 96 for i in range(2000)], 20_000)
    assert 19_900 <= sum(map(len, drawn)) <= 20_000
    positions = sorted(int(text[:4]) for text in drawn)
    gaps = [b - a for a, b in itertools.pairwise([0, *positions, 2000])]
    assert max(gaps) < 120  # 200 draws of 2,000; the longest gap is about 60


LINES = ["the cat saw the <unk> \n\n the dog \n", "a cat , the end"]


def test_words_are_numbered_by_the_papers_rule():
    tokenizer = WordLevel(padding_multiple=8).build(LINES)
    # by falling count, then alphabetically; 4 specials and 7 types, padded to 16
    expected = ["<s>", "<pad>", "</s>", "<unk>", "the", "cat", ",", "a", "dog", "end", "saw"]
    assert tokenizer.convert_ids_to_tokens(range(11)) == expected
    assert len(tokenizer) == 16
    assert tokenizer.convert_ids_to_tokens([11, 15]) == ["madeupword0000", "madeupword0004"]
    assert tokenizer.mask_token_id is None


def test_lines_end_in_eos_and_unknown_words_are_unk():
    tokenizer = WordLevel(padding_multiple=1).build(LINES)
    ids = tokenizer(" the mouse \n saw <unk>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["the", "<unk>", "</s>", "saw", "<unk>"]


@given(st.lists(st.text(alphabet="abc \n"), min_size=1), st.integers(1, 16))
def test_the_size_is_the_padded_number_of_types(items, multiple):
    types = {word for text in items for word in text.split()}
    build = WordLevel(padding_multiple=multiple).build
    if types:
        size = len(build(items))
        assert size % multiple == 0 and 0 <= size - len(types) - 4 < multiple
    else:
        assert_refused("at least one word", build, items)


def test_a_tokenizer_of_words_survives_being_saved(tmp_path):
    tokenizer = WordLevel(padding_multiple=8).build(LINES)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("cat \n dog")["input_ids"] == tokenizer("cat \n dog")["input_ids"]
    assert len(loaded) == 16


def test_padding_multiple_is_checked():
    assert_refused("padding_multiple must be at least 1, not 0", WordLevel, padding_multiple=0)


def test_whole_documents_are_read_by_a_tokenizer_that_cuts_them(bpe, tmp_path):
    whole = bpe("word " * 50).input_ids
    bpe.backend_tokenizer.enable_truncation(8)
    bpe.save_pretrained(tmp_path)
    bpe.backend_tokenizer.no_truncation()
    assert PretrainedTokenizer(path=str(tmp_path)).build([])("word " * 50).input_ids == whole


def test_the_ends_of_a_bert_are_those_of_its_sentences(tmp_path):
    marks = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word")
    vocabulary = {mark: index for index, mark in enumerate(marks)}
    BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path)
    loaded = PretrainedTokenizer(path=str(tmp_path)).build([])
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.mask_token_id) == (2, 3, 4)


def test_vocabulary_files_are_read(bpe, tmp_path):
    bpe.backend_tokenizer.model.save(str(tmp_path))
    loaded = PretrainedTokenizer(path=str(tmp_path)).build(iter([]))
    assert loaded.get_vocab() == bpe.get_vocab()
    assert loaded(texts()[0])["input_ids"] == bpe(texts()[0])["input_ids"]
    assert loaded.mask_token_id == 4


def test_missing_merges_and_specials_are_named(tmp_path):
    build, merges = PretrainedTokenizer(path=str(tmp_path)).build, tmp_path / "merges.txt"
    (tmp_path / "vocab.json").write_text('{"<s>": 0, "a": 1}')
    line = r"merges\.txt is missing beside vocab\.json"
    assert_refused(line, build, [], error=FileNotFoundError)
    merges.write_text("")
    assert_refused(r"vocab\.json lacks the tokens <pad> </s> <unk> <mask>", build, [])


@pytest.mark.parametrize("answers", [False, True])
def test_a_hub_that_does_not_answer_is_not_asked(bpe, monkeypatch, answers):
    module, from_pretrained = "value_aware_study.data.tokenization", Mock(return_value=bpe)
    monkeypatch.setattr(f"{module}.hub_answers", lambda: answers)
    monkeypatch.setattr(f"{module}.AutoTokenizer.from_pretrained", from_pretrained)
    assert PretrainedTokenizer(path="some/name").build([]) is bpe
    from_pretrained.assert_called_once_with("some/name", local_files_only=not answers)
