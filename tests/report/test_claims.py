"""Verdicts follow from SYNTHETIC records whose unit totals have a given mean and spread."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit
from synthetic import attention, ends, error, gap_cell, output_error, record, skewness, with_cells

from tests.refusals import assert_refused
from value_aware_attention.records.record import Baseline, Cell
from value_aware_study.report.claim import (
    Answer,
    Effect,
    Finding,
    Spread,
    holm,
    margin,
    over_trainings,
    p_value,
)
from value_aware_study.report.exhibits import claims
from value_aware_study.report.exhibits.claims import CLAIMS, about, answers
from value_aware_study.report.frame import Results
from value_aware_study.report.records import published_spreads, published_verdicts

UNITS, HOLM = 30, "holds_after_holm"
HOLDS, OPPOSED, OPEN, UNTESTED = "holds", "opposed", "open", "not testable here"
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
    return record(f"causal_{kernel}", "causal", kernel, 512, [cell("exact", exact), *cells], **more)


def masked(name, *cells, exact=0.5, **more):
    return record(
        f"masked_{name}", "masked", "exponential", 512, [cell("exact", exact), *cells], **more
    )


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
        ([True, False, None], 0, OPPOSED),
        ([True, None], 0, OPEN),
        ([False, None], 0, OPPOSED),
        ([None], 0, OPEN),
        ([True], 5, "holds (1 of 5 compared)"),
        ([True, False], 5, "opposed (2 of 5 compared)"),
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
    untested = Answer("claim", findings, testable=False).verdict
    assert untested == (UNTESTED if held else "not measured")


def test_after_holm_only_what_it_leaves_decided_counts():
    sure, near, against = (
        Finding("s", holds, p_holm=p) for holds, p in ((True, 0.05), (True, 0.06), (False, 0.9))
    )
    assert [finding.mark for finding in (sure, near, against)] == ["✓", "(✓)", "(✗)"]
    answers = [Answer("claim", [sure, other]) for other in (near, against, sure)]
    verdicts = [(answer.verdict, answer.after_holm) for answer in answers]
    assert verdicts == [(HOLDS, OPEN), (OPPOSED, OPEN), (HOLDS, HOLDS)]


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order():
    for levels, corrected in (
        ([0.04, None, 0.01, 0.03, 0.011], [0.06, None, 0.04, 0.06, 0.04]),
        ([0.8, 0.9], [1.0, 1.0]),
    ):
        findings = holm([Finding("s", True, p=p) for p in levels])
        assert [finding.p_holm for finding in findings] == corrected


@pytest.mark.parametrize("spread", [None, Spread(0.3, 3), Spread(0.001, 3)])
@pytest.mark.parametrize("mean", [0.5, -0.3, 0.02])
def test_at_the_level_p_the_interval_ends_at_no_difference(spread, mean):
    p = p_value(mean, 0.05, 30, spread, 3)
    assert margin(0.05, 30, spread, 3, p) == pytest.approx(abs(mean), rel=1e-6)
    assert p_value(0.0, 0.05, 30, spread, 3) == 1.0
    assert p_value(1e9, 0.05, 30, spread, 3) == 1e-12


def test_the_published_verdicts_are_those_of_their_findings():
    folder = Path(__file__).parents[2] / "results" / "hours"
    read = pd.read_csv(folder / "findings.csv", dtype=str, keep_default_na=False)
    table = pd.read_csv(folder / "claims.csv", index_col="claim")
    held, firm = (read[name].map({"yes": True, "no": False, "": None}) for name in ("holds", HOLM))
    for claim in CLAIMS:
        rows, published = read[read["claim"] == claim.text], table.loc[claim.text]
        assert set(rows["verdict"]) == {published["verdict"]} and len(rows) >= claim.expected
        for decided, after in ((held, "verdict"), (firm, "after_holm")):
            findings = [Finding("s", decided[row]) for row in rows.index]
            assert Answer("c", findings).verdict == published[after] or (
                published[after] == UNTESTED and claim.premise
            )
        counts = [list(held[rows.index]).count(holds) for holds in (True, False)]
        assert counts == [published["decided_for"], published["decided_against"]]
        assert rows["agree"].astype(int).sum() == published["agree"]


# How far the first kernel's and the others' loss is from what it is compared with, and its noise.
@pytest.mark.parametrize(
    ("first", "others", "noise", "expected"),
    [
        (0.1, 0.1, 0.1, HOLDS),  # half an interval is 0.04
        (0.01, 0.01, 0.1, OPEN),
        (-0.1, -0.1, 0.1, OPPOSED),
        (-0.1, 0.1, 0.1, OPPOSED),
        (0.01, 0.1, 0.1, OPEN),
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


@pytest.mark.parametrize(("length", "compared"), [(256, [65, 32]), (512, [65])])
def test_the_papers_share_of_keys_is_asked_of_sequences_of_another_length(length, compared):
    cells = [cell(BY_WEIGHT, 3.1, r=r) for r in (32, 65)]
    claim = found_in([replace(causal("elu", *cells), length=length)])[2]
    whats = [f"OVO {r} against exact" for r in compared]
    assert [finding.what for finding in claim.findings] == whats


@pytest.mark.parametrize(("error", "expected"), [(1e-6, HOLDS), (1e-3, OPPOSED)])
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
            cell(BY_OUTPUT, exact, r=1),
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
        ((0.9, 0.1, 0.5), 0.1, OPPOSED),
        ((0.1, 0.3, 0.5), 0.1, OPPOSED),
        ((0.1, 0.505, 0.5), 0.1, OPEN),
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
    holds = {finding.label: finding.holds for finding in answer.findings}
    either = "polynomial / elu"
    assert holds == {either: None, "polynomial / exponential": True, "elu / exponential": True}
    (torn,) = (finding for finding in answer.findings if finding.label == either)
    assert torn.trainings == 2
    assert "trainings differ in which should be larger" in torn.sentence


def test_kernels_are_compared_within_a_training_and_are_open_where_trainings_disagree():
    once = kernels_losing(0.1, 0.9, 0.5)
    torn = [*once, *renamed(kernels_losing(0.9, 0.1, 0.5), "second")]
    assert verdict([*once, *renamed(once, "second")], "cost polynomial") == HOLDS
    answer = found_in(torn)[3]
    assert "cost polynomial" in answer.claim and answer.verdict.startswith(OPEN)
    assert [finding.spread.seeds for finding in answer.findings] == 6 * [2]
    alone, over_both = (about(found_in(records)) for records in (once, torn))
    assert "Intervals: 15 over text alone. An interval over text alone is about one t" in alone
    assert "Intervals: 15 over text and 2 trainings." in over_both
    assert "one training run" not in over_both


def one_key(better, model=causal, name="elu", noise=0.1):
    """Builds a model that loses less with one key chosen for the output."""
    exact = 0.5 if model is masked else 3.0
    return model(
        name, cell(BY_OUTPUT, exact + 0.2 - better, noise, r=1), cell(BY_WEIGHT, exact + 0.2, r=1)
    )


def short_on_longer_text(noise=0.0, counts=100.0):
    """Builds the short model with its errors on the long model's text."""
    text = Baseline(**ends(0.5, 0.5, 0.5, 0.5) | units(0.5, noise, counts), length=512)
    return masked("short", exact=0.9, baselines={"longer_text": text})


