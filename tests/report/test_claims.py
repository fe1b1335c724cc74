"""Verdicts follow from SYNTHETIC records whose unit totals have a given mean and spread."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit
from synthetic import attention, ends, error, gap_cell, output_error, record, skewness

from value_aware_attention.measurement.record import Baseline, Cell
from value_aware_study.report.claim import Answer, Finding, Spread, margin
from value_aware_study.report.exhibits import claims
from value_aware_study.report.exhibits.claims import CLAIMS, about, answers
from value_aware_study.report.frame import Results
from value_aware_study.report.records import published_spreads

UNITS = 30
HOLDS, IN_PART, NOT_HERE, OPEN = "holds", "in part", "contradicted here", "undecided"
KERNELS = ("exponential", "polynomial", "elu")
BY_WEIGHT, BY_OUTPUT = "optimal_v_oblivious", "optimal_v_aware"


def cell(approximation, mean, noise=0.0, **parameters):
    """Builds a cell of 100 targets a unit; `noise` moves the units' losses up and down in turn."""
    return Cell(
        approximation=approximation,
        parameters=parameters,
        error=with_largest(1e-6),
        **ends(mean, mean, mean, mean) | units(mean, noise),
    )


def units(mean, noise=0.0, counts=100.0):
    means = mean + noise * np.resize([1.0, -1.0], UNITS)
    return {"unit_totals": tuple(100 * means), "unit_counts": (counts,) * UNITS}


def with_largest(largest):
    return error(0.0, 0.0, 0.0, (0.0,), largest_error=largest)


def causal(kernel, *cells, exact=3.0, **more):
    cells = [cell("exact", exact), *cells]
    return record(f"causal_{kernel}", "causal", kernel, 512, cells, **more)


def masked(name, *cells, exact=0.5, **more):
    cells = [cell("exact", exact), *cells]
    return record(f"masked_{name}", "masked", "exponential", 512, cells, **more)


def found_in(records):
    return answers(Results.of(records))


def verdict(records, words):
    """Returns a claim's verdict, without the number of comparisons."""
    (answer,) = (answer for answer in found_in(records) if words in answer.claim)
    return answer.verdict.partition(" (")[0]


@pytest.mark.parametrize(
    ("held", "expected", "verdict"),
    [
        ([], 0, "not measured"),
        ([True, True], 0, HOLDS),
        ([True, False], 0, IN_PART),
        ([True, None], 0, IN_PART),
        ([False, False], 0, NOT_HERE),
        ([False, None], 0, NOT_HERE),
        ([None], 0, OPEN),
        ([True], 5, "holds (1 of 5 compared)"),
        ([True, False], 5, "in part (2 of 5 compared)"),
        ([False], 2, "contradicted here (1 of 2 compared)"),
        ([True, True], 2, HOLDS),
        ([True, True], 1, HOLDS),
        ([], 5, "not measured"),
    ],
)
def test_a_verdict_is_no_firmer_than_its_findings_and_says_where_some_are_missing(
    held, expected, verdict
):
    findings = [Finding("s", holds) for holds in held]
    assert Answer("claim", findings, expected=expected).verdict == verdict


@pytest.mark.parametrize("scale", ["laptop", "hours"])
def test_the_published_verdicts_are_those_of_their_findings(scale):
    folder = Path(__file__).parents[2] / "results" / scale
    read = pd.read_csv(folder / "findings.csv", dtype=str, keep_default_na=False)
    held = read["holds"].map({"yes": True, "no": False, "": None})
    for claim in CLAIMS:
        rows = read[read["claim"] == claim.text]
        findings = [Finding("s", held[row]) for row in rows.index]
        alone = Answer(claim.text, findings, expected=claim.expected).verdict
        words = set(rows["verdict"].str.replace("not at this scale", NOT_HERE))  # the former word
        assert len(findings) == claim.expected and words == {alone}


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
@pytest.mark.parametrize(
    "words", ["One value-aware key", "65 keys chosen by weight", "A sliding window"]
)
def test_a_claim_over_kernels_needs_all_of_them_beyond_their_intervals(
    words, first, others, noise, expected
):
    """OVA lies below OVO, 65 keys by weight above exact attention, and a window above OVO."""
    records = []
    for kernel, lost in zip(KERNELS, (first, others, others), strict=True):
        aware, rest = cell(BY_OUTPUT, 4.0 - lost, noise, r=1), cell(BY_WEIGHT, 4.0, r=1)
        some = cell(BY_WEIGHT, 3.0 + lost, noise, r=65)
        window, by_weight = cell("sliding_window", 3 + lost, noise, r=4), cell(BY_WEIGHT, 3, r=4)
        records.append(causal(kernel, aware, rest, some, window, by_weight))
    assert verdict(records, words) == expected


