"""Windows of a text, and any model's end metric on them by brute force with eager attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probed import LENGTH, MODELS, VOCABULARY, model, tokenizer, words
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BartConfig, BartModel, PreTrainedTokenizerFast

from tests.refusals import assert_refused
from value_aware_attention import kernels
from value_aware_attention.approximations import OptimalValueOblivious
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.hugging_face.layers import positions
from value_aware_attention.measurement.task import Layerwise, Task, UnitSums, exactly, joined
from value_aware_attention.measurement.windows import (
    TextWindows,
    metric_of,
    special_tokens,
    text_windows,
    windows_task,
)

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSING, BARE = tokenizer(), tokenizer(closes=False)
KINDS = {
    "roberta": "error",
    "our_masked": "error",
    "gpt2": "perplexity",
    "llama": "perplexity",
    "our_causal": "perplexity",
    "bert": "cosine",
}


@settings(max_examples=30, deadline=None)
@given(count=st.integers(20, 120), length=st.integers(4, 20), most=st.integers(1, 9))
def test_every_window_is_a_slice_of_the_text_between_its_special_tokens(
    count: int, length: int, most: int
) -> None:
    text = words(count)
    tokens = BARE(text)["input_ids"]
    read = text_windows(text, CLOSING, length=length, windows=most)
    step = length - 2
    assert read.tokens.shape == (min(most, count // step), length)
    assert read.available == count // step and read.text_tokens == count
    assert len(set(read.places)) == len(read)
    for place, row in zip(read.places, read.tokens.tolist(), strict=True):
        assert row == [0, *tokens[place * step : (place + 1) * step], 2]
    assert read.share_read == pytest.approx(len(read) * step / count)


def test_windows_that_read_on_are_not_closed() -> None:
    read = text_windows(words(40), CLOSING, length=8, windows=None, closed=False)
    assert (read.tokens[:, 0] == 0).all() and not (read.tokens == 2).any() and len(read) == 5


def test_a_sample_is_spread_over_the_text_or_drawn_by_the_seed() -> None:
    spaced = text_windows(words(160), BARE, length=8, windows=4)
    assert spaced.places == (0, 5, 10, 15)
    drawn = [text_windows(words(160), BARE, length=8, windows=4, seed=s).places for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != spaced.places
    assert all(list(places) == sorted(set(places)) for places in drawn)


def test_several_texts_are_read_one_after_the_other() -> None:
    read = text_windows(["w1 w2 w3", "", "w4 w5 w6"], BARE, length=3, windows=None)
    assert read.tokens.tolist() == [BARE("w1 w2 w3")["input_ids"], BARE("w4 w5 w6")["input_ids"]]


@pytest.mark.parametrize("dropped", ["\ufffd", "\u200b", "\u0301", "\x01", " "])
def test_special_tokens_do_not_depend_on_what_a_text_begins_with(dropped: str) -> None:
    clean = normalizers.Sequence([normalizers.BertNormalizer(), normalizers.StripAccents()])
    bert = tokenizer()
    bert.backend_tokenizer.normalizer = clean
    read = text_windows(100 * dropped + words(40), bert, length=LENGTH, windows=None)
    assert read.special_tokens == 2 and read.tokens[:, [0, -1]].unique().tolist() == [0, 2]


@pytest.mark.parametrize("word", ["\u0915", "ACGT", "w1"])
@pytest.mark.parametrize("kind", [models.BPE, models.WordLevel, models.WordPiece])
def test_a_tokenizer_that_knows_no_latin_is_asked_with_its_own_words(kind: type, word: str) -> None:
    merges = ([],) if kind is models.BPE else ()
    made = Tokenizer(kind({"<s>": 0, "</s>": 1, word: 2}, *merges))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("<s>", 0), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    assert special_tokens(fast) == ([0], [1])


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ("", {}, "the text is empty"),
        (["", " \n"], {}, "the text is empty"),
        ("w1", {}, "the text has 1 token, a window of 16 needs 14"),
        (words(13), {}, "the text has 13 tokens, a window of 16 needs 14"),
        (words(40), {"length": 2}, "length is 2; it must be above 2"),
        (words(40), {"windows": 0}, "windows is 0"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str | list[str], options: dict, named: str) -> None:
    assert_refused(named, text_windows, text, CLOSING, **{"length": LENGTH, "windows": 4} | options)


def read(name: str, windows: int = 3) -> TextWindows:
    closed = KINDS[name] != "perplexity"
    return text_windows(words(100), tokenizer(), length=LENGTH, windows=windows, closed=closed)


def task(name: str, windows: int = 3, kernel: kernels.Kernel | None = None) -> Task:
    return windows_task(model(name), tokenizer(), read(name, windows), kernel=kernel)


def whole(made: Task, method: Layerwise = exactly) -> UnitSums:
    return joined([made.run(method, window) for window in range(made.parts)])


@torch.no_grad()
def eager(made: Task, tokens: torch.Tensor) -> torch.Tensor:
    made.model.set_attn_implementation("eager")
    return made.model(tokens)[0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "our_causal"])
def test_perplexity_scores_every_token_but_the_first_from_its_past(name: str) -> None:
    made = task(name)
    sums = whole(made)
    assert sums.counts.tolist() == 3 * [LENGTH - 1]
    for window, tokens in enumerate(read(name).tokens):
        nats = 0.0
        for place in range(1, LENGTH):  # alone: nothing after a token can help
            logits = eager(made, tokens[None, :place])[0, -1]
            nats -= float(logits.log_softmax(-1)[tokens[place]])
        assert sums.totals[window] == pytest.approx(nats, rel=1e-4)


@pytest.mark.parametrize("name", ["roberta", "our_masked"])
def test_masked_error_counts_wrong_predictions_of_hidden_tokens(name: str) -> None:
    made = task(name)
    sums, inputs = whole(made), torch.cat([text.inputs for text in made.texts])
    hidden = torch.cat([text.labels for text in made.texts]) >= 0
    assert sums.counts.tolist() == hidden.sum(1).tolist()
    assert set(sums.counts) <= {1, 2, 3} and not hidden[:, [0, -1]].any()  # 15% of 14
    wrong = hidden & (eager(made, inputs).argmax(-1) != read(name).tokens)
    assert sums.totals.tolist() == wrong.sum(1).tolist()


def test_masks_depend_on_the_place_in_the_text_alone() -> None:
    few, many = task("roberta", windows=2), task("roberta", windows=4)
    assert read("roberta", 2).places[1] == read("roberta", 4).places[2] == 3
    digests = [many.digest(window) for window in range(4)]
    assert [few.digest(window) for window in range(2)] == digests[::2] and len({*digests}) == 4
    assert torch.equal(few.texts[1].inputs, many.texts[2].inputs)


def test_cosine_is_one_for_exact_attention_and_the_mean_over_tokens_otherwise() -> None:
    made = task("bert")
    assert whole(made).mean() == pytest.approx(1, abs=1e-6)
    method = OptimalValueOblivious(1)
    sums = whole(made, lambda layer: method)
    exact = eager(made, read("bert").tokens)
    with replace_attention(made.model, method), torch.no_grad():
        other = made.model(read("bert").tokens)[0]
    cosines = torch.cosine_similarity(exact, other, dim=-1).sum(1)
    assert sums.totals == pytest.approx(cosines.numpy(), rel=1e-4)
    assert sums.mean() < 0.99


@pytest.mark.parametrize("name", ["gpt2", "our_causal"])
def test_another_kernel_is_used_in_every_layer(name: str) -> None:
    made, plain = task(name, kernel=kernels.Polynomial(2)), task(name)
    assert whole(made).mean() != pytest.approx(whole(plain).mean(), rel=1e-3)
    calls = made.layer_calls()
    assert {call.kernel for call in calls} == {kernels.Polynomial(2)}
    # The second layer's input comes from a first one that used the kernel.
    unlike = [
        (call.query - other.query).abs().max() > 1e-3
        for call, other in zip(calls, plain.layer_calls(), strict=True)
    ]
    assert unlike == [False, True]


def test_positions_are_those_a_model_can_read() -> None:
    limits = {name: positions(model(name)) for name in MODELS}
    assert limits["roberta"] == limits["our_masked"] == limits["bert"] == LENGTH
    assert limits["gpt2"] == 32 and limits["our_causal"] is None


def test_an_encoder_with_a_decoder_is_refused() -> None:
    config = BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=VOCABULARY,
    )  # fmt: skip
    assert_refused(r"BartModel (is an encoder with a decoder|has no)", metric_of, BartModel(config))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_predictions_after_the_context_are_compared_with_the_exact_ones(name: str) -> None:
    windows = text_windows(words(90), BARE, length=LENGTH, windows=3, closed=False)
    made = windows_task(model(name), BARE, windows, context=LENGTH // 2)
    method = OptimalValueOblivious(1)
    sums = whole(made, lambda layer: method)
    scored = slice(LENGTH // 2, LENGTH - 1)
    exact = eager(made, windows.tokens)
    with replace_attention(made.model, method), torch.no_grad():
        other = made.model(windows.tokens, use_cache=False)[0]
    before, after = (logits[:, scored].double().log_softmax(-1) for logits in (exact, other))
    kl = (before.exp() * (before - after)).sum((1, 2))
    same = (before.argmax(-1) == after.argmax(-1)).sum(1)
    losses = -after.gather(-1, windows.tokens[:, 1:][:, scored, None]).sum((1, 2))
    assert sums.predictions["kl"] == pytest.approx(kl.numpy(), rel=1e-3)
    assert sums.predictions["same_top_token"].tolist() == same.tolist()
    assert sums.totals == pytest.approx(losses.numpy(), rel=1e-4)
    assert sums.counts.tolist() == [LENGTH - 1 - LENGTH // 2] * 3
    assert whole(made).predictions["kl"].sum() == pytest.approx(0, abs=1e-6)
    assert made.layer_calls()[0].first_row == LENGTH // 2


def test_an_encoder_has_no_context() -> None:
    windows = text_windows(words(90), CLOSING, length=LENGTH, windows=2)
    sums = whole(windows_task(model("bert"), CLOSING, windows, context=LENGTH // 2))
    assert sums.counts.tolist() == [LENGTH] * 2 and not sums.predictions
