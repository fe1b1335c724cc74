"""Windows of a text: consecutive, whole, special tokens around them, a fair sample."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probed import LENGTH, tokenizer, words

from value_aware_attention.measurement.windows import text_windows

CLOSING, BARE = tokenizer(), tokenizer(closes=False)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(20, 120), length=st.integers(4, 20), wanted=st.integers(1, 9))
def test_every_window_is_a_slice_of_the_text_between_its_special_tokens(
    count: int, length: int, wanted: int
) -> None:
    text = words(count)
    tokens = BARE(text)["input_ids"]
    read = text_windows(text, CLOSING, length=length, windows=wanted)
    step = length - 2
    assert read.tokens.shape == (min(wanted, count // step), length)
    assert read.available == count // step and read.text_tokens == count
    assert len(set(read.places)) == len(read)
    for place, row in zip(read.places, read.tokens.tolist(), strict=True):
        assert row == [0, *tokens[place * step : (place + 1) * step], 2]
    assert read.share_read == pytest.approx(len(read) * step / count)


def test_windows_that_read_on_are_not_closed_and_bare_tokenizers_add_nothing() -> None:
    read = text_windows(words(40), CLOSING, length=8, windows=None, closed=False)
    assert (read.tokens[:, 0] == 0).all() and not (read.tokens == 2).any() and len(read) == 5
    bare = text_windows(words(40), BARE, length=8, windows=None)
    assert bare.tokens.flatten().tolist() == BARE(words(40))["input_ids"]


def test_a_sample_is_spread_over_the_text_or_drawn_by_the_seed() -> None:
    spaced = text_windows(words(160), BARE, length=8, windows=4)
    assert spaced.places == (0, 5, 10, 15)
    drawn = [text_windows(words(160), BARE, length=8, windows=4, seed=s).places for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != spaced.places
    assert all(list(places) == sorted(set(places)) for places in drawn)


def test_several_texts_are_read_one_after_the_other() -> None:
    read = text_windows(["w1 w2 w3", "", "w4 w5 w6"], BARE, length=3, windows=None)
    assert read.tokens.tolist() == [BARE("w1 w2 w3")["input_ids"], BARE("w4 w5 w6")["input_ids"]]


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ("", {}, "the text is empty"),
        (["", " \n"], {}, "the text is empty"),
        (words(13), {}, "the text has 13 tokens, a window of 16 needs 14"),
        (words(40), {"length": 2}, "length is 2; it must be above 2"),
        (words(40), {"windows": 0}, "windows is 0"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str | list[str], options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        text_windows(text, CLOSING, **{"length": LENGTH, "windows": 4} | options)
