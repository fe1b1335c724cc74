"""The interval behind a verdict holds the mean effect in a SIMULATED crossed design.

Every training reads the same units of text. The effect in unit u of training j is a_j + b_u + c_ju,
the mean effect 0; the units' noise differs. `python tests/report/test_interval.py` prints the table
of docs/statistics.md.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import stdtrit

from value_aware_study.report.claim import Effect, Spread, margin, over_trainings

Array = NDArray[np.float64]
TIMES = 3000
WITHIN = 3 * np.sqrt(0.95 * 0.05 / TIMES)  # Monte-Carlo error of a share of 95%
# Standard deviation of a training's mean by text b, training a, and their interaction c
REGIMES = {
    "text alone": (1.0, 0.0, 0.0),
    "trainings alone": (0.0, 1.0, 0.0),
    "text and trainings": (1.0, 1.0, 0.0),
    "text × 3": (3.0, 1.0, 0.0),
    "trainings × 3": (1.0, 3.0, 0.0),
    "interaction alone": (0.0, 0.0, 1.0),
    "all three": (1.0, 1.0, 1.0),
    "mostly interaction": (0.3, 0.5, 1.0),
}
# Trainings and units; a single training has the spread of three others.
DESIGNS = ((3, 96), (3, 64), (3, 24), (1, 96))
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return random.standard_normal(shape)


def heavy(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return random.standard_t(3, shape) / np.sqrt(3)


def skewed(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return random.exponential(size=shape) - 1


# How units (text and interaction) and trainings are drawn, with a standard deviation of 1
NOISE: dict[str, tuple[Draw, Draw]] = {
    "normal": (normal, normal),
    "heavy tails": (heavy, normal),
    "trainings with heavy tails": (heavy, heavy),
    "skewed": (skewed, normal),
}
# Noise for which the rule was chosen; under the others no rule of the three holds 95%
HELD = ("normal", "heavy tails")


def simulated(
    trainings: int, units: int, regime: str, noise: str, times: int = TIMES
) -> tuple[Array, Array]:
    """Draws effects (times, trainings, units), and their standard deviation over trainings."""
    random, (of_text, of_trainings) = np.random.default_rng(7), NOISE[noise]
    text, training, interaction = REGIMES[regime]
    scale = np.exp(random.normal(0, 0.5, (times, 1, units)) - 0.25) * np.sqrt(units)
    made = trainings if trainings > 1 else 4
    both = text * of_text(random, (times, 1, units))
    both = both + interaction * of_text(random, (times, made, units))
    effects = training * of_trainings(random, (times, made, 1)) + scale * both
    measured = effects if trainings > 1 else effects[:, 1:]
    return effects[:, :trainings], measured.mean(axis=2).std(axis=1, ddof=1)


def rules(effects: Array, spread: Array) -> dict[str, Array]:
    """Computes half the width of each candidate's interval."""
    _, trainings, units = effects.shape
    seeds = max(trainings, 3)
    of_training = spread / np.sqrt(trainings)
    errors = effects.std(axis=2, ddof=1) / np.sqrt(units)
    pooled = np.sqrt((errors**2).mean(axis=1))
    error = effects.mean(axis=1).std(axis=1, ddof=1) / np.sqrt(units)
    t, t_training = (stdtrit(count - 1, 0.975) for count in (units, seeds))
    variance = error**2 + of_training**2
    freedom = variance**2 / (error**4 / (units - 1) + of_training**4 / (seeds - 1))
    return {
        "each training's error": np.hypot(t * pooled, t_training * of_training),
        "error of the mean": np.hypot(t * error, t_training * of_training),
        "Satterthwaite": stdtrit(freedom, 0.975) * np.sqrt(variance),
    }


def coverage(
    trainings: int, units: int, regime: str, noise: str, times: int = TIMES
) -> tuple[Array, Array]:
    """Returns the share of intervals that hold 0, and their median width over the first's."""
    effects, spread = simulated(trainings, units, regime, noise, times)
    halves = np.stack(list(rules(effects, spread).values()))
    held = np.abs(effects.mean(axis=(1, 2))) < halves
    return held.mean(axis=1), np.median(halves / halves[0], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(("trainings", "units"), DESIGNS)
def test_the_rule_holds_95_of_100_effects_in_every_regime(trainings: int, units: int) -> None:
    for regime, noise in product(REGIMES, HELD):
        (_, held, _), _ = coverage(trainings, units, regime, noise)
        assert held > 0.95 - WITHIN, (regime, noise)


@pytest.mark.parametrize(("trainings", "units"), DESIGNS)
def test_a_finding_has_the_interval_of_the_rule(trainings: int, units: int) -> None:
    effects, spread = simulated(trainings, units, "all three", "normal", 1)
    made = [[Effect("what", "elu", "points", of_units, np.ones(units))] for of_units in effects[0]]
    published = Spread(float(spread[0]), 3, "hours")
    (finding,) = over_trainings(made, {("what", "elu"): published})
    half = rules(effects, spread)["error of the mean"][0]
    assert finding.low is not None and finding.high is not None
    assert (finding.high - finding.low) / 2 == pytest.approx(half)
    error = effects[0].mean(axis=0).std(ddof=1) / np.sqrt(units)
    assert margin(error, units, finding.spread, trainings) == pytest.approx(half)


def main() -> None:
    for noise, regime in product(NOISE, REGIMES):
        cells = [coverage(*design, regime, noise, 20_000) for design in DESIGNS]
        held, width = (np.array([cell[place] for cell in cells]) for place in (0, 1))
        ends = ", ".join(
            f"{100 * low:.1f} to {100 * high:.1f}"
            for low, high in zip(held.min(axis=0), held.max(axis=0), strict=True)
        )
        print(f"{noise}, {regime}: {ends}; width {np.round(width[:3].mean(axis=0), 2)}")


if __name__ == "__main__":
    main()