def trainings_of(model, name, *better):
    first, second, third = (one_key(gain, model, name, 0.001) for gain in better)
    return [first, *renamed([second], "second"), *renamed([third], "third")]


def test_a_finding_has_one_interval_over_text_and_trainings_and_the_range_of_seeds():
    long = one_key(0.05, masked, "long", 0.01)
    answer = found_in([*trainings_of(causal, "elu", 0.10, 0.12, 0.11), long])[0]
    assert answer.verdict == "holds (2 of 25 compared)"
    line = "elu × 0.896 (0.874 to 0.918; seeds 0.887 to 0.905) ✓"
    assert answer.lines()[0].startswith(f"OVA 1 against OVO 1: {line}, masked long −5.00 points (")
    thrice, once = answer.findings
    alone = stdtrit(2.0, 0.975) * 0.01 * np.sqrt(1 / 3)  # three trainings, and next to no text
    assert np.log(thrice.high / thrice.low) == pytest.approx(2 * alone, rel=0.01)
    assert (thrice.over, once.over) == ("text and 3 trainings", "text alone")
    torn = found_in(trainings_of(causal, "elu", 0.10, 0.12, -0.11))[0]
    assert torn.verdict == "open (1 of 25 compared)" and torn.findings[0].agree == 2
    assert torn.findings[0].sentence.endswith("; seeds 0.887 to 1.116)")


