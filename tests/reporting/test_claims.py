"""Verdicts from SYNTHETIC records: unit totals with the mean and the spread that a test needs."""

import csv
import io

import numpy as np
import pytest

from value_aware_study.reporting.claim import Answer, Finding
from value_aware_study.reporting.claims import CLAIMS, about, answers, claims_csv

UNITS = 30
HOLDS, IN_PART, NOT_HERE, OPEN = "holds", "in part", "not at this scale", "undecided"
KERNELS = ("exponential", "polynomial", "elu")
BY_WEIGHT, BY_OUTPUT = "optimal_v_oblivious", "optimal_v_aware"


def cell(approximation, mean, noise=0.0, **parameters):
    """100 targets a unit; `noise` moves every other unit's mean loss up and the rest down."""
    means = mean + noise * np.resize([1.0, -1.0], UNITS)
    return {
        "approximation": approximation,
        "parameters": parameters,
        "unit_totals": (100 * means).tolist(),
        "unit_counts": [100.0] * UNITS,
        "largest_error": 1e-6,
    }


def record(model, task, cells, kernel="exponential", **more):
    metric = "perplexity" if task == "causal" else "error"
    head = {"model": model, "task": task, "kernel": kernel, "length": 512, "head_dim": 64}
    return head | {"metric": metric, "scale": "synthetic", "unit": "unit", "cells": cells} | more


def causal(kernel, *cells, exact=3.0, **more):
    return record(f"causal_{kernel}", "causal", [cell("exact", exact), *cells], kernel, **more)


def masked(name, *cells, exact=0.5, **more):
    return record(f"masked_{name}", "masked", [cell("exact", exact), *cells], **more)


def verdict(records, words):
    (answer,) = (answer for answer in answers(records) if words in answer.claim)
    return answer.verdict


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([], "not measured"),
        ([True, True], HOLDS),
        ([True, False], IN_PART),
        ([True, None], IN_PART),
        ([False, False], NOT_HERE),
        ([False, None], NOT_HERE),
        ([None], OPEN),
    ],
)
def test_a_verdict_is_no_firmer_than_its_findings(held, expected):
    assert Answer("claim", [Finding("s", holds) for holds in held]).verdict == expected


# How far the first kernel's and the others' loss is from what it is compared with, and its noise.
@pytest.mark.parametrize(
    ("first", "others", "noise", "expected"),
    [
        (0.1, 0.1, 0.1, HOLDS),  # half an interval is 0.04
        (0.01, 0.01, 0.1, OPEN),
        (-0.1, -0.1, 0.1, NOT_HERE),
        (-0.1, 0.1, 0.1, IN_PART),
    ],
)
@pytest.mark.parametrize("words", ["One value-aware key", "65 keys chosen by weight", "A window"])
def test_a_claim_over_kernels_needs_all_of_them_beyond_their_intervals(
    words, first, others, noise, expected
):
    """Value-aware below by weight, 65 by weight above exact, and a window above both."""
    records = []
    for kernel, lost in zip(KERNELS, (first, others, others), strict=True):
        one, rest = cell(BY_OUTPUT, 4.0 - lost, noise, r=1), cell(BY_WEIGHT, 4.0, r=1)
        some = cell(BY_WEIGHT, 3.0 + lost, noise, r=65)
        window, by_weight = cell("sliding_window", 3 + lost, noise, r=4), cell(BY_WEIGHT, 3, r=4)
        records.append(causal(kernel, one, rest, some, window, by_weight))
    assert verdict(records, words) == expected


def test_the_masked_models_are_held_to_the_first_claim_too():
    good, bad = cell(BY_OUTPUT, 0.6, 0.01, r=1), cell(BY_WEIGHT, 0.7, r=1)
    assert verdict([masked("long", good, bad), masked("short", good, bad)], "One value") == HOLDS
    turned = masked("short", cell(BY_OUTPUT, 0.7, r=1), cell(BY_WEIGHT, 0.6, 0.01, r=1))
    assert verdict([masked("long", good, bad), turned], "One value") == IN_PART


@pytest.mark.parametrize(("error", "expected"), [(1e-6, HOLDS), (1e-3, NOT_HERE)])
def test_head_size_and_one_is_exact_to_rounding_only(error, expected):
    exact = cell(BY_OUTPUT, 3.0, r=65) | {"largest_error": error}
    fewer = cell(BY_OUTPUT, 3.0, r=64) | {"largest_error": 1.0}
    assert verdict([causal("elu", exact, fewer)], "Head size") == expected


def kernels_losing(*lost, noise=0.0):
    """Exponential, polynomial, elu; noise on the last, all from different exact losses."""
    return [
        causal(kernel, *(cell(BY_WEIGHT, exact + more, moved, r=r) for r in (1, 65)), exact=exact)
        | {"skewness": [{"effective_keys": keys}]}
        for kernel, exact, more, moved, keys in zip(
            KERNELS, (3.0, 4.0, 5.0), lost, (0.0, 0.0, noise), (50, 200, 100), strict=True
        )
    ]


@pytest.mark.parametrize(
    ("lost", "noise", "expected"),
    [
        ((0.1, 0.9, 0.5), 0.1, HOLDS),
        ((0.5, 0.51, 0.5), 0.1, OPEN),
        ((0.9, 0.1, 0.5), 0.1, NOT_HERE),
        ((0.1, 0.3, 0.5), 0.1, IN_PART),
    ],
)
def test_the_order_of_kernels_is_of_what_is_lost_not_of_the_loss(lost, noise, expected):
    """polynomial, elu, exponential is also the order of their effective keys here."""
    records = kernels_losing(*lost, noise=noise)
    assert verdict(records, "polynomial loses most") == expected
    assert verdict(records, "Flatter attention") == expected


