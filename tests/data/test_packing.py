import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import assert_refused
from value_aware_study.data.batches import masked_sequences
from value_aware_study.data.tokenization import ByteLevelBPE
from value_aware_study.data.tokens import (
    SourceQuota,
    count_tokens,
    held_out_split,
    rearrange,
    token_stream,
    write_instances,
    write_stream,
    write_tokens,
)

MODULE = "value_aware_study.data.tokens"
TEXTS = [
    f"document {i}: " + "value aware attention, " * (i % 4) + "<mask> </s> é\n" for i in range(40)
]


@pytest.fixture(scope="module")
def tokenizer():
    return ByteLevelBPE(vocabulary_size=300, training_characters=10**6).build(TEXTS)


def corpus_file(folder, texts=TEXTS, name="train"):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture
def stream(tmp_path, tokenizer):
    file = corpus_file(tmp_path / "source")
    return token_stream(file, tokenizer, seed=None, cache_dir=tmp_path / "cache")


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


def test_every_document_comes_back_with_one_end_and_specials_in_it_are_text(
    stream, tokenizer, tmp_path
):
    tokens = written(tmp_path, stream)
    assert len(tokens) == count_tokens(stream)
    assert documents_of(tokens, tokenizer) == TEXTS
    assert not (tokens == tokenizer.mask_token_id).any()


def test_a_rewritten_file_is_read_anew(tmp_path, tokenizer):
    for text in ("before", "2020-01-01"):  # Arrow would guess a date
        file = corpus_file(tmp_path / "source", [text])
        stream = token_stream(file, tokenizer, seed=None, cache_dir=tmp_path / "cache")
        assert documents_of(written(tmp_path, stream), tokenizer) == [text]


def test_random_order_is_a_function_of_the_seed(tmp_path, tokenizer):
    file = corpus_file(tmp_path / "source")

    def order(seed, cache):
        shuffled = token_stream(file, tokenizer, seed=seed, cache_dir=tmp_path / cache)
        return documents_of(written(tmp_path, shuffled), tokenizer)

    first = order(1, "cache")
    assert first == order(1, "another cache") != order(2, "cache")
    assert first != TEXTS and sorted(first) == sorted(TEXTS)


def test_streams_of_sources_are_joined_in_order_or_mixed(tmp_path, tokenizer):
    streams = [
        token_stream(
            corpus_file(tmp_path / name, [f"{name} {i}" for i in range(30)]),
            tokenizer,
            seed=None,
            cache_dir=tmp_path / "cache",
        )
        for name in "ab"
    ]
    expected = [f"{name} {i}" for name in "ab" for i in range(30)]
    assert documents_of(written(tmp_path, *streams), tokenizer) == expected
    mixed = documents_of(written(tmp_path, *streams, seed=5), tokenizer)
    assert sorted(mixed) == sorted(expected)
    assert 0 < sum(text.startswith("a") for text in mixed[:30]) < 30


def test_a_missing_file_is_named(tmp_path, tokenizer):
    assert_refused(
        r"train\.jsonl is missing: write the corpus",
        token_stream,
        tmp_path / "train.jsonl",
        tokenizer,
        error=FileNotFoundError,
        seed=0,
        cache_dir=tmp_path,
    )


@pytest.mark.parametrize(("length", "documents_a_block"), [(8, 1), (16, 7), (33, 256)])
def test_instances_are_wrapped_pieces_of_the_stream(
    stream, tokenizer, tmp_path, monkeypatch, length, documents_a_block
):
    monkeypatch.setattr(f"{MODULE}.DOCUMENTS_PER_BATCH", documents_a_block)
    tokens, path = written(tmp_path, stream), tmp_path / "i.npy"
    count = write_instances(stream, path, tokenizer=tokenizer, instance_length=length)
    instances = np.load(path)
    assert instances.shape == (count, length) and count == len(tokens) // (length - 2)
    assert (instances[:, 0] == 0).all() and (instances[:, -1] == 2).all()
    assert np.array_equal(instances[:, 1:-1].ravel(), tokens[: count * (length - 2)])


@pytest.mark.parametrize("quota", [1, 3, 10**6])
def test_a_quota_takes_the_first_instances(stream, tokenizer, tmp_path, quota):
    options = {"tokenizer": tokenizer, "instance_length": 16}
    everything = write_instances(stream, tmp_path / "all.npy", **options)
    count = write_instances(stream, tmp_path / "some.npy", quota=quota, **options)
    assert count == min(quota, everything)
    assert np.array_equal(np.load(tmp_path / "some.npy"), np.load(tmp_path / "all.npy")[:count])


def test_a_stream_shorter_than_an_instance_or_an_empty_quota_is_refused(
    stream, tokenizer, tmp_path
):
    for options, line in (
        ({"instance_length": 9999}, r"a stream of \d+ tokens fills no instance of 9999"),
        ({"instance_length": 2}, "fills no instance of 2 tokens"),
        ({"instance_length": 16, "quota": 0}, "quota must be at least 1 or null, not 0"),
    ):
        inputs = stream, tmp_path / "i.npy"
        assert_refused(line, write_instances, *inputs, tokenizer=tokenizer, **options)


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
        (corpus / name).mkdir(parents=True)
        for split, count in (("train", 30), ("evaluation", 30), ("validation", validation)):
            lines = [json.dumps({"text": f"{name} {split} number {i}"}) for i in range(count)]
            (corpus / name / f"{split}.jsonl").write_text("".join(f"{x}\n" for x in lines))
    folder = tmp_path / "tokens"
    counts = write_tokens(
        corpus=corpus,
        sources={"a": SourceQuota(), "b": SourceQuota()},
        tokenizer=ByteLevelBPE(vocabulary_size=300, training_characters=10**6),
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
