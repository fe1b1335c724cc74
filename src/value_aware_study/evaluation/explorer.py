"""The token explorer: which keys each head keeps on a readable text, method by method."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from value_aware_attention.approximations import SparseApproximation
from value_aware_attention.call import Call
from value_aware_attention.hugging_face.layers import positions
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.recorded import evenly_spaced
from value_aware_attention.measurement.task import Task, Text
from value_aware_attention.measurement.windows import metric_of, special_tokens
from value_aware_attention.weights import dense_weights
from value_aware_study.cards import cards
from value_aware_study.evaluation.exploration import WHOLE, Exploration, Head, Kept, Model, Query

SizedMethod = Callable[[int], SparseApproximation]
"""Number of keys per query -> the method"""
EXPLORED = ("optimal_v_oblivious", "optimal_v_aware", "optimal_v_aware_mean")
"""Methods in the explorer. It looks for queries where the second gains most over the first."""
EXPLORED_SIZES = (2, 4, 8)
"""Numbers of keys. With one key both methods often leave all the error, with many neither does."""
MOST_HEADS = 72
"""Most heads of a model on the page"""
FEWEST_TOKENS, MOST_TOKENS = 32, 48
"""Tokens of a passage, special ones included"""
CONSIDERED = 200
"""Passages considered; the one with the most common words is taken"""
PROSE = r"(?!.*--)[A-Z][\w ,;'()-]+[.?!]"
Ends = tuple[list[int], list[int]]
"""Special tokens before and after a text"""
Chosen = tuple[Float[Tensor, "H N M"], Float[Tensor, "H N"], Float[Tensor, "H N"] | None]
"""A method's weights on every key, the relative output error left, and the weight of the mean"""


@torch.inference_mode()
def explored_model(
    name: str,
    calls: Sequence[Call],
    tokens: Sequence[str],
    methods: Mapping[str, SizedMethod],
    sizes: Sequence[int],
    heads: Collection[tuple[int, int]] | None = None,
) -> Model:
    """Lists the keys that every method keeps in a model's heads, on a sequence's first tokens.

    `calls` has one call per layer, in order. Attention is restricted to `tokens`, which changes
    nothing if it is causal or the recorded sequence is no longer. `heads`: (layer, head), None =
    all. Raises ValueError if a call has fewer keys than there are tokens.
    """
    if calls[0].keys < len(tokens):
        raise ValueError(f"{len(tokens)} tokens given for a call of {calls[0].keys} keys")
    explored = [
        head
        for layer, call in enumerate(calls)
        for head in _explored_layer(layer, call.unit(0, positions=len(tokens)), methods, sizes)
        if heads is None or (layer, head.head) in heads
    ]
    return Model(name, tuple(tokens), tuple(explored))


def _explored_layer(
    layer: int, call: Call, methods: Mapping[str, SizedMethod], sizes: Sequence[int]
) -> list[Head]:
    exact = call.weights[0]
    squared = (exact.double() @ call.value[0].double()).square().sum(dim=-1)

    def chosen(method: SparseApproximation) -> Chosen:
        selected = method.select(**call.arguments())
        # fp64, from the difference of the weights, so that no digits cancel
        difference = (exact.double() - selected.dense(call.keys)[0]) @ call.value[0].double()
        error, mean = difference.square().sum(dim=-1) / squared, selected.mean_weight
        of_keys = dense_weights(selected.indices, selected.weights, call.keys)
        return of_keys[0], error, None if mean is None else mean[0]

    by_size = [[chosen(method(size)) for method in methods.values()] for size in sizes]
    heads, queries, _ = exact.shape
    return [
        Head(layer, head, tuple(_query((head, row), exact, by_size) for row in range(queries)))
        for head in range(heads)
    ]


def _query(
    at: tuple[int, int], exact: Float[Tensor, "H N M"], by_size: Sequence[Sequence[Chosen]]
) -> Query:
    choices = (tuple(_kept(at, *choice) for choice in by_method) for by_method in by_size)
    visible = exact[at].nonzero()[:, 0]
    last = int(visible[-1]) + 1 if len(visible) else 0
    return Query(_rounded(exact[at][:last]), tuple(choices))


def _kept(
    at: tuple[int, int],
    weights: Float[Tensor, "H N M"],
    error: Float[Tensor, "H N"],
    mean: Float[Tensor, "H N"] | None,
) -> Kept:
    keys = weights[at].nonzero()[:, 0]
    return Kept(
        tuple(keys.tolist()),
        _rounded(weights[at][keys]),
        float(f"{error[at]:.3g}") if error[at].isfinite() else None,
        None if mean is None else float(f"{mean[at]:.3g}"),
    )


def _rounded(weights: Float[Tensor, " K"]) -> tuple[int, ...]:
    return tuple(round(WHOLE * weight) for weight in weights.tolist())