def test_the_masked_models_are_held_to_the_first_claim_too():
    good, bad = cell(BY_OUTPUT, 0.6, 0.01, r=1), cell(BY_WEIGHT, 0.7, r=1)
    assert verdict([masked("long", good, bad), masked("short", good, bad)], "One value") == HOLDS
    turned = masked("short", cell(BY_OUTPUT, 0.7, r=1), cell(BY_WEIGHT, 0.6, 0.01, r=1))
    assert verdict([masked("long", good, bad), turned], "One value") == IN_PART


@pytest.mark.parametrize(("error", "expected"), [(1e-6, HOLDS), (1e-3, NOT_HERE)])
def test_head_size_and_one_is_exact_to_rounding_only(error, expected):
    exact = replace(cell(BY_OUTPUT, 3.0, r=65), error=with_largest(error))
    fewer = replace(cell(BY_OUTPUT, 3.0, r=64), error=with_largest(1.0))
    assert verdict([causal("elu", exact, fewer)], "Head size") == expected


def of_layers(gap_cells=None, keys=100):
    """Builds the measurement of layers: the effective keys and the skewness gap."""
    skew = (replace(skewness(1)[0], effective_keys=keys),)
    return (attention("elu", output_error(512, [1.0], {}, []), gap_cells, skew=skew),)


def kernels_losing(*lost, noise=0.0, keys=(50, 200, 100)):
    """Builds a record a kernel, of different exact losses; the last one is noisy."""
    return [
        causal(
            kernel,
            *(cell(BY_WEIGHT, exact + more, moved, r=r) for r in (1, 65)),
            exact=exact,
            attention=of_layers(keys=effective),
        )
        for kernel, exact, more, moved, effective in zip(
            KERNELS, (3.0, 4.0, 5.0), lost, (0.0, 0.0, noise), keys, strict=True
        )
    ]


@pytest.mark.parametrize(
    ("lost", "noise", "expected"),
    [
        ((0.1, 0.9, 0.5), 0.1, HOLDS),
        ((0.5, 0.5, 0.5), 0.1, OPEN),
        ((0.9, 0.1, 0.5), 0.1, NOT_HERE),
        ((0.1, 0.3, 0.5), 0.1, IN_PART),
    ],
)
def test_the_order_of_kernels_is_of_what_is_lost_not_of_the_loss(lost, noise, expected):
    """Their effective keys are ordered alike: polynomial, elu, exponential."""
    records = kernels_losing(*lost, noise=noise)
    assert verdict(records, "cost polynomial") == expected
    assert verdict(records, "Flatter attention") == expected


def renamed(records, name):
    return [replace(record, model=f"{record.model}_{name}") for record in records]


def test_two_kernels_of_which_either_is_flatter_in_some_training_are_open():
    once = kernels_losing(0.1, 0.9, 0.5)
    again = renamed(kernels_losing(0.1, 0.9, 0.5, keys=(50, 100, 200)), "second")
    (answer,) = (answer for answer in found_in([*once, *again]) if "Flatter" in answer.claim)
    findings = {finding.label: finding for finding in answer.findings}
    assert {finding.trainings for finding in findings.values()} == {2}
    assert findings["polynomial / exponential"].holds and findings["elu / exponential"].holds
    assert findings["polynomial / elu"].holds is None
    assert "trainings differ in which should be larger" in findings["polynomial / elu"].sentence


def test_kernels_are_compared_within_a_training_and_are_open_where_trainings_disagree():
    once, other = kernels_losing(0.1, 0.9, 0.5), kernels_losing(0.9, 0.1, 0.5)
    again = renamed(other, "second")
    assert verdict(once, "cost polynomial") == HOLDS
    assert verdict([*once, *again], "cost polynomial") == OPEN
    assert verdict([*once, *renamed(once, "second")], "cost polynomial") == HOLDS
    assert "cost polynomial" in (answer := found_in([*once, *again])[3]).claim
    assert len(answer.findings) == 4
    assert {finding.spread.seeds for finding in answer.findings} == {2}
    notes = [about(found_in(records)) for records in (once, [*once, *again])]
    assert (
        "Intervals: 13 over text alone. An interval over text alone is about one training run."
        in notes[0]
    )
    assert (
        "Intervals: 13 over text and 2 trainings." in notes[1]
        and "one training run" not in notes[1]
    )


def one_key(better, model=causal, name="elu", noise=0.1):
    """Builds a model that loses less with one key chosen for the output."""
    exact = 0.5 if model is masked else 3.0
    return model(
        name, cell(BY_OUTPUT, exact + 0.2 - better, noise, r=1), cell(BY_WEIGHT, exact + 0.2, r=1)
    )


