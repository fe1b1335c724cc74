"""The survey's claims about time and memory, each answered from our measurements alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median

import pandas as pd

from value_aware_study.benchmarking.ratio import Ratio
from value_aware_study.report.claim import VERDICTS, Answer, Finding
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.benchmark import (
    DENSE,
    FIT_FROM,
    TRAINING,
    Measurements,
    paired,
)

EQUAL = 1.25
"""Two costs within this factor of each other count as about equal."""
FLAT = 2.0
"""A cost that grows by less than this over all lengths counts as nearly flat."""
SHORT = (128, 256)
EQUAL_UP_TO = 512
"""Tokens up to which the survey calls dense attention about equal."""
QUANTITIES = {"milliseconds": "time", "peak_mib": "peak memory"}
SUFFIXES = {"eager": "", "fused": " (Beside PyTorch's fused dense attention.)"}
RATIOS = (
    "Ratios of times are taken round by round: the median and, in brackets, its 95% interval (sign "
    "test). A finding whose interval holds its threshold is undecided. Memory is measured once."
)
LIMIT = (
    "The survey measured on a GPU (RTX 3090). These verdicts are of a CPU, where other things "
    "cost: they neither confirm nor refute its claims on a GPU."
)


Find = Callable[[Measurements, str], Iterator[Finding]]


def answers(measured: Measurements) -> list[Answer]:
    """Answers every claim; one has no findings if its methods or lengths were not measured.

    The survey's dense attention held all weights (eager); claims about it are answered beside
    PyTorch's fused one too.
    """
    return [
        Answer(claim + SUFFIXES[dense], list(find(measured, dense)))
        for claim, (find, beside) in CLAIMS.items()
        for dense in beside
    ]


def dense_about_equal(measured: Measurements, dense: str) -> Iterator[Finding]:
    """Compares dense attention with the median of all other methods, up to 512 tokens."""
    for quantity, name in QUANTITIES.items():
        ratios = {}
        for length, costs in measured.rounds(TRAINING, quantity).items():
            others = [costs[m] for m in measured.efficient() if m in costs]
            if length <= EQUAL_UP_TO and dense in costs and others:
                middle = [median(costs) for costs in zip(*others, strict=True)]
                ratios[length] = paired(costs[dense], middle)
        if ratios:
            label = measured.label(dense)
            sentence = (
                f"{label[:1].upper()}{label[1:]} needs {_series(ratios)} tokens the {name} of "
                f"the median of the other methods ({1 / EQUAL:g} to {EQUAL:g} counts as equal)."
            )
            yield Finding(sentence, _every(map(_equal, ratios.values())))


def all_beat_dense(measured: Measurements, dense: str) -> Iterator[Finding]:
    """Counts the methods that need less than dense attention at the longest length."""
    for quantity, name in QUANTITIES.items():
        by_length = measured.rounds(TRAINING, quantity)
        length = max((n for n in by_length if dense in by_length[n]), default=0)
        if length <= EQUAL_UP_TO:
            continue
        costs = by_length[length]
        ratios = {m: paired(costs[m], costs[dense]) for m in measured.efficient() if m in costs}
        sides = {m: ratio.side() for m, ratio in ratios.items()}
        less = f"{list(sides.values()).count('below')} of {len(sides)} methods"
        rest = ""
        for side, word in (("above", "not"), ("undecided", "undecided:")):
            names = [f"{measured.label(m)} {ratios[m]} times" for m in sides if sides[m] == side]
            rest += f"; {word} {', '.join(names)}" if names else ""
        label = measured.label(dense)
        sentence = f"At {length:,} tokens {less} need less {name} than {label}{rest}."
        yield Finding(sentence, _every(_is(side, "below") for side in sides.values()))


def linformer_worst(measured: Measurements, dense: str) -> Iterator[Finding]:
    """Ranks the growth from 512 tokens to the longest length among the efficient methods."""
    for variant in [m for m in measured.efficient() if m.startswith("linformer")]:
        for quantity, name in QUANTITIES.items():
            growth = _growth_from(measured, EQUAL_UP_TO, quantity)
            if variant in growth:
                yield _rank(measured, variant, growth, f"{name} grows")


def nystrom_worst_short(measured: Measurements, dense: str) -> Iterator[Finding]:
    """Ranks the cost at 128 and 256 tokens among all methods."""
    for quantity, name in QUANTITIES.items():
        by_length = measured.rounds(TRAINING, quantity)
        for length in SHORT:
            costs = by_length.get(length, {})
            if "nystrom" in costs and dense in costs:
                relative = {m: _quotients(costs[m], costs[dense]) for m in costs}
                place = f"at {length} tokens the {name}, over {measured.label(dense)}'s, is"
                yield _rank(measured, "nystrom", relative, place)


def fourier_flat(measured: Measurements, dense: str) -> Iterator[Finding]:
    """Measures the growth of the Fourier layer over all lengths, and its lead at each."""
    for quantity, name in QUANTITIES.items():
        by_length = measured.rounds(TRAINING, quantity)
        by_length = {n: costs for n, costs in by_length.items() if "fourier_mixing" in costs}
        if len(by_length) < 2:
            continue
        first, last = min(by_length), max(by_length)
        growth = paired(by_length[last]["fourier_mixing"], by_length[first]["fourier_mixing"])
        yield Finding(
            f"From {first:,} to {last:,} tokens, {last / first:.3g} times as many, its {name} "
            f"grows {growth} times (below {FLAT:g} times counts as nearly flat).",
            _is(growth.side(FLAT), "below"),
        )
        yield _leads(by_length, name)


def _leads(by_length: dict[int, dict[str, list[float]]], name: str) -> Finding:
    leads = {}
    for length, costs in by_length.items():
        others = [costs[method] for method in costs if method != "fourier_mixing"]
        if others:
            leads[length] = paired(min(others, key=median), costs["fourier_mixing"])
    first = [length for length, ratio in leads.items() if ratio.side() == "above"]
    sentence = (
        f"It needs the least {name} of all methods at {len(first)} of {len(leads)} lengths; the "
        f"best of the others needs {_series(leads)} tokens as much."
    )
    return Finding(sentence, _every(_is(ratio.side(), "above") for ratio in leads.values()))


def reformer_pays_late(measured: Measurements, dense: str) -> Iterator[Finding]:
    """Compares Reformer with dense attention: the layer to 2,048 tokens, attention beyond."""
    for quantity, name in QUANTITIES.items():
        layer = _over_dense(measured, TRAINING, quantity, dense)
        early = {length: ratio for length, ratio in layer.items() if length <= FIT_FROM}
        if early:
            yield Finding(
                f"A layer with Reformer needs {_series(early)} tokens {measured.label(dense)}'s "
                f"{name}.",
                _every(_is(ratio.side(), "above") for ratio in early.values()),
            )
        late = _over_dense(measured, "attention", quantity, dense)
        late = {length: ratio for length, ratio in late.items() if length > FIT_FROM}
        if late:
            yield Finding(
                f"Reformer alone, forward, needs {_series(late)} tokens {measured.label(dense)}'s "
                f"{name}.",
                _is(late[max(late)].side(), "below"),
            )


def _over_dense(measured: Measurements, name: str, quantity: str, dense: str) -> dict[int, Ratio]:
    return {
        length: paired(costs["reformer"], costs[dense])
        for length, costs in measured.rounds(name, quantity).items()
        if "reformer" in costs and all(costs.get(dense, [0.0]))
    }


def _growth_from(measured: Measurements, first: int, quantity: str) -> dict[str, list[float]]:
    """Divides the cost at the longest length by that at `first`, by method."""
    by_length = measured.rounds(TRAINING, quantity)
    last = max(by_length, default=first)
    if last <= first or first not in by_length:
        return {}
    short, long = by_length[first], by_length[last]
    return {
        m: _quotients(long[m], short[m])
        for m in measured.efficient()
        if m in long and all(short.get(m, [0.0]))
    }


def _rank(
    measured: Measurements, method: str, values: dict[str, list[float]], what: str
) -> Finding:
    """Tells the rank of a method from the largest value down; open if rounds do not decide."""
    order = sorted(values, key=lambda m: -median(values[m]))
    place, worst = order.index(method) + 1, order[0]
    rival = next((m for m in order if m != method), method)
    found = f"{measured.label(method)}: {what} {median(values[method]):.3g} times, "
    if place == 1:
        apart = rival == method or paired(values[method], values[rival]).side() == "above"
        found += f"the most of {len(order)} methods"
        rest = "" if apart else f", not told apart from {measured.label(rival)}"
        return Finding(f"{found}{rest}.", True if apart else None)
    apart = paired(values[worst], values[method]).side() == "above"
    found += f"rank {place} of {len(order)} methods from the largest down; the largest, "
    found += f"{measured.label(worst)}'s, is {median(values[worst]):.3g} times"
    found += "." if apart else ", which is not told apart."
    return Finding(found, False if apart else None)


def _quotients(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _is(side: str, wanted: str) -> bool | None:
    return None if side == "undecided" else side == wanted


def _equal(ratio: Ratio) -> bool | None:
    """Tells whether a ratio lies within 1 / EQUAL to EQUAL."""
    sides = ratio.side(1 / EQUAL), ratio.side(EQUAL)
    if sides == ("above", "below"):
        return True
    return False if sides[0] == "below" or sides[1] == "above" else None


def _every(held: Iterable[bool | None]) -> bool | None:
    """Returns True where all hold, False where one does not, else None."""
    found = set(held)
    return False if False in found else None if None in found else True


def _series(ratios: dict[int, Ratio]) -> str:
    """Writes "0.9, 1.1 (1 to 1.2) and 1.3 times at 128, 256 and 512" """
    values = _listed([str(ratio) for ratio in ratios.values()])
    return f"{values} times at {_listed([f'{length:,}' for length in ratios])}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


EAGER = DENSE[:1]
CLAIMS: Mapping[str, tuple[Find, Sequence[str]]] = {
    "Dense attention performs about like the other methods up to 512 tokens.": (
        dense_about_equal,
        DENSE,
    ),
    "For longer sequences all methods are more efficient than dense attention.": (
        all_beat_dense,
        DENSE,
    ),
    "Linformer does not scale as well as the other efficient methods.": (linformer_worst, EAGER),
    "Nyströmformer is the most inefficient method at 128 and 256 tokens.": (
        nystrom_worst_short,
        EAGER,
    ),
    "FNet is almost independent of the length, and ahead of every other method.": (
        fourier_flat,
        EAGER,
    ),
    "Reformer becomes more efficient only for very long inputs (over 2,048).": (
        reformer_pays_late,
        DENSE,
    ),
}
"""Claim of the survey in our words -> the function that looks for findings, and the dense
attentions that they are made beside."""


def survey_claims(measured: Measurements) -> Exhibit:
    """Shows every claim of the survey, its verdict, and the sentences that it follows from."""
    found = answers(measured)
    rows = pd.DataFrame(
        {
            "claim": [answer.claim for answer in found],
            "verdict": [answer.verdict for answer in found],
            "measured here": [
                " ".join(f"{one.mark} {one.sentence}" for one in answer.findings)
                for answer in found
            ],
        }
    )
    return Exhibit(
        "survey_claims",
        "The survey's claims, measured here",
        f"Verdicts {measured.where}, no firmer than their intervals.",
        [VERDICTS, RATIOS if measured.on_gpu else f"{LIMIT} {RATIOS}", measured.setting],
        table=Table(rows, rows),
    )
