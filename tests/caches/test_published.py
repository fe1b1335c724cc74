"""Cards of published cache methods keep the keys of their papers' formulas, computed slowly."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from pipelines.app import composed
from value_aware_attention.caches import AfterPrefix
from value_aware_attention.measurement.caches import cache_settings
from value_aware_study.cards import cache_cards

PREFIX, R, HEADS, GROUP, DIM = 48, 16, 3, 2, 8
SINKS, RECENT = [0, 1], [44, 45, 46, 47]
Weights = list[list[np.ndarray]]
"""Causal weights of the prefix, by head and query of its group: (rows, keys)"""


def published(name: str) -> AfterPrefix:
    """Builds the only setting of a method as the app does."""
    cfg = composed("caches", ["texts=recall", "scale=laptop"]).caches
    given = {key: OmegaConf.to_container(cfg[key]) for key in ("observed", "only", "after")}
    build = {name: cache_cards()[name].method}
    (setting,) = cache_settings(build, sizes=[R], prefix=PREFIX, rows=cfg.rows, **given)
    return setting.after


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = 2 * torch.randn(1, HEADS, GROUP, PREFIX + 4, DIM, generator=generator)
    key, value = (torch.randn(1, HEADS, 1, PREFIX + 4, DIM, generator=generator) for _ in range(2))
    return query, key, value


def causal_weights(query: torch.Tensor, key: torch.Tensor) -> Weights:
    def row(head: int, of: int, i: int) -> list[float]:
        products = [
            math.exp(float(query[0, head, of, i] @ key[0, head, 0, j]) / math.sqrt(DIM))
            for j in range(i + 1)
        ]
        return [one / sum(products) for one in products] + [0.0] * (PREFIX - 1 - i)

    return [
        [np.array([row(head, of, i) for i in range(PREFIX)]) for of in range(GROUP)]
        for head in range(HEADS)
    ]


def largest(scores: np.ndarray, kept: list[int]) -> list[int]:
    others = [j for j in np.argsort(-scores, kind="stable").tolist() if j not in kept]
    return sorted(kept + others[: R - len(kept)])


def snapkv(weights: Weights, head: int) -> list[int]:
    """Sums the weights of the last 32 queries, averaged over 5 neighbouring keys."""
    summed = sum(of[PREFIX - 32 :].sum(axis=0) for of in weights[head])
    summed[SINKS + RECENT] = 0
    padded = np.concatenate([[0, 0], summed, [0, 0]])
    pooled = np.array([padded[j : j + 5].mean() for j in range(PREFIX)])
    return largest(pooled, SINKS + RECENT)


def tova(weights: Weights, head: int) -> list[int]:
    """Averages the last query's weights over all heads of the layer."""
    return largest(sum(of[-1] for one in weights for of in one), [])


def h2o(weights: Weights, head: int) -> list[int]:
    """Sums the weights of every query; half of the keys are the latest."""
    summed = sum(of.sum(axis=0) for of in weights[head])
    return largest(summed, list(range(PREFIX - R // 2, PREFIX)))


@pytest.mark.parametrize("slow", [snapkv, tova, h2o])
def test_a_published_form_keeps_the_keys_of_its_formula(
    slow: Callable[[Weights, int], list[int]],
) -> None:
    query, key, value = drawn()
    after = published(slow.__name__)
    kept = after.method.keep(after.observe(query, key, value, is_causal=True)).indices[0]
    weights = causal_weights(query, key)
    assert kept.tolist() == [slow(weights, head) for head in range(HEADS)]
    assert len({tuple(one) for one in kept.tolist()}) == (1 if slow is tova else HEADS)


def test_kvzip_takes_the_largest_weight_of_the_whole_prefix_read_again() -> None:
    after = published("kvzip")
    assert (after.observed, after.method.aggregate) == ("repeat", "max")
    assert after.rows >= PREFIX
