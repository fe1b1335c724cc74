"""What the survey says of time and memory, each claim answered from our measurements alone."""

import math
from collections.abc import Callable, Sequence
from statistics import median

from value_aware_attention.reporting.claim import Answer, Finding
from value_aware_attention.reporting.survey_records import FIT_FROM, Measurements

__all__ = ["CLAIMS", "answers"]

EQUAL = 1.25
"""Two costs within this factor of each other count as about equal."""
FLAT = 2.0
"""A cost that grows by less than this over all lengths counts as nearly flat."""
SHORT = (128, 256)
EQUAL_UP_TO = 512
TRAINING = "forward_backward"
QUANTITIES = {"milliseconds": "time", "peak_mib": "peak memory"}


def answers(measured: Measurements) -> list[Answer]:
    """Every claim with its findings; without the methods or lengths it needs, with none."""
    return [Answer(claim, find(measured)) for claim, find in CLAIMS.items()]


def dense_about_equal(measured: Measurements) -> list[Finding]:
    """Dense attention over the median of all other methods, at every length up to 512."""
    findings = []
    for quantity, name in QUANTITIES.items():
        ratios = {}
        for length in measured.lengths(TRAINING):
            costs = measured.at(TRAINING, length, quantity)
            others = [costs[m] for m in measured.efficient() if m in costs]
            if length <= EQUAL_UP_TO and "eager" in costs and others:
                ratios[length] = costs["eager"] / median(others)
        if ratios:
            holds = all(1 / EQUAL <= ratio <= EQUAL for ratio in ratios.values())
            sentence = (
                f"Dense attention needs {_series(ratios)} tokens the {name} of the median of the "
                f"other methods ({1 / EQUAL:g} to {EQUAL:g} counts as equal)."
            )
            findings.append(Finding(sentence, holds))
    return findings


def all_beat_dense(measured: Measurements) -> list[Finding]:
    """How many methods need less than dense attention at the longest length."""
    findings = []
    for quantity, name in QUANTITIES.items():
        dense = measured.by_length(TRAINING, "eager", quantity)
        length = max(dense, default=0)
        if length <= EQUAL_UP_TO:
            continue
        costs = measured.at(TRAINING, length, quantity)
        others = {m: costs[m] for m in measured.efficient() if m in costs}
        worse = [m for m in others if others[m] >= dense[length]]
        less = f"{len(others) - len(worse)} of {len(others)} methods"
        names = ", ".join(f"{measured.label(m)} {_ratio(others[m] / dense[length])}" for m in worse)
        rest = f"; not {names}" if worse else ""
        sentence = f"At {length:,} tokens {less} need less {name} than dense attention{rest}."
        findings.append(Finding(sentence, not worse))
    return findings


def linformer_worst(measured: Measurements) -> list[Finding]:
    """Growth from 512 tokens to the longest length, among the efficient methods."""
    findings = []
    for variant in [m for m in measured.efficient() if m.startswith("linformer")]:
        for quantity, name in QUANTITIES.items():
            growth = _growth_from(measured, EQUAL_UP_TO, quantity)
            if variant in growth:
                findings.append(_rank(measured, variant, growth, f"{name} grows"))
    return findings


def nystrom_worst_short(measured: Measurements) -> list[Finding]:
    """Cost at 128 and 256 tokens, among all methods."""
    findings = []
    for quantity, name in QUANTITIES.items():
        for length in SHORT:
            costs = measured.at(TRAINING, length, quantity)
            if "nystrom" in costs and "eager" in costs:
                relative = {m: cost / costs["eager"] for m, cost in costs.items()}
                place = f"at {length} tokens the {name}, over dense attention's, is"
                findings.append(_rank(measured, "nystrom", relative, place))
    return findings


def fourier_flat(measured: Measurements) -> list[Finding]:
    """Growth of the Fourier layer over all lengths, and its lead at each of them."""
    findings = []
    for quantity, name in QUANTITIES.items():
        costs = measured.by_length(TRAINING, "fourier_mixing", quantity)
        if len(costs) < 2:
            continue
        first, last = min(costs), max(costs)
        growth = costs[last] / costs[first]
        findings.append(
            Finding(
                f"From {first:,} to {last:,} tokens, {_ratio(last / first)} as many, its {name} "
                f"grows {_ratio(growth)} (below {_ratio(FLAT)} counts as nearly flat).",
                growth < FLAT,
            )
        )
        findings.append(_leads(measured, quantity, name, sorted(costs)))
    return findings


