import itertools
import json
import random
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, BertTokenizer

from tests.refusals import assert_refused
from value_aware_study.data.batches import masked_sequences
from value_aware_study.data.tokenization import (
    SPECIALS,
    ByteLevelBPE,
    PretrainedTokenizer,
    WordLevel,
    sample,
)
from value_aware_study.data.tokens import (
    count_tokens,
    held_out_split,
    rearrange,
    token_stream,
    write_instances,
    write_stream,
    write_tokens,
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


def test_a_saved_tokenizer_comes_back(bpe, tmp_path):
    words = WordLevel(padding_multiple=8).build(LINES)
    for tokenizer, text in ((bpe, texts()[0]), (words, "cat \n dog")):
        tokenizer.save_pretrained(tmp_path / str(len(tokenizer)))
        loaded = AutoTokenizer.from_pretrained(tmp_path / str(len(tokenizer)))
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.mask_token_id == tokenizer.mask_token_id


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


MODULE = "value_aware_study.data.tokens"
TEXTS = [
    f"document {i}: " + "value aware attention, " * (i % 4) + "<mask> </s> é\n" for i in range(40)
]


def corpus_file(folder, texts=TEXTS, name="train"):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture
def stream(tmp_path, bpe):
    file = corpus_file(tmp_path / "source")
    return token_stream(file, bpe, seed=None, cache_dir=tmp_path / "cache")


def documents_of(tokens, tokenizer):
    """Decodes the texts between `</s>`."""
    ends = np.flatnonzero(np.asarray(tokens) == tokenizer.eos_token_id)
    pieces = np.split(np.asarray(tokens), ends + 1)
    assert not len(pieces[-1])
    decode = tokenizer.backend_tokenizer.decode
    return [decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces[:-1]]


def written(folder, *streams, **options):
    total = write_stream(streams, folder / "s.npy", vocabulary_size=300, **options)
    tokens = np.load(folder / "s.npy")
    assert total == len(tokens)
    return tokens


def test_every_document_comes_back_with_one_end_and_specials_in_it_are_text(stream, bpe, tmp_path):
    tokens = written(tmp_path, stream)
    assert len(tokens) == count_tokens(stream)
    assert documents_of(tokens, bpe) == TEXTS
    assert not (tokens == bpe.mask_token_id).any()


def test_a_rewritten_file_is_read_anew(tmp_path, bpe):
    for text in ("before", "2020-01-01"):  # Arrow would guess a date
        file = corpus_file(tmp_path / "source", [text])
        stream = token_stream(file, bpe, seed=None, cache_dir=tmp_path / "cache")
        assert documents_of(written(tmp_path, stream), bpe) == [text]


def test_random_order_is_a_function_of_the_seed(tmp_path, bpe):
    file = corpus_file(tmp_path / "source")

    def order(seed, cache):
        shuffled = token_stream(file, bpe, seed=seed, cache_dir=tmp_path / cache)
        return documents_of(written(tmp_path, shuffled), bpe)

    first = order(1, "cache")
    assert first == order(1, "another cache") != order(2, "cache")
    assert first != TEXTS and sorted(first) == sorted(TEXTS)


def test_streams_of_sources_are_joined_in_order_or_mixed(tmp_path, bpe):
    streams = [
        token_stream(
            corpus_file(tmp_path / name, [f"{name} {i}" for i in range(30)]),
            bpe,
            seed=None,
            cache_dir=tmp_path / "cache",
        )
        for name in "ab"
    ]
    expected = [f"{name} {i}" for name in "ab" for i in range(30)]
    assert documents_of(written(tmp_path, *streams), bpe) == expected
    mixed = documents_of(written(tmp_path, *streams, seed=5), bpe)
    assert sorted(mixed) == sorted(expected)
    assert 0 < sum(text.startswith("a") for text in mixed[:30]) < 30


def test_a_missing_file_is_named(tmp_path, bpe):
    assert_refused(
        r"train\.jsonl is missing: write the corpus",
        token_stream,
        tmp_path / "train.jsonl",
        bpe,
        error=FileNotFoundError,
        seed=0,
        cache_dir=tmp_path,
    )


@pytest.mark.parametrize(("length", "documents_a_block"), [(8, 1), (16, 7), (33, 256)])
def test_instances_are_wrapped_pieces_of_the_stream(
    stream, bpe, tmp_path, monkeypatch, length, documents_a_block
):
    monkeypatch.setattr(f"{MODULE}.DOCUMENTS_PER_BATCH", documents_a_block)
    tokens, path = written(tmp_path, stream), tmp_path / "i.npy"
    count = write_instances(stream, path, tokenizer=bpe, instance_length=length)
    instances = np.load(path)
    assert instances.shape == (count, length) and count == len(tokens) // (length - 2)
    assert (instances[:, 0] == 0).all() and (instances[:, -1] == 2).all()
    assert np.array_equal(instances[:, 1:-1].ravel(), tokens[: count * (length - 2)])


@pytest.mark.parametrize("quota", [1, 3, 10**6])
def test_a_quota_takes_the_first_instances(stream, bpe, tmp_path, quota):
    options = {"tokenizer": bpe, "instance_length": 16}
    everything = write_instances(stream, tmp_path / "all.npy", **options)
    count = write_instances(stream, tmp_path / "some.npy", quota=quota, **options)
    assert count == min(quota, everything)
    assert np.array_equal(np.load(tmp_path / "some.npy"), np.load(tmp_path / "all.npy")[:count])


def test_a_stream_shorter_than_an_instance_or_an_empty_quota_is_refused(stream, bpe, tmp_path):
    for options, line in (
        ({"instance_length": 9999}, r"a stream of \d+ tokens fills no instance of 9999"),
        ({"instance_length": 2}, "fills no instance of 2 tokens"),
        ({"instance_length": 16, "quota": 0}, "quota must be at least 1 or null, not 0"),
    ):
        inputs = stream, tmp_path / "i.npy"
        assert_refused(line, write_instances, *inputs, tokenizer=bpe, **options)


@given(st.integers(1, 20), st.integers(3, 9), st.integers(1, 5))
def test_consecutive_instances_joined(count, instance_length, group):
    instances = np.arange(count * instance_length).reshape(count, instance_length)
    length, line = group * instance_length, f"{count} instances of {instance_length} fill no"
    if count < group:
        assert_refused(line, rearrange, instances, length)
    else:
        whole = instances.ravel()[: count // group * length]  # they are numbered in order
        assert np.array_equal(rearrange(instances, length), whole.reshape(-1, length))


def test_a_memory_map_is_not_copied(tmp_path):
    np.save(tmp_path / "i.npy", np.zeros((8, 4), np.uint16))
    instances = np.load(tmp_path / "i.npy", mmap_mode="r")
    assert np.shares_memory(rearrange(instances, 8), instances)


@pytest.mark.parametrize(("size", "kind"), [(2**16, np.uint16), (2**16 + 1, np.int32)])
def test_the_type_is_the_smallest_that_holds_every_id(stream, tmp_path, size, kind):
    write_stream([stream], tmp_path / "s.npy", vocabulary_size=size)
    assert np.load(tmp_path / "s.npy").dtype == kind


def write(tmp_path, validation):
    corpus = tmp_path / "corpus"
    for name in "ab":
        for split, count in (("train", 30), ("evaluation", 30), ("validation", validation)):
            lines = [f"{name} {split} number {i}" for i in range(count)]
            corpus_file(corpus / name, lines, split)
    folder = tmp_path / "tokens"
    counts = write_tokens(
        corpus=corpus,
        sources={"a": {}, "b": {}},
        build=ByteLevelBPE(vocabulary_size=300, training_characters=10**6).build,
        seed=0,
        scratch=tmp_path,
        stream_folder=folder / "causal",
        instance_folder=folder / "masked",
        instance_lengths=(16,),
    )
    return folder, counts["sources"]


def test_validation_is_of_all_sources_together(tmp_path):
    folder, counts = write(tmp_path, 4)
    stream = np.load(folder / "causal/validation.npy")
    assert len(stream) == sum(counts[name]["validation"]["tokens"] for name in "ab")
    instances = np.load(folder / "masked/16/validation.npy")
    assert len(instances) == len(stream) // 14
    options = {"folder": folder / "masked", "length": 16, "fraction": 0.15}
    assert len(masked_sequences(split="validation", **options)) == len(instances)
    assert held_out_split(folder / "causal", len(stream)) == "validation"
    assert held_out_split(folder / "causal", len(stream) + 1) == "evaluation"


def test_a_corpus_without_validation_has_none(tmp_path):
    folder, counts = write(tmp_path, 0)
    assert not list(folder.rglob("validation.npy")) and "validation" not in counts["a"]
    assert held_out_split(folder / "causal", 1) == "evaluation"
