"""Scores n-gram models on the targets of a language model: its strongest baselines of counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from value_aware_attention.measurement.measure import end_metric
from value_aware_attention.measurement.record import Baseline
from value_aware_attention.measurement.task import Task, UnitSums
from value_aware_study.data.batches import CausalBatches, MaskedSequences
from value_aware_study.data.tokens import read_tokens
from value_aware_study.evaluation.kneser_ney import (
    UNKNOWN,
    KneserNey,
    Probabilities,
    Tokens,
    log_likelihood,
)

CAUSAL_ORDERS = {"unigram": 1, "bigram": 2, "trigram": 3, "5gram": 5}
CLOZE_ORDER = 4
CANDIDATES = 512
"""Tokens, the likeliest between the two neighbours of a gap, that n-grams choose among."""
GAPS_AT_ONCE = 256
"""Rows of scores over the whole vocabulary that are held together."""
RANDOM_OR_KEPT = 0.1
"""Shares of the masked tokens that masking replaces by a random token, and that it keeps."""


@dataclass(frozen=True, eq=False)
class CausalCounts:
    """Scores n-gram models of all training tokens, and of those that the causal LM was trained on.

    `training` is the file of the training stream, `batches` yields the LM's training batches.
    """

    training: Path | str
    batches: CausalBatches

    def __call__(self, task: Task, exact: UnitSums) -> dict[str, Baseline]:
        """Returns each model's perplexity on the task's targets, with its paired interval."""
        stream = np.asarray(read_tokens(self.training, dimensions=1))[None]
        read = np.concatenate([self.batches[step].numpy() for step in range(len(self.batches))])
        size, longest = task.model.config.vocabulary_size, max(CAUSAL_ORDERS.values())
        baselines = {}
        for suffix, rows in (("", stream), ("_tokens_read", read)):
            model = KneserNey(rows, order=longest, vocabulary_size=size)
            for name, order in CAUSAL_ORDERS.items():
                metric = end_metric(_nats(task, model, order), exact, task.metric)
                baselines[name + suffix] = Baseline(tokens=rows[:, 1:].size, **metric)
        return baselines


def _nats(task: Task, model: KneserNey, order: int) -> UnitSums:
    """Computes -log p of the targets of each of the task's windows."""
    totals, counts = [], []
    for inputs, labels in zip(task.texts[0].inputs, task.texts[0].labels, strict=True):
        places = np.flatnonzero(labels >= 0)
        before = np.pad(inputs, (order - 1, 0), constant_values=UNKNOWN)
        contexts = before[places[:, None] + np.arange(1, order)]
        probabilities = model.probabilities(contexts, np.array(labels[places]))
        totals.append(-np.log(probabilities).sum())
        counts.append(float(len(places)))
    return UnitSums(np.array(totals), np.array(counts))