def _leads(measured: Measurements, quantity: str, name: str, lengths: Sequence[int]) -> Finding:
    leads = {}
    for length in lengths:
        costs = measured.at(TRAINING, length, quantity)
        own = costs.pop("fourier_mixing")
        leads[length] = min(costs.values(), default=math.inf) / own
    first = [length for length in leads if leads[length] > 1]
    sentence = (
        f"It needs the least {name} of all methods at {len(first)} of {len(leads)} lengths; the "
        f"best of the others needs {_series(leads)} tokens as much."
    )
    return Finding(sentence, len(first) == len(leads))


def reformer_pays_late(measured: Measurements) -> list[Finding]:
    """Reformer over dense attention: the layer up to 2,048 tokens, attention alone beyond."""
    findings = []
    for quantity, name in QUANTITIES.items():
        layer = _over_dense(measured, TRAINING, quantity)
        early = {length: ratio for length, ratio in layer.items() if length <= FIT_FROM}
        if early:
            holds = all(ratio >= 1 for ratio in early.values())
            sentence = (
                f"A layer with Reformer needs {_series(early)} tokens dense attention's {name}."
            )
            findings.append(Finding(sentence, holds))
        late = _over_dense(measured, "attention", quantity)
        late = {length: ratio for length, ratio in late.items() if length > FIT_FROM}
        if late:
            sentence = (
                f"Reformer alone, forward, needs {_series(late)} tokens dense attention's {name}."
            )
            findings.append(Finding(sentence, late[max(late)] < 1))
    return findings


def _over_dense(measured: Measurements, name: str, quantity: str) -> dict[int, float]:
    ours = measured.by_length(name, "reformer", quantity)
    dense = measured.by_length(name, "eager", quantity)
    return {length: ours[length] / dense[length] for length in sorted(ours) if dense.get(length)}


def _growth_from(measured: Measurements, first: int, quantity: str) -> dict[str, float]:
    """Cost at the longest length over that at `first`, of the methods measured at both."""
    last = max(measured.lengths(TRAINING), default=first)
    growth = {}
    for method in measured.efficient():
        costs = measured.by_length(TRAINING, method, quantity)
        if last > first and costs.get(first) and last in costs:
            growth[method] = costs[last] / costs[first]
    return growth


def _rank(measured: Measurements, method: str, values: dict[str, float], what: str) -> Finding:
    """Where a method stands from the largest value down."""
    order = sorted(values, key=lambda m: -values[m])
    place = order.index(method) + 1
    worst = order[0]
    top = "the most" if place == 1 else f"number {place} from the most"
    rest = "" if place == 1 else f"; {measured.label(worst)} has {_ratio(values[worst])}"
    sentence = (
        f"{measured.label(method)}: {what} {_ratio(values[method])}, {top} of {len(order)} "
        f"methods{rest}."
    )
    return Finding(sentence, place == 1)


def _ratio(value: float) -> str:
    return f"{value:.3g} times"


def _series(ratios: dict[int, float]) -> str:
    """ "0.9, 1.1 and 1.3 times at 128, 256 and 512" """
    values = _listed([f"{ratio:.3g}" for ratio in ratios.values()])
    return f"{values} times at {_listed([f'{length:,}' for length in ratios])}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


CLAIMS: dict[str, Callable[[Measurements], list[Finding]]] = {
    "Dense attention performs about like the other methods up to 512 tokens.": dense_about_equal,
    "For longer sequences all methods are more efficient than dense attention.": all_beat_dense,
    "Linformer does not scale as well as the other efficient methods.": linformer_worst,
    "Nyströmformer is the most inefficient method at 128 and 256 tokens.": nystrom_worst_short,
    "FNet is almost independent of the length, and ahead of every other method.": fourier_flat,
    "Reformer becomes more efficient only for very long inputs (over 2,048).": reformer_pays_late,
}
"""The survey's claims in our words, and how each is looked at."""
