"""Headlines and counts of SYNTHETIC records, and records that no measurement writes are refused."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from probed import LENGTH, VOCABULARY, model, tokenizer, words
from scipy.stats import t as student
from synthetic import AWARE, OBLIVIOUS, match, probed, with_attention, with_cells

from tests.refusals import assert_refused
from tests.report.pages import exploration
from tests.report.synthetic import cache_record
from value_aware_attention import probe
from value_aware_attention.approximations import OptimalValueOblivious
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.headline import by_layer, headline, shown_size, with_ratio
from value_aware_attention.records.matching import SLOT, EndMatch, end_matches
from value_aware_attention.records.record import Baseline, Cell, Record
from value_aware_attention.records.terminal import tables
from value_aware_study.evaluation.exploration import Exploration


def with_counts(record, *counts):
    """Exchanges the pooled matching keys, of 64; their intervals reach from 1 below to 2 above."""
    errors = record.attention[0].output_error
    matching = tuple(match(None, r, keys) for r, keys in counts)
    return with_attention(record, output_error=replace(errors, matching_keys=matching, keys=64))


def with_needed(record, *counts):
    """Exchanges the keys by weight that the layers need for 5% error."""

    def changed(row):
        if (row.share, row.head, row.method) != (0.05, None, "optimal_v_oblivious"):
            return row
        keys = row.keys if row.layer is None else counts[row.layer]
        return replace(row, keys=keys, low=keys - 1, high=keys + 1)

    errors = record.attention[0].output_error
    needed = tuple(map(changed, errors.keys_needed))
    return with_attention(record, output_error=replace(errors, keys_needed=needed))


def test_without_a_control_nothing_is_said_of_random_weights():
    record = with_counts(probed(), (4, 8), (8, 15))
    assert headline(record) == (
        "On tiny (TinyForCausalLM) at 16 tokens, 4 value-aware keys in every layer leave a "
        "perplexity of 30.50, × 1.02 (1.01 to 1.02); 4 by weight 30.25, × 1.01 (1.00 to 1.01); "
        "exact 30.00. By weight it takes 4.0 (4.0 to 4.0) keys to do as well in this metric. "
        "4 value-aware keys match 8 (7 to 10), 8 match 15 (14 to 17) keys chosen by attention "
        "weight, of the 32 that a query sees on average (errors pooled; of single queries, 4 match "
        "5 in the median, 4 to 8 in the quartiles)."
    )
    assert by_layer(record) == "" and "random" not in "\n".join(tables(record))


NO_FEWER = ", no fewer as far as the intervals tell: these counts do not come from training."


@pytest.mark.parametrize(
    ("random", "counts"),
    [
        (27, f"28 (27 to 30), 27 (26 to 29){NO_FEWER}"),
        (24, "28 (27 to 30), 24 (23 to 26)."),
        (8, "28 (27 to 30), 8 (8 to 10)."),  # 7 cannot match 8 value-aware keys
    ],
)
def test_the_control_has_its_numbers_and_no_fewer_only_where_no_count_is_above_it(random, counts):
    beside = with_counts(probed(), (4, 28), (8, random))
    text = headline(replace(with_counts(probed(), (4, 29), (8, 30)), control=beside))
    assert (
        "; with random weights 30.50, × 1.02 (1.01 to 1.02) and 30.25, × 1.01 (1.00 to 1.01); "
        "exact 30.00."
    ) in text
    assert f"With random weights they match {counts}" in text


@pytest.mark.parametrize(
    ("low", "high", "told"), [(27, 36, True), (26, 37, False), (1, 64, False), (None, None, False)]
)
@pytest.mark.parametrize("of_control", [False, True])
def test_counts_are_called_no_fewer_by_narrow_intervals_alone(low, high, told, of_control):
    """Wide ones overlap with any count, and one window has none."""
    narrow, errors = with_counts(probed(), (4, 30)), probed().attention[0].output_error
    counted = replace(match(None, 4, 30), low=low, high=high)
    other = with_attention(probed(), output_error=replace(errors, matching_keys=(counted,)))
    model, control = (narrow, other) if of_control else (other, narrow)
    assert (NO_FEWER in headline(replace(model, control=control))) == told


def test_an_end_metric_that_cannot_tell_is_said_to():
    def lying(low, high, record=None, of=""):
        ends = {"difference_low": low, "difference_high": high}
        changed = lambda c: replace(c, **ends) if of in c.approximation else c  # noqa: E731
        return with_cells(record or probed(), changed)

    near = lying(-0.1, 0.2)
    assert "the perplexity cannot tell the choices apart: with 4 keys in" in headline(near)
    assert "of 3 methods, exact attention's 30.00 lies within its interval." in headline(near)
    for record in (lying(0.1, 0.2, near, AWARE), lying(-0.3, -0.1), probed(known=False)):
        assert "cannot tell" not in headline(record)


@pytest.mark.parametrize(("low", "warned"), [(-0.5, True), (0.5, False), (None, False)])
def test_a_model_no_better_than_chance_is_warned_of(low, warned):
    guess = Baseline(
        count=1, value=35.0, low=30 + low if low else None, high=None, difference=5.0,
        difference_low=low, difference_high=9.0, unit_totals=(1.0,), unit_counts=(1.0,),
    )  # fmt: skip
    record = replace(probed(), baselines={"chance": guess})
    line = (
        "the perplexity cannot tell what keys do: exact attention's 30.00 is no better than "
        "chance, a guess without reading has 35.00"
    )
    assert (line in headline(record)) == warned
    assert (f"warning: {line}" in [*tables(record)]) == warned
    assert "warning" not in "\n".join(tables(probed()))


def test_a_guess_is_scored_on_the_targets():
    methods = {OBLIVIOUS: lambda r, layer: OptimalValueOblivious(r)}
    for name, value in (("gpt2", VOCABULARY), ("roberta", None), ("bert", None)):
        record = probe.probe(
            model(name), tokenizer(), words(14 * 6), windows=2, length=LENGTH, rows=4,
            search="fast", sizes=[1, 4], control=False, methods=methods,
        ).record  # fmt: skip
        baselines = record.baselines
        assert bool(baselines) == (name != "bert")
        if value:
            assert baselines["chance"].value == pytest.approx(value)
        floors = {"zero_output", "mean_of_the_values"}
        assert floors < {cell.approximation for cell in record.cells if not cell.parameters}
        if name == "roberta":  # hidden tokens that are the most frequent one are right
            assert baselines["chance"].value < 100
            assert baselines["chance"].count == record.cells[0].count


def test_the_fewest_keys_whose_loss_is_small_are_named():
    cell = replace(probed().cells[0], approximation=OBLIVIOUS)
    cells = [
        replace(
            cell, difference_low=low, difference_high=high,
            parameters={"share": share, "keys": 8.0 * share, "each": each},
        )
        for share, low, high, each in (
            (0.5, 0.1, 0.5, "own"), (0.2, -0.1, 0.1, "equal"), (0.1, 0.0, 0.2, "own"),
        )
    ]  # fmt: skip
    printed = "\n".join(tables(replace(probed(), budgets=cells)))
    assert (
        "For a loss of at most 0.30 in perplexity, interval included: the budgets by weight for "
        "10% error, 0.8 keys a head on average."
    ) in printed
    assert "by weight (oracle), all alike" in printed
    printed = "\n".join(tables(replace(probed(), budgets=cells[:2])))
    assert "interval included: none of these budgets by weight." in printed


def test_the_layers_that_training_changes_most_are_named_with_both_counts():
    record = with_needed(probed(layers=3), 12, 3, 9)
    text = by_layer(replace(record, control=with_needed(probed(layers=3), 5, 7, 8)))
    assert text == (
        "Keys by weight for 5% error, trained minus random weights: most with 12 (11 to 13) in "
        "layer 0 (5 (4 to 6) with random weights), least with 3 (2 to 4) in layer 1 (7 (6 to 8) "
        "with random weights)."
    )


def test_the_tables_have_a_row_and_a_table_of_random_weights():
    lines = [*tables(replace(probed(), control=probed()))]
    [pooled], [random] = ([x for x in lines if x.startswith(name)] for name in ("all", "random"))
    assert pooled.split()[1:] == random.split()[1:]
    assert sum(line.startswith("perplexity of exact attention") for line in lines) == 2


def test_the_end_metric_is_told_with_the_size_nearest_to_four_and_layers_alone_by_their_counts():
    assert shown_size(probed(sizes=(1, 3, 5, 9))) == 3
    layers_alone = with_cells(probed(), lambda c: None if c.parameters else c)
    assert shown_size(layers_alone) == 0
    line = "On tiny (TinyForCausalLM) at 16 tokens, 4 value-aware keys match 8"
    assert headline(layers_alone).startswith(line)


def test_layers_are_told_apart_and_all_keys_are_not_named_for_an_encoder():
    errors = probed(layers=3).attention[0].output_error
    counts = tuple(match(layer, 4, keys) for layer, keys in ((None, 9), (0, 13), (1, 6), (2, 7)))
    alike = replace(errors, matching_keys=counts, causal=False)
    text = headline(with_attention(probed(), output_error=alike))
    assert "match 9 (8 to 11) keys chosen by attention weight, of 16 (errors pooled; by" in text
    assert "by layer 6 to 13; of single queries" in text


@pytest.mark.parametrize(("low", "shown"), [(1, "5 (4 to 7)"), (5, "5 (5 to 7)"), (None, "5")])
def test_fewer_than_r_keys_are_in_no_interval_of_those_that_match(low, shown):
    errors = probed().attention[0].output_error
    counted = replace(match(None, 4, 5), low=low, high=low and 7)
    record = with_attention(probed(), output_error=replace(errors, matching_keys=(counted,)))
    assert f"4 value-aware keys match {shown} keys" in headline(record)


@pytest.mark.parametrize(("units", "few"), [(1, True), (3, True), (4, False)])
def test_too_few_windows_are_warned_of_with_how_to_read_more(units, few):
    record = replace(probed(), text=replace(probed().text, units=units))
    line = f"Too few windows ({units}) for intervals to be believed: read at least 4, better 8 (w"
    assert (line in headline(record)) == few
    assert any(text.startswith(f"warning: {line}") for text in tables(record)) == few


def test_a_ratio_of_perplexities_has_its_paired_interval():
    """And no column mixes 1.3e+05 with 443.34."""
    exact, cell, *_ = probed().cells
    record = replace(probed(), cells=(replace(exact, value=28.57), cell))
    wide = replace(cell, value=134000.5, low=4.37, high=717.85)
    assert with_ratio(record, wide) == "134,000.50, × 4,690 (0.15 to 25.1)"
    assert with_ratio(record, wide, brackets=True) == "134,000.50 × 4,690 [0.15, 25.1]"
    assert with_ratio(record, replace(wide, low=None, high=None)) == "134,000.50, × 4,690"
    high = replace(cell, value=0.9, low=0.8, high=1.0)
    assert with_ratio(replace(record, metric="cosine"), high) == "0.9000 (0.8000 to 1.0000)"


SIZES = (1, 2, 4, 8, 16, 65)


def cell(method, r, losses, **parameters):
    counts = (10.0,) * len(losses)
    return Cell(
        approximation=method, parameters={"r": r, **parameters}, value=1.0, low=None, high=None,
        count=1, difference=0.0, difference_low=None, difference_high=None,
        unit_totals=tuple(losses), unit_counts=counts,
    )  # fmt: skip


def record(by_weight, aware, metric="perplexity", units=1, method=OBLIVIOUS, **parameters):
    """Holds total losses by weight at `SIZES`, and value-aware ones at some, of equal units."""
    losses = zip(SIZES, by_weight, strict=False)
    cells = [cell(method, r, [loss] * units, **parameters) for r, loss in losses]
    cells += [cell(AWARE, r, [loss] * units) for r, loss in aware.items()]
    return replace(probed(), metric=metric, cells=(probed().cells[0], *cells))


LOSSES = (6.0, 5.0, 4.0, 3.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("loss", "keys"),
    [(5.0, 2.0), (4.5, math.sqrt(8)), (3.25, 2**2.75), (1.5, math.sqrt(16 * 65)), (1.0, 65.0)],
)
def test_losses_are_linear_in_the_logarithm_between_measured_sizes(loss, keys):
    match = end_matches(record(LOSSES, {1: loss}), 1)
    assert match.value == pytest.approx(keys) and match.low is match.high is None
    assert str(match) == f"{keys:.1f}"
    cosine = record([-x for x in LOSSES], {1: -loss}, metric="cosine")
    assert end_matches(cosine, 1).value == pytest.approx(keys)


def test_the_first_number_that_loses_as_little_counts_from_r_to_the_largest_size():
    assert end_matches(record((6, 3, 4, 2, 1, 0), {1: 3.5}), 1).value == pytest.approx(2 ** (5 / 6))
    assert end_matches(record(LOSSES, {4: 5.5}), 4).value == pytest.approx(4)
    beyond = end_matches(record(LOSSES, {4: 0.5}, units=3), 4)
    assert beyond == EndMatch(value=None, low=pytest.approx(65), high=None, most=65)
    assert str(beyond) == "more than 65"


def test_fewer_slots_may_match_and_what_was_not_measured_has_no_count():
    slots = record(LOSSES, {4: 5.0}, method=SLOT, mass="mean_key")
    assert end_matches(slots, 4, by=SLOT).value == pytest.approx(2)
    assert end_matches(slots, 4) is None
    assert end_matches(record(LOSSES, {4: 5.0}), 2) is None
    assert end_matches(record(LOSSES, {4: 5.0}, mass="exact"), 4) is None
    assert end_matches(record(LOSSES, {4: 5.0}, layers="early"), 4) is None
    assert end_matches(record(LOSSES[:1], {1: 5.0}), 1) is None


def crossing(by_weight, target):
    """Reads a number of keys off, one segment after the other."""
    points = [*zip(map(math.log, SIZES), by_weight, strict=True)]
    if points[0][1] <= target:
        return points[0][0]
    for (left, above), (right, below) in pairwise(points):
        if below <= target:
            return left + (right - left) * (above - target) / (above - below)
    return math.inf


@pytest.mark.parametrize("seed", range(10))
def test_the_interval_is_the_jackknife_of_the_logarithm(seed):
    random = np.random.default_rng(seed)
    units, r = 5, int(random.choice([1, 4]))
    by_weight = np.array(LOSSES)[:, None] + 0.3 * random.normal(size=(6, units))
    aware = random.uniform(0.8, 3.5) + 0.3 * random.normal(size=units)
    cells = [cell(OBLIVIOUS, size, row) for size, row in zip(SIZES, by_weight, strict=True)]
    measured = replace(probed(), cells=(probed().cells[0], *cells, cell(AWARE, r, aware)))
    match = end_matches(measured, r)

    def cut(log):
        return min(max(log, math.log(r)), math.log(65))

    whole = crossing(by_weight.mean(axis=1), aware.mean())
    without = [
        crossing(np.delete(by_weight, unit, axis=1).mean(axis=1), np.delete(aware, unit).mean())
        for unit in range(units)
    ]
    middle = fmean(map(cut, without))
    error = math.sqrt((units - 1) / units * sum((cut(log) - middle) ** 2 for log in without))
    margin = student.ppf(0.975, units - 1) * error
    low, high = cut(cut(whole) - margin), whole + margin
    if max(high, *without) > math.log(65):
        high = None
    assert match.value == (pytest.approx(math.exp(whole)) if whole < math.inf else None)
    assert match.low == pytest.approx(math.exp(low))
    assert match.high == (None if high is None else pytest.approx(math.exp(max(high, math.log(r)))))
    assert ("not determined" in str(match)) == (high is None and whole < math.inf)


Edit = Callable[[dict[str, Any]], object]


def edited(text: str, edit: Edit) -> str:
    content = json.loads(text)
    edit(content)
    return json.dumps(content).replace("Infinity", "1e999")


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda it: it.update(task="nope"), "task is 'nope'; it must be one of causal, masked"),
        (lambda it: it.update(metric="nats"), "metric is 'nats'; it must be one of perplexity"),
        (lambda it: it.update(head_dim=0), "head_dim is 0; it must be at least 1"),
        (lambda it: it.update(length=-5), "length is -5; it must be at least 1"),
        (lambda it: it.update(cells=[]), "its cells do not begin with exact attention"),
        (lambda it: it["cells"].pop(0), "its cells do not begin with exact attention"),
        (lambda it: it.update(cells={}), r"cells is \{\}; it must be a list"),
        (lambda it: it["cells"][2].update(value=-5), r"cells\.2 has a perplexity of -5"),
        (
            lambda it: it["cells"][2].update(value=math.inf),
            r"is damaged .cells\.2\.value is inf, w",
        ),
        (lambda it: it["cells"][2].update(low=0), r"cells\.2 has a perplexity of 0"),
        (lambda it: it["cells"][1]["unit_totals"].pop(), r"cells\.1 has other units than exact"),
        (lambda it: it.update(version="1"), "schema version '1'; this program reads version 1"),
    ],
)
def test_a_record_that_no_measurement_writes_is_refused(edit: Edit, line: str) -> None:
    assert_refused(
        rf"^r\.json.*{line}", Record.from_json, edited(probed().to_json(), edit), "r.json"
    )


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda it: it.update(cells=[]), "its first cell is not of the full cache"),
        (lambda it: it["cells"].pop(0), "its first cell is not of the full cache"),
        (lambda it: it["cells"][0].update(kl=[]), r"cells have \[0, 2\] prompts"),
        (lambda it: it["cells"][1]["kl"].pop(), r"cells have \[1, 2\] prompts"),
        (lambda it: it.update(version="4"), "schema version '4'; this program reads version 1"),
    ],
)
def test_a_cache_record_that_no_measurement_writes_is_refused(edit: Edit, line: str) -> None:
    text = cache_record().to_json()
    assert CacheRecord.from_json(text) == cache_record()
    assert_refused(rf"^r\.json.*{line}", CacheRecord.from_json, edited(text, edit), "r.json")


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda it: it.update(models=[]), "it has no sizes, no methods or no models"),
        (lambda it: it.update(sizes=[]), "it has no sizes, no methods or no models"),
        (lambda it: it["models"][0].update(heads=[]), "tiny has no tokens or no heads"),
        (lambda it: it["models"][0].update(tokens=[]), "tiny has no tokens or no heads"),
        (lambda it: it["models"][0]["heads"][1]["queries"].pop(), "tiny has not a query for ever"),
    ],
)
def test_an_exploration_without_a_part_that_is_shown_is_refused(edit: Edit, line: str) -> None:
    assert_refused(line, Exploration.from_json, edited(exploration().to_json(), edit))