@dataclass(frozen=True, eq=False)
class MaskedCounts:
    """Predicts masked tokens by n-grams on both sides, of all training sequences.

    A token w between l and r has the score p(w | l) p(r | l w), of as many tokens on each side as
    the n-grams span; a <mask> nearby ends them. A model that looks at the token t that stands in
    the gap multiplies by the probability that masking leaves t there: of the masked tokens one in
    ten is kept and one in ten replaced by a random token.
    """

    training: MaskedSequences

    def __call__(self, task: Task, exact: UnitSums) -> dict[str, Baseline]:
        """Returns each model's error on the task's masked tokens, with its paired interval."""
        inputs, labels = (x.numpy() for x in task.texts[0].take(range(len(task.texts[0].inputs))))
        rows, columns = np.nonzero(labels >= 0)
        targets, visible = labels[rows, columns], inputs[rows, columns]
        counted = np.concatenate([np.asarray(source) for source in self.training.sources])
        size = self.training.vocabulary_size
        model = KneserNey(counted, order=CLOZE_ORDER, vocabulary_size=size)
        unmasked = np.where(inputs == self.training.mask_token, UNKNOWN, inputs)
        wide = CLOZE_ORDER - 1
        padded = np.pad(unmasked, ((0, 0), (wide, wide)), constant_values=UNKNOWN)
        around = padded[rows[:, None], columns[:, None] + np.arange(2 * wide + 1)]
        left, right = around[:, :wide], around[:, wide + 1 :]
        candidates = self._candidates(model, left[:, -1], right[:, 0], visible)
        special = np.isin(candidates, self.training.special_tokens)  # never asked for
        likely = self._log_unigram(model)[candidates]
        unchanged = self._log_unchanged(candidates, visible)
        near = log_likelihood(model, left[:, -1:], candidates, right[:, :1])
        far = log_likelihood(model, left, candidates, right)
        scores = {
            "unigram": likely,
            "shown_token": likely + unchanged,
            "both_neighbours": near,
            "4grams": far,
            "4grams_shown_token": far + unchanged,
        }
        units = np.bincount(rows, minlength=len(labels)).astype(np.float64)
        baselines = {}
        for name, score in scores.items():
            best = np.where(special, -np.inf, score).argmax(axis=1)
            chosen = candidates[np.arange(len(rows)), best]
            missed = np.bincount(rows, chosen != targets, len(labels)).astype(np.float64)
            metric = end_metric(UnitSums(missed, units), exact, task.metric)
            baselines[name] = Baseline(tokens=counted.size, **metric)
        return baselines

    def _log_unigram(self, model: KneserNey) -> NDArray[np.float64]:
        """Computes log p(w) of every token, (V,); -inf for special tokens."""
        tokens = np.arange(model.vocabulary_size)
        scores = np.log(model.probabilities(tokens[:, None][:, :0], tokens))
        scores[self.training.special_tokens] = -np.inf
        return scores

    def _log_unchanged(self, candidates: Tokens, visible: Tokens) -> Probabilities:
        """Computes log p(visible token | candidate), up to a constant; 0 where it is the mask."""
        training = self.training
        ordinary = training.vocabulary_size - len(set(training.special_tokens))
        unmasked = (visible != training.mask_token)[:, None]
        same = candidates == visible[:, None]
        return np.where(unmasked, np.log(RANDOM_OR_KEPT * (same + 1 / ordinary)), 0.0)

    def _candidates(self, model: KneserNey, left: Tokens, right: Tokens, visible: Tokens) -> Tokens:
        """Chooses the tokens of each gap that are scored, (gaps, K), in order of their numbers.

        Among them are the most frequent token and the one that stands in the gap.
        """
        likely = self._log_unigram(model)
        best = []
        for block in _neighbour_scores(model, left, right):
            block[:, self.training.special_tokens] = -1.0
            count = min(CANDIDATES, block.shape[1])
            best.append(np.argpartition(-block, count - 1, axis=1)[:, :count])
        special = np.isin(visible, self.training.special_tokens)
        ordinary = np.where(special, likely.argmax(), visible)
        frequent = np.full(len(visible), likely.argmax())
        return np.sort(np.column_stack([frequent, ordinary, np.concatenate(best)]), axis=1)


def _neighbour_scores(model: KneserNey, left: Tokens, right: Tokens) -> Iterator[Probabilities]:
    """Yields p(w | left) p(right | w) of every token w, (gaps, V), some gaps at a time."""
    size, pairs, words = model.vocabulary_size, model.orders[1], model.orders[0].keys
    unigram = model.probabilities(np.full((size, 1), UNKNOWN), np.arange(size))
    rest = np.ones(size)
    rest[words[: len(pairs.highest.rest)]] = pairs.highest.rest
    contexts, following = np.divmod(pairs.keys, size)
    places = words[contexts], following
    discounted = csr_array((pairs.highest.discounted, places), shape=(size, size))
    by_following = discounted.tocsc()
    for start in range(0, len(left), GAPS_AT_ONCE):
        before, behind = (side[start : start + GAPS_AT_ONCE] for side in (left, right))
        forward = discounted[before].toarray() + np.outer(rest[before], unigram)
        backward = by_following[:, behind].toarray().T + np.outer(unigram[behind], rest)
        forward[before == UNKNOWN], backward[behind == UNKNOWN] = unigram, 1.0
        yield forward * backward