def exploration(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    kernel: Kernel | None = None,
    ends: Ends | None = None,
    most: int = MOST_TOKENS,
    whole: bool = False,
) -> Exploration:
    """Explores a passage of whole sentences of the texts, read by the model without its context.

    The passage has at most `most` tokens. `whole`: the one text fits and is explored unchanged.
    `kernel` None = the model's own. `ends` None = the special tokens that the tokenizer puts around
    a text. Of more than `MOST_HEADS` heads, evenly spaced ones are taken. Raises ValueError for
    texts without a word.
    """
    metric = metric_of(model)
    ends = ends_of(model, tokenizer) if ends is None else ends
    ids, pieces = passage(texts, tokenizer, ends, min(most, positions(model) or most), whole)
    row = torch.tensor([ids])
    calls = Task(model, [Text(row, row)], metric, kernel=kernel).layer_calls()
    places = [(layer, head) for layer, call in enumerate(calls) for head in range(call.batch[1])]
    heads = {places[index] for index in evenly_spaced(len(places), MOST_HEADS)}
    methods = {card.explored: card.method for card in map(cards().__getitem__, EXPLORED)}
    return Exploration(
        EXPLORED_SIZES,
        tuple(methods),
        (explored_model(name, calls, pieces, methods, EXPLORED_SIZES, heads),),
    )


def ends_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Ends:
    """Returns the special tokens around a text; a causal model gets none after it."""
    before, after = special_tokens(tokenizer)
    return before, [] if metric_of(model) == "perplexity" else after


def evaluated_exploration(name: str, task: Task, tokenizer: PreTrainedTokenizerBase) -> Exploration:
    """Explores a passage of a model's evaluation text, between its special tokens."""
    row = task.texts[0].inputs[0].tolist()
    special = {*tokenizer.all_special_ids} - {tokenizer.mask_token_id}
    before, after = ([token for token in ends if token in special] for ends in (row[:1], row[-1:]))
    return exploration(
        name, task.model, tokenizer, _texts_of(task, tokenizer), kernel=task.given_kernel,
        ends=(before, after), most=min(MOST_TOKENS, task.length),
    )  # fmt: skip


def _texts_of(task: Task, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Decodes the rows of a task, with masked tokens restored and without special tokens."""
    for text in task.texts:
        for inputs, labels in zip(text.inputs, text.labels, strict=True):
            written = str(
                tokenizer.decode(labels.where((labels >= 0) & (task.metric == "error"), inputs))
            )
            for special in tokenizer.all_special_tokens:
                written = written.replace(special, "")
            yield written


class Passage(NamedTuple):
    """A text in a model's tokens, and the text of each token.

    Attributes:
        pieces: Parts of the text; one that begins a word begins with a space.
    """

    ids: list[int]
    pieces: list[str]


def passage(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    ends: Ends,
    most: int = MOST_TOKENS,
    whole: bool = False,
) -> Passage:
    """Takes whole sentences of `FEWEST_TOKENS` to `most` tokens, or else the whole words that fit.

    Of the first `CONSIDERED` passages it takes the one with the most words for its tokens; `whole`
    takes the one text unchanged. It skips the first sentence of a text, as a window may begin in
    its middle. `ends` are the special tokens before and after the passage. Raises ValueError for
    texts without a word.
    """
    before, after = ends
    most = max(1, most - len(before) - len(after))
    texts = list(texts)
    passages = texts if whole else islice(_passages(texts, tokenizer, most), CONSIDERED)
    text = max(passages, key=lambda text: len(text.split()) / _length(text, tokenizer), default="")
    inner = _tokenized(text or _words(texts, tokenizer, most), tokenizer, most)
    first, last = ([f" {name}" for name in tokenizer.convert_ids_to_tokens(ids)] for ids in ends)
    return Passage([*before, *inner.ids, *after], [*first, *inner.pieces, *last])


def _passages(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, most: int) -> Iterator[str]:
    """Yields runs of whole sentences within a paragraph that are long enough."""
    fewest = min(FEWEST_TOKENS, most * 2 // 3)
    for text in texts:
        for place, paragraph in enumerate(re.split(r"\n\s*\n", text)):
            run = ""
            for sentence in re.split(r"(?<=[.?!])\s+", paragraph.strip())[not place :]:
                sentence = " ".join(sentence.split())
                run = f"{run} {sentence}".strip() if re.fullmatch(PROSE, sentence) else ""
                count = _length(run, tokenizer) if run else 0
                if fewest <= count <= most:
                    yield run
                if count >= fewest:
                    run = ""


def _words(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, most: int) -> str:
    """Returns whole words of the longest text, without its first and last, which may be cut."""
    if not (words := max(texts, key=len, default="").split()):
        raise ValueError("the text is empty")
    words = (words[1:-1] or words)[:most]
    while len(words) > 1 and _length(" ".join(words), tokenizer) > most:
        words.pop()
    return " ".join(words)


def _length(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokenized(text: str, tokenizer: PreTrainedTokenizerBase, most: int) -> Passage:
    is_fast = tokenizer.is_fast
    encoding = tokenizer(
        text, add_special_tokens=False, verbose=False, return_offsets_mapping=is_fast
    )
    ids = list(encoding["input_ids"])[:most]
    if not is_fast:
        return Passage(ids, [str(tokenizer.decode([token])) for token in ids])
    padded = f" {text}"  # gives the first word a space too
    pieces = (
        (padded[start].isspace() or padded[start + 1 : start + 2].isspace(), text[start:end])
        for start, end in encoding["offset_mapping"][:most]
    )
    return Passage(ids, [" " * begins + piece.strip() for begins, piece in pieces])
