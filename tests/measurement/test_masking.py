import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.refusals import assert_refused
from value_aware_attention.measurement.masking import mask_tokens

SPECIALS = [0, 1, 2, 3, 4]
VOCABULARY = 50


def masked(tokens, seed=0, **options):
    settings = {"mask_token": 4, "special_tokens": SPECIALS, "vocabulary_size": VOCABULARY}
    generator = torch.Generator().manual_seed(seed)
    return mask_tokens(tokens, generator=generator, **settings | options)


def random_tokens(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    fraction=st.floats(0.01, 0.99),
)
def test_specials_stay_and_labels_hold_the_original(rows, length, seed, fraction):
    tokens = random_tokens(rows, length, seed)
    before = tokens.clone()
    inputs, labels = masked(tokens, seed, fraction=fraction)
    assert torch.equal(tokens, before)
    special = torch.isin(tokens, torch.tensor(SPECIALS))
    chosen = labels != -100
    assert not (chosen & special).any()
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    # a hidden token becomes the mask or an ordinary token, never another special
    assert not torch.isin(inputs[chosen], torch.tensor([0, 1, 2, 3])).any()
    assert inputs.dtype == labels.dtype == torch.int64


@given(length=st.integers(1, 200), seed=st.integers(0, 2**31), fraction=st.floats(0.01, 0.99))
def test_the_count_is_rounded_up_or_down(length, seed, fraction):
    tokens = random_tokens(3, length, seed)
    _, labels = masked(tokens, seed, fraction=fraction)
    ordinary = (~torch.isin(tokens, torch.tensor(SPECIALS))).sum(-1)
    for count, chosen in zip(ordinary.tolist(), (labels != -100).sum(-1).tolist(), strict=True):
        # fp32 rounding of fraction x count may fall on either side of a whole number
        assert math.floor(fraction * count - 1e-4) <= chosen <= math.ceil(fraction * count + 1e-4)


def test_proportions():
    tokens = torch.randint(5, VOCABULARY, (2000, 63), generator=torch.Generator().manual_seed(1))
    inputs, labels = masked(tokens)
    chosen = labels != -100
    assert abs(chosen.double().mean() - 0.15) < 0.004  # 4 standard deviations of a Bernoulli draw
    assert abs((inputs == 4)[chosen].float().mean() - 0.8) < 0.012
    unchanged = 0.1 + 0.1 / (VOCABULARY - 5)  # a random token may be the original
    assert abs((inputs == tokens)[chosen].float().mean() - unchanged) < 0.009


def test_positions_and_replacements_are_uniform():
    inputs, labels = masked(torch.full((20_000, 10), 7), fraction=0.3)
    chosen = labels != -100
    assert (chosen.float().mean(0) - 0.3).abs().max() < 0.015
    replaced = inputs[chosen & (inputs != 4) & (inputs != 7)]
    counts = torch.bincount(replaced, minlength=VOCABULARY)[5:].double()
    assert chisquare(torch.cat([counts[:2], counts[3:]])).pvalue > 1e-4  # without token 7


def test_same_generator_same_masks():
    tokens = random_tokens(1, 30)[0]  # a single sequence
    assert all(map(torch.equal, masked(tokens, seed=3), masked(tokens, seed=3)))
    assert not torch.equal(masked(tokens, seed=3)[1], masked(tokens, seed=4)[1])
    assert masked(torch.tensor([0, 1, 2, 4]))[1].tolist() == [-100] * 4


@pytest.mark.parametrize(
    ("options", "line"),
    [
        *(({"fraction": x}, "fraction must lie between 0 and 1") for x in (0, 1, 1.5)),
        ({"vocabulary_size": 5}, "a vocabulary of 5 holds nothing but special tokens"),
    ],
)
def test_what_cannot_be_masked_is_refused(options, line):
    assert_refused(line, masked, torch.tensor([0, 1, 2]), **options)