def test_masked_models_of_a_second_training_are_compared_with_each_other():
    def pair(long, counts):
        return masked("long", exact=long), short_on_longer_text(counts=counts)

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
    half = margin(0.1 / np.sqrt(29), 30, spread, 1)
    assert np.log(finding.high) == pytest.approx(-0.1 + half)
    assert half > margin(0.1 / np.sqrt(29), 30, None, 1)
    _, findings = claims.claims(results)
    assert findings.table.data[["spread", "seeds"]].iloc[0].tolist() == [0.02, 3]
    assert findings.table.display["interval over"][0] == "text, and training spread of hours"


def test_the_spread_of_a_published_run_is_read_from_its_findings_and_counts(tmp_path):
    def run(lost, keys):
        counted = {"5gram": Baseline(**ends(2, 2, 2, 2) | units(2.0), tokens=7)}
        models = kernels_losing(0.1, lost, 0.5, keys=(keys, keys + 1, keys + 2))
        return [replace(model, baselines=counted) for model in models]

    published = Results.of([*run(0.9, 50), *renamed(run(0.8, 60), "second")])
    folder = tmp_path / "hours"
    folder.mkdir()
    for exhibit in claims.claims(published):
        (folder / f"{exhibit.name}.csv").write_text(exhibit.table.csv())
    spreads = published_spreads(folder)
    assert published_spreads(tmp_path / "none") == {}
    beside = claims.claims(published, published_verdicts(tmp_path))[0].table.display
    assert list(beside["verdict, hours"]) == list(beside["verdict"])
    results = Results.of(run(0.7, 70), spreads=spreads)
    findings = [item for answer in answers(results) for item in answer.findings]
    over = "text, and training spread of hours"
    assert {(item.over, item.trainings, item.spread.seeds) for item in findings} == {(over, 1, 2)}
    moved = next(item for item in findings if item.label.startswith("polynomial / elu"))
    assert moved.spread.deviation == pytest.approx(0.1 / np.sqrt(2))
    _, strength, _ = claims.claims(results)
    assert set(strength.table.data["seeds"]) == {2}
    for name, damaged, read, at in (
        ("findings", "what,seeds\nx,3\n", published_spreads, folder),
        ("findings", "what,model,spread,seeds\nx,elu,y,3\n", published_spreads, folder),
        ("claims", "claim\nx\n", published_verdicts, tmp_path),
    ):
        (folder / f"{name}.csv").write_text(damaged)
        assert_refused(rf"hours/{name}\.csv is damaged .*restore it", read, at)


@pytest.mark.parametrize(
    ("signs", "expected"),
    [((1, 1, 1, 1), HOLDS), ((-1, -1, -1, -1), OPPOSED), ((1, -1, 1, -1), OPEN)],
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
        (-0.1, -0.1, 0.1, (OPPOSED, OPPOSED)),
        (0.1, -0.1, -0.1, (OPPOSED, HOLDS)),
    ],
)
def test_orf_and_lsh_against_65_keys_are_means_over_seeds(orf, few, many, expected):
    """Of LSH, the largest settings up to the paper's count; one that sees all 512 keys does not."""
    records = [long_model(orf, few, many)]
    assert (verdict(records, "(ORF) and hashing"), verdict(records, "LSH of many")) == expected