def trainings_of(model, name, *better):
    first, second, third = (one_key(gain, model, name, 0.001) for gain in better)
    return [first, *renamed([second], "second"), *renamed([third], "third")]


def test_a_finding_has_one_interval_over_text_and_trainings_and_the_range_of_seeds():
    long = one_key(0.05, masked, "long", 0.01)
    answer = found_in([*trainings_of(causal, "elu", 0.10, 0.12, 0.11), long])[0]
    assert answer.verdict == "holds (2 of 5 compared)"
    line = "elu × 0.896 (0.874 to 0.918; seeds 0.887 to 0.905) ✓"
    assert answer.lines()[0].startswith(f"OVA 1 against OVO 1: {line}, masked long −5.00 points (")
    thrice, once = answer.findings
    alone = stdtrit(2.0, 0.975) * 0.01 * np.sqrt(1 / 3)  # three trainings, and next to no text
    assert np.log(thrice.high / thrice.low) == pytest.approx(2 * alone, rel=0.01)
    assert (thrice.over, once.over) == ("text and 3 trainings", "text alone")
    torn = found_in(trainings_of(causal, "elu", 0.10, 0.12, -0.11))[0]
    assert torn.verdict == "undecided (1 of 5 compared)"
    assert torn.findings[0].sentence.endswith("; seeds 0.887 to 1.116)")


def test_masked_models_of_a_second_training_are_compared_with_each_other():
    def pair(long, counts):
        text = Baseline(**ends(0.5, 0.5, 0.5, 0.5) | units(0.5, counts=counts), length=512)
        return masked("long", exact=long), masked("short", baselines={"longer_text": text})

    firsts, seconds = pair(0.40, 100.0), pair(0.41, 100.0)
    (both,) = found_in([*firsts, *renamed(seconds, "second")])[7].findings
    assert both.estimate == pytest.approx(-9.5) and both.spread.seeds == 2
    assert both.spread.deviation == pytest.approx(1 / np.sqrt(2))
    (other,) = found_in([*firsts, *renamed(pair(0.41, 99.0), "second")])[7].findings
    assert other.holds is None and "other targets" in other.sentence
    (alone,) = found_in([*firsts, *renamed(seconds[:1], "second")])[7].findings
    assert alone.over == "text alone"


def test_a_model_trained_once_has_the_published_spread_as_its_margin():
    once = one_key(0.1)
    spread = Spread(0.02, 3, "hours")
    results = Results.of([once], spreads={("OVA 1 against OVO 1", "elu"): spread})
    (finding,) = answers(results)[0].findings
    assert finding.over == "text, and training spread of hours" and finding.spread == spread
    half = margin(0.1 / np.sqrt(29), 30, spread, 1)
    assert np.log(finding.high) == pytest.approx(-0.1 + half)
    assert half > margin(0.1 / np.sqrt(29), 30, None, 1)
    _, findings = claims.claims(results)
    assert findings.table.data[["spread", "seeds"]].iloc[0].tolist() == [0.02, 3]
    assert findings.table.display["interval over"][0] == finding.over


def test_the_spread_of_a_published_run_is_read_from_its_findings_and_counts(tmp_path):
    def run(lost, keys):
        counted = {"5gram": Baseline(**ends(2, 2, 2, 2) | units(2.0), tokens=7)}
        models = kernels_losing(0.1, lost, 0.5)
        return [
            replace(item, baselines=counted, attention=of_layers(keys=keys + place))
            for place, item in enumerate(models)
        ]

    published = Results.of([*run(0.9, 50), *renamed(run(0.8, 60), "second")])
    folder = tmp_path / "hours"
    folder.mkdir()
    for exhibit in claims.claims(published):
        (folder / f"{exhibit.name}.csv").write_text(exhibit.table.csv())
    spreads = published_spreads(folder)
    assert {spread.of for spread in spreads.values()} == {"hours"}
    assert published_spreads(tmp_path / "none") == {}
    results = Results.of(run(0.7, 70), spreads=spreads)
    findings = [item for answer in answers(results) for item in answer.findings]
    assert {item.over for item in findings} == {"text, and training spread of hours"}
    assert {item.trainings for item in findings} == {1} and {
        item.spread.seeds for item in findings
    } == {2}
    moved = [
        item.spread.deviation for item in findings if item.label.startswith("polynomial / elu")
    ]
    assert moved[0] == pytest.approx(0.1 / np.sqrt(2))
    _, strength, _ = claims.claims(results)
    assert set(strength.table.data["seeds"]) == {2}
    for damaged in ("what,seeds\nx,3\n", "what,model,spread,seeds\nx,elu,y,3\n"):
        (folder / "findings.csv").write_text(damaged)
        with pytest.raises(ValueError, match=r"hours/findings\.csv is damaged .*restore it"):
            published_spreads(folder)