def test_kernels_are_compared_within_a_training_and_every_training_has_to_agree():
    once, again = kernels_losing(0.1, 0.9, 0.5), kernels_losing(0.9, 0.1, 0.5)
    for record in again:
        record["model"] += "_second"
    assert verdict(once, "polynomial loses most") == HOLDS
    assert verdict([*once, *again], "polynomial loses most") == IN_PART
    assert "trained once" in about(once) and "trained 2 times" in about([*once, *again])
    assert len(answers([*once, *again])[3].findings) == 8


def gap(layer, degree, keys, wider):
    errors = {"oblivious": {"4": 0.1 * wider}, "aware": {"4": 0.1}}
    cell = {"layer": layer, "kernel": "polynomial", "degree": degree, "own": False}
    return cell | {"effective_keys": keys, "same_first_key": 0.5, **errors}


@pytest.mark.parametrize(
    ("signs", "expected"),
    [((1, 1, 1, 1), HOLDS), ((-1, -1, -1, -1), NOT_HERE), ((1, -1, 1, -1), OPEN)],
)
def test_flatness_is_correlated_with_the_gap_layer_by_layer(signs, expected):
    cells = [
        gap(layer, degree, 100 - 10 * degree, 5 - sign * degree / 2 + 0.1 * layer)
        for layer, sign in enumerate(signs)
        for degree in (0, 2, 4, 6)
    ]
    # one kernel of each layer is out of order, more or less of them
    cells[0], cells[4] = {**cells[0], "effective_keys": 75}, {**cells[4], "effective_keys": 65}
    given = causal("elu") | {"skewness_gap": {"cells": cells}}
    assert verdict([given], "Flatter attention") == expected


def long_model(orf, few, many, noise=0.02):
    """Errors of ORF and LSH above those of 65 keys by weight; three seeds of each."""
    random = [("orf", orf, {"features": 256, "scaling": "paper"})]
    random += [("lsh", few, {"r": 32, "rounds": 4}), ("lsh", many, {"r": 128, "rounds": 16})]
    random += [("lsh", -many, {"r": 512, "rounds": 16}), ("lsh", -few, {"r": 16, "rounds": 4})]
    cells = [cell(BY_WEIGHT, 0.6, r=65)]
    for name, more, parameters in random:
        for seed, moved in enumerate((-0.1, 0.0, 0.1)):
            cells.append(cell(name, 0.6 + more + moved, noise, seed=seed, **parameters))
    return masked("long", *cells)


@pytest.mark.parametrize(
    ("orf", "few", "many", "expected"),
    [
        (0.1, 0.1, -0.1, (HOLDS, HOLDS)),
        (0.001, 0.001, -0.001, (OPEN, OPEN)),
        (-0.1, -0.1, 0.1, (NOT_HERE, NOT_HERE)),
        (0.1, -0.1, -0.1, (IN_PART, HOLDS)),
    ],
)
def test_orf_and_lsh_against_65_keys_are_means_over_seeds(orf, few, many, expected):
    """LSH: the largest settings up to the paper's; one that sees all 512 keys is not looked at."""
    records = [long_model(orf, few, many)]
    assert (verdict(records, "ORF and LSH"), verdict(records, "LSH of many")) == expected


@pytest.mark.parametrize(
    ("long", "noise", "expected"), [(0.4, 0.1, HOLDS), (0.49, 0.1, OPEN), (0.6, 0.1, NOT_HERE)]
)
def test_long_and_short_are_compared_on_the_same_masked_tokens(long, noise, expected):
    read = cell("exact", 0.5, noise)
    text = {name: read[name] for name in ("unit_totals", "unit_counts")}
    short = masked("short", exact=0.9) | {"longer_text": {"length": 512, **text}}
    assert verdict([masked("long", exact=long), short], "long sequences") == expected
    other = {**text, "unit_counts": [99.0] * UNITS}
    short["longer_text"] = other
    assert verdict([masked("long", exact=long), short], "long sequences") == "not measured"
    assert verdict([masked("long", exact=long), masked("short")], "long seq") == "not measured"


def test_without_records_nothing_is_measured_and_every_claim_is_listed():
    found = answers([causal("elu")])
    assert len(found) == len(CLAIMS) == 9
    assert {answer.verdict for answer in found} == {"not measured"}
    assert all(answer.published for answer in found)


def test_a_single_unit_decides_nothing():
    records = [causal("elu", cell(BY_OUTPUT, 3.5, r=1), cell(BY_WEIGHT, 4.0, r=1))]
    for given in records[0]["cells"]:
        given |= {"unit_totals": given["unit_totals"][:1], "unit_counts": [100.0]}
    assert verdict(records, "One value") == OPEN


def test_numbers_are_ratios_of_perplexities_and_points_of_error():
    both = [cell(BY_OUTPUT, 3.5, r=1), cell(BY_WEIGHT, 4.0, 0.1, r=1)]
    errors = [cell(BY_OUTPUT, 0.55, r=1), cell(BY_WEIGHT, 0.6, 0.1, r=1)]
    found = answers([causal("elu", *both), masked("long", *errors)])
    (line,) = found[0].lines()
    assert line.startswith("OVA 1 against OVO 1: elu × 0.607 (")
    assert ", masked long −5.00 points (" in line
    rows = list(csv.DictReader(io.StringIO(claims_csv(found))))
    assert float(rows[0]["estimate"]) == pytest.approx(np.exp(-0.5), rel=1e-5)
    assert rows[0]["holds"] == "yes" and float(rows[1]["estimate"]) == pytest.approx(-5)
    assert {row["claim"] for row in rows} == {claim.text for claim in CLAIMS}