@pytest.mark.parametrize("many", [-0.1, 0.1])
def test_what_loses_nothing_cannot_be_beaten(many):
    """The claim that LSH beats 65 keys by weight presupposes that these lose against exact."""
    model = long_model(0.1, 0.1, many)
    for loss, untested in ((0.5, False), (0.599, True), (0.7, True)):
        exact = cell("exact", loss, 0.02)
        answer = found_in([replace(model, cells=(exact, *model.cells[1:]))])[6]
        assert (answer.verdict == UNTESTED == answer.after_holm) is untested
        assert answer.remark.startswith("It presupposes a loss, OVO 65 against exact: masked long ")
        assert [finding.holds for finding in answer.findings] == [many < 0]


def test_a_claim_says_what_its_verdict_does_not():
    long, short = one_key(0.05, masked, "long"), one_key(0.05, masked, "short")
    short = replace(short, baselines=short_on_longer_text(0.01).baselines)
    training = {
        "masked_long": {"tokens": 17, "hyperparameters": {"initialisation": "masked_short"}},
        "masked_short": {"tokens": 100, "hyperparameters": {"initialisation": "random"}},
    }
    answered = answers(Results.of([long, short, one_key(0.1)], training))
    assert answered[0].remark.startswith("Of 3 trainings 2 are independent: a long masked model")
    assert "trained on 17% further tokens:" in answered[7].remark
    assert answered[1].remark == "" and answered[1].verdict == "not measured"
    training["masked_short"]["hyperparameters"]["initialisation"] = "roberta-base"
    remark = answers(Results.of([long, short], training))[0].remark
    assert remark.startswith(
        "Of 2 trainings 1 start from the short model of their seed, and 1 from"
    )
    unknown = found_in([long, short])
    assert unknown[0].remark == "" and "trained on further:" in unknown[7].remark
    flat = found_in([*(records := kernels_losing(0.1, 0.9, 0.5)), *renamed(records, "second")])[4]
    assert flat.remark.endswith("over trainings: polynomial 200, elu 100, exponential 50.")


def test_trainings_on_other_text_are_not_compared():
    once = one_key(0.1)
    fewer = {name: getattr(once.cells[0], name)[:9] for name in ("unit_totals", "unit_counts")}
    again = renamed([with_cells(once, lambda cell: replace(cell, **fewer))], "second")
    (finding,) = found_in([once, *again])[0].findings
    assert finding.holds is None and finding.sentence == "elu not compared: other text"
    fewer = np.ones(3)
    layers = [Effect("flatter", "all", "correlation", fewer[:n], fewer[:n]) for n in (3, 2)]
    (finding,) = over_trainings([[layer] for layer in layers], {})
    assert finding.sentence == "all not compared: other layers"


@pytest.mark.parametrize(
    ("long", "noise", "expected"), [(0.4, 0.1, HOLDS), (0.49, 0.1, OPEN), (0.6, 0.1, OPPOSED)]
)
def test_long_and_short_are_compared_on_the_same_masked_tokens(long, noise, expected):
    model = masked("long", exact=long)
    assert verdict([model, short_on_longer_text(noise)], "long sequences") == expected
    answer = found_in([model, short_on_longer_text(noise, 99.0)])[7]
    assert answer.verdict.startswith(OPEN)
    assert answer.lines()[0].endswith(": exact attention not compared: other targets ?")
    assert verdict([model, masked("short")], "long seq") == "not measured"


def test_without_records_nothing_is_measured_and_every_claim_is_listed():
    answered = found_in([causal("elu")])
    assert [answer.verdict for answer in answered] == len(CLAIMS) * ["not measured"]
    assert len(CLAIMS) == 9 and all(answer.published for answer in answered)


def test_a_single_unit_decides_nothing():
    two = [cell(BY_OUTPUT, 3.5, r=1), cell(BY_WEIGHT, 4.0, r=1)]
    alone = [replace(pair, unit_totals=pair.unit_totals[:1], unit_counts=(100.0,)) for pair in two]
    assert verdict([causal("elu", *alone)], "One value") == OPEN