def satterthwaite(error, units, spread, trainings):
    """Computes the margin of the sum of the variances: the usual approximation, too small here."""
    training = spread.deviation**2 / trainings
    variance = error**2 + training
    freedom = variance**2 / (error**4 / (units - 1) + training**2 / (spread.seeds - 1))
    return stdtrit(freedom, 0.975) * np.sqrt(variance)


def held(margin, trainings, text, units=20, times=4000):
    """Returns the share of simulated intervals that hold the mean effect of all trainings, 0.

    `text` is the standard error over units; trainings deviate by 1 and share the text. One training
    has the spread of three others.
    """
    random, count = np.random.default_rng(7), 0
    for _ in range(times):
        effects, others = random.normal(size=trainings), random.normal(size=3)
        measured = effects if trainings > 1 else others
        of_text = random.normal(scale=text * np.sqrt(units), size=units)
        spread = Spread(measured.std(ddof=1), len(measured))
        half = margin(of_text.std(ddof=1) / np.sqrt(units), units, spread, trainings)
        count += abs(effects.mean() + of_text.mean()) < half
    return count / times


@pytest.mark.parametrize("trainings", [1, 2, 3])
@pytest.mark.parametrize("text", [0.02, 0.3, 1.0, 10.0])
def test_95_of_100_intervals_or_more_hold_the_mean_effect_of_all_trainings(trainings, text):
    assert 0.94 < held(margin, trainings, text) < 0.995


def test_degrees_of_freedom_after_satterthwaite_would_hold_too_few():
    assert held(satterthwaite, 2, 0.3) == pytest.approx(0.88, abs=0.01)


@pytest.mark.parametrize(
    ("signs", "expected"),
    [((1, 1, 1, 1), HOLDS), ((-1, -1, -1, -1), NOT_HERE), ((1, -1, 1, -1), OPEN)],
)
def test_flatness_is_correlated_with_the_gap_layer_by_layer(signs, expected):
    cells = [
        gap_cell(layer, degree, 100 - 10 * degree, {"4": 5 - sign * degree / 2 + 0.1 * layer})
        for layer, sign in enumerate(signs)
        for degree in (0, 2, 4, 6)
    ]
    # one kernel of each layer is out of order, more or less of them
    cells[0] = replace(cells[0], effective_keys=75)
    cells[4] = replace(cells[4], effective_keys=65)
    model = causal("elu", attention=of_layers(cells))
    assert verdict([model], "Flatter attention") == expected


def long_model(orf, few, many, noise=0.02):
    """Builds errors of ORF and LSH relative to 65 keys by weight, for three seeds."""
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
    """Of LSH, the largest settings up to the paper's count; one that sees all 512 keys does not."""
    records = [long_model(orf, few, many)]
    assert (verdict(records, "(ORF) and hashing"), verdict(records, "LSH of many")) == expected


@pytest.mark.parametrize(
    ("long", "noise", "expected"), [(0.4, 0.1, HOLDS), (0.49, 0.1, OPEN), (0.6, 0.1, NOT_HERE)]
)
def test_long_and_short_are_compared_on_the_same_masked_tokens(long, noise, expected):
    def on_text(counts):
        text = Baseline(**ends(0.5, 0.5, 0.5, 0.5) | units(0.5, noise, counts), length=512)
        return masked("short", exact=0.9, baselines={"longer_text": text})

    short, other = on_text(100.0), on_text(99.0)
    assert verdict([masked("long", exact=long), short], "long sequences") == expected
    records = [masked("long", exact=long), other]
    assert verdict(records, "long sequences") == OPEN
    assert (
        found_in(records)[7].lines()[0].endswith(": exact attention not compared: other targets ?")
    )
    assert verdict([masked("long", exact=long), masked("short")], "long seq") == "not measured"


def test_without_records_nothing_is_measured_and_every_claim_is_listed():
    answered = found_in([causal("elu")])
    assert len(answered) == len(CLAIMS) == 9
    assert {answer.verdict for answer in answered} == {"not measured"}
    assert all(answer.published for answer in answered)


def test_a_single_unit_decides_nothing():
    two = [cell(BY_OUTPUT, 3.5, r=1), cell(BY_WEIGHT, 4.0, r=1)]
    alone = [replace(pair, unit_totals=pair.unit_totals[:1], unit_counts=(100.0,)) for pair in two]
    assert verdict([causal("elu", *alone)], "One value") == OPEN
