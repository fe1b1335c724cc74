"""The drawing shows the keys that the library chooses."""

import numpy as np
import torch

from value_aware_attention.approximations import OptimalValueAware, OptimalValueOblivious
from value_aware_attention.kernels import Exponential
from value_aware_study.report.exhibits.drawing import (
    DRAWN_VALUES,
    DRAWN_WEIGHTS,
    by_weight,
    for_output,
)


def test_it_draws_the_choices_of_the_library() -> None:
    value, key = torch.tensor(DRAWN_VALUES), torch.tensor(DRAWN_WEIGHTS).log()[:, None]
    query, kernel = torch.ones(1, 1, dtype=torch.float64), Exponential(scale=1.0)
    assert (np.diff(DRAWN_WEIGHTS) < 0).all() and np.isclose(DRAWN_WEIGHTS.sum(), 1)
    for shares, method in (
        (by_weight(), OptimalValueOblivious(2)),
        (for_output(), OptimalValueAware(2, search="best")),
    ):
        chosen = method.select(query, key, value, kernel=kernel)
        expected = torch.zeros(len(DRAWN_VALUES), dtype=torch.float64)
        expected[chosen.indices[0]] = chosen.weights[0].double()
        np.testing.assert_allclose(shares, expected.numpy(), atol=1e-5)
