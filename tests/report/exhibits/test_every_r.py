"""The paper's tables and figures, every method at every r, and all of them at equal budgets."""

import json
import math
import re
from dataclasses import replace

import pandas as pd
import pytest
import vl_convert
from synthetic import UNKNOWN, ends, parts, record, rows, survey_record, survey_results, with_cells

from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.records.cache_record import FULL, CacheCell, CacheRecord
from value_aware_attention.records.estimate import DASH, interval, number, signed, with_interval
from value_aware_attention.records.record import Baseline, Cell
from value_aware_study.cards import cards
from value_aware_study.report import look, words
from value_aware_study.report.exhibits import pretrained, survey
from value_aware_study.report.exhibits.answer import FACTS, answer
from value_aware_study.report.exhibits.caches import REFERENCE_CACHE
from value_aware_study.report.exhibits.figures import (
    SMALLEST_ERROR,
    figure_1,
    figure_2,
    figure_3,
    figure_4,
    figure_5,
)
from value_aware_study.report.exhibits.tables import (
    OF_DIFFERENCE,
    setting_value,
    table_1,
    table_2,
    table_3,
    table_4,
    tokens_count,
)
from value_aware_study.report.frame import FLOOR, OPTIMAL_METHODS, Results
from value_aware_study.report.published import TABLE_3, TABLE_4_LONG
from value_aware_study.report.words import method_label, sentences, times

MODELS = ["causal, exponential", "causal, polynomial (deg 2)", "causal, elu", "masked, 512 tokens"]


@pytest.fixture(scope="module")
def exhibits(records, training):
    figures, results = (
        (figure_1, figure_2, figure_3, figure_4, figure_5),
        Results.of(records, training),
    )
    return {number: figure(results) for number, figure in enumerate(figures, start=1)}


@pytest.fixture(scope="module")
def specifications(exhibits):
    return {number: [chart.to_dict() for chart in exhibits[number].charts] for number in exhibits}


def colours(panels):
    """Maps labels to colours, over the legends of all panels."""
    of_label = {}
    for node in parts(panels):
        scale = node["color"].get("scale", {}) if isinstance(node.get("color"), dict) else {}
        of_label |= dict(zip(scale.get("domain", []), scale.get("range", []), strict=True))
    return of_label


def test_figure_4_leaves_out_what_is_exact_and_correlates_ranks(exhibits, specifications):
    exhibit, panels = exhibits[4], specifications[4]
    assert list(exhibit.choices) == MODELS
    drawn = [row for panel in panels for rows in panel["datasets"].values() for row in rows]
    errors = [row["relative_output_error"] for row in drawn if "said" in row]
    assert len(errors) == len(exhibit.table.data) and min(errors) >= SMALLEST_ERROR
    for panel in panels[:3]:  # the synthetic loss grows with the output error
        error, cosine = re.findall(r"[+−]?\d\.\d+", panel["title"])
        assert float(error) > 0.9 and cosine == error.replace("+", "−")
    assert {"cosine", "relative_length"} <= set(exhibit.table.data)


def test_figure_5_has_three_curves_of_each_causal_model_on_equal_axes(results, specifications):
    panels, data = specifications[5], figure_5(results).table.data
    assert [panel["title"] for panel in panels] == MODELS[:3]
    scales = {str(node["y"]["scale"]) for node in parts(panels) if "scale" in node.get("y", ())}
    assert len(scales) == 1 and set(data["series"]) == set(colours(panels))
    for row in data.to_dict("records"):
        model = results.names().keys() & {f"causal_{row['name'].partition(', ')[2].split()[0]}"}
        exact, cell = (
            results.find(*model, name, **{"r": row["r"]} if name != "exact" else {})
            for name in ("exact", row["approximation"])
        )
        assert row["value"] == pytest.approx(cell["value"] / exact["value"])


def test_a_method_has_the_same_colour_in_every_figure(specifications):
    first, fourth, fifth = (colours(specifications[number]) for number in (1, 4, 5))
    assert len(first) == 8 and len(set(first.values())) == 7  # both ORF have one colour
    shared = set(first) & set(fourth)
    assert shared == {"OVO", "OVA", "sliding window"}
    assert {name: fourth[name] for name in shared} == {name: first[name] for name in shared}
    assert [fifth[words.full_name(name)] for name in OPTIMAL_METHODS] == [
        first["OVO"],
        first["OVA"],
    ]


def test_a_colour_of_a_method_is_of_no_kernel_and_no_other_kind_of_choice():
    of_methods = {
        mark["colour"]: card.name for card in cards().values() for mark in card.marks().values()
    }
    kernels = {
        mark.colour.removeprefix("var(--").rstrip(")") for mark in look.KERNEL_MARKS.values()
    }
    assert not kernels & {*of_methods, *look.CACHE_COLOURS.values()} and len(kernels) == 3
    drawn = {
        mark.colour.removeprefix("var(--").rstrip(")") for mark in pretrained.CURVE_MARKS.values()
    }
    assert drawn <= set(of_methods)
    for name, (method, others, mark) in pretrained.CURVES.items():
        card = cards()[method]
        marks = card.marks()[card.curve({"mass": None, **others})]
        assert look.Mark.of(marks["colour"], marks["shape"]) == mark, name


@pytest.mark.parametrize("name", [n for n, c in cards().items() if c.axes or c.survey is not None])
def test_every_method_that_is_measured_has_a_label_and_a_mark_of_its_own(name):
    curves = {card.name: list(card.marks() or [card.label]) for card in cards().values()}
    drawn = [
        {"approximation": name, "series": curve, "rounds": 1}
        for name in curves
        for curve in curves[name]
    ]
    marks = look.method_marks(pd.DataFrame(drawn))
    for curve in curves[name]:
        assert curve.split(", ")[0] == method_label(name) and marks[curve] != look.OTHER
        assert list(marks.values()).count(marks[curve]) == 1


def test_lsh_shades_deepen_with_rounds():
    drawn = {"approximation": "lsh", "rounds": [16, 4, 1]}
    drawn["series"] = ["LSH, 16 rounds", "LSH, 4 rounds", "LSH, 1 round"]
    marks = look.method_marks(pd.DataFrame(drawn))
    assert [(name, mark.colour) for name, mark in marks.items()] == [
        ("LSH, 1 round", "var(--purple)"),
        ("LSH, 4 rounds", "var(--plum)"),
        ("LSH, 16 rounds", "var(--wine)"),
    ]


def test_two_settings_are_not_joined_by_a_line(records):
    def kept(cell):
        few = cell.approximation != "optimal_v_aware" or cell.parameters["r"] in (1, 65)
        return cell if few else None

    panels = figure_5(Results.of([with_cells(records[0], kept)])).charts
    for spec in (panel.to_dict() for panel in panels):
        lines = [layer for layer in spec["layer"] if layer["mark"]["type"] == "line"]
        joined = {r["series"] for layer in lines for r in spec["datasets"][layer["data"]["name"]]}
        assert joined and not any("OVA" in name for name in joined)


def test_every_axis_of_values_says_what_is_better(specifications):
    for panel in (panel for panels in specifications.values() for panel in panels):
        titles = [
            node["y"]["title"]
            for node in parts(panel)
            if isinstance(node.get("y"), dict) and "scale" in node["y"]
        ]
        assert titles and all(title.endswith("lower is better") for title in titles)


def test_both_panels_have_the_closest_method_first_below_the_limit() -> None:
    """The limit is the edge of what is shaded."""
    panels = survey.distance(survey_results()).charts
    drawn = [row for row in rows(panels[0]) if "low" in row]
    assert {row["series"] for row in drawn} == {"16 keys", "64 keys"}
    assert min(row["value"] for row in drawn) == FLOOR
    order, of_cost = (panel.to_dict()["layer"][-1]["encoding"]["y"]["sort"] for panel in panels)
    assert order[0] == survey.LIMIT and order == of_cost
    shade = panels[0].layer[0]
    assert shade.to_dict()["mark"]["type"] == "rect"
    assert shade.data["value"].tolist() == pytest.approx([0.04, FLOOR])


def test_a_cost_beyond_all_others_is_a_number_at_the_edge() -> None:
    def worse(cell):
        far = cell.approximation == "sliding_window" and cell.budget == 16
        return replace(cell, value=5000.0, low=None, high=None) if far else cell

    [_, cost] = survey.distance(Results.of([with_cells(survey_record("masked"), worse)])).charts
    drawn = rows(cost)
    assert [row["text"] for row in drawn if "text" in row] == ["+4,900.0 ▸"]
    assert max(row["value"] for row in drawn if "value" in row) < 100


def test_the_picture_scales_every_query_by_its_largest_weight() -> None:
    exhibit = survey.patterns([survey_record(), survey_record("masked", picture=None)])
    exact, other = exhibit.charts
    assert exhibit.choices == ["causal, elu"]
    assert exact.to_dict()["title"] == "causal, elu: exact attention"
    drawn = [(row["query"], row["key"], row["weight"]) for row in rows(exact)]
    assert drawn == [(0, 0, 1.0), (1, 0, 0.5), (1, 1, -0.25)]
    svg = vl_convert.vegalite_to_svg(look.specification(exact))
    assert re.findall(r"strength: ([\d.]+);", svg) == ["1", "1", "0.5"]
    assert '["def", "f"][datum.value]' in str(exact.to_dict())
    assert {row["method"] for row in rows(other)} == {"Nyström (2.5)"}
    assert survey.patterns([survey_record(picture=None)]) is None


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_a_single_unit_has_no_interval_in_table_and_figure(task: str) -> None:
    single = with_cells(survey_record(task), lambda cell: replace(cell, **UNKNOWN))
    exhibit = survey.distance(Results.of([single]))
    assert set(exhibit.table.display["interval"]) == {DASH}
    assert not any("low" in row for row in rows(exhibit.charts[1]))


def test_what_was_not_evaluated_is_a_dash_and_named(records):
    def few(cell):
        return cell if cell.parameters.get("r", 0) <= 32 else None

    cut = [with_cells(record, few) for record in records if record.kernel != "polynomial"]
    second_table = table_2(Results.of(cut))
    ours = second_table.table.display.set_index(["model and kernel", "attention"])[
        "measured (× exact)"
    ]
    here = "trained here, {}".format
    assert set(ours[here("polynomial (deg 2)")]) == {ours[here("elu"), "OVO-65"]} == {DASH}
    assert second_table.notes[-1] == "Not evaluated yet: causal polynomial."
    empty = Results.of([])
    for exhibit in (table_1, table_2, figure_1, figure_2, figure_3):
        assert exhibit(empty) is None


def test_without_a_long_model_table_1_has_the_short_one(records):
    short = [record for record in records if record.model == "masked_short"]
    display = table_1(Results.of(short)).table.display.set_index("method")["ours (× exact)"]
    assert display["short model, exact"] != DASH and display["exact"] == DASH


def test_an_interval_of_one_unit_is_a_dash(records):
    unit = {"unit_totals": (1.0,), "unit_counts": (2500.0,)} | UNKNOWN
    single = Results.of(with_cells(item, lambda cell: replace(cell, **unit)) for item in records)
    assert set(table_1(single).table.display[OF_DIFFERENCE]) == {DASH}
    assert "nan" not in table_2(single).table.markdown()


def of_values(model, task, kernel, settings, counts):
    """Builds a record of these values, the first exact attention's, with count models.

    They are means of four units of 100 targets; half the interval is 0.0459 or 4.59.
    """

    def measured(value):
        mean = math.log(value) if task == "causal" else value / 100
        totals = tuple(100 * (mean + moved) for moved in (-0.025, 0.025, -0.025, 0.025))
        units = {"unit_totals": totals, "unit_counts": (100.0,) * 4}
        return ends(value, settings["exact", ""], value, value) | units

    cells = [
        Cell(approximation=name, parameters=json.loads(text or "{}"), **measured(value))
        for (name, text), value in settings.items()
    ]
    baselines = {name: Baseline(**measured(counts[name]), tokens=7) for name in counts}
    return record(model, task, kernel, 512, cells, baselines=baselines)


ONE_KEY = ("optimal_v_oblivious", '{"r": 1}')
ORF = ("orf", '{"features": 256, "scaling": "paper", "seed": 0}')


def test_the_interval_of_table_1_is_that_of_the_level_and_ends_at_all_tokens():
    for exact, unigram, ends_of in (
        (50.4, 92.7, ["45.8 to 55.0", "88.1 to 97.3"]),
        (98, 92, ["93.4 to 100.0", "87.4 to 96.6"]),
    ):
        settings = {("exact", ""): exact, ORF: 98.1}
        model = of_values("masked_long", "masked", "elu", settings, {"unigram": unigram})
        display = table_1(Results.of([model])).table.display.set_index("method")
        rows = ["exact", "counts: most frequent token"]
        assert display.loc[rows, OF_DIFFERENCE].tolist() == ends_of


def test_a_pretrained_decoder_stands_beside_the_paper_at_its_keys_and_at_its_share_of_them(results):
    def decoder(length):
        settings = {("exact", ""): 20.0, ONE_KEY: 9000.0}
        settings |= {("optimal_v_oblivious", f'{{"r": {r}}}'): 24.0 - r / 64 for r in (32, 65)}
        settings["sliding_window", '{"r": 16, "sinks": 4}'] = 25.0
        made = of_values("SmolLM2", "causal", "exponential", settings, {})
        text = replace(made.text, description="WikiText-103 test, detokenised")
        return replace(made, length=length, text=text)

    both = pretrained.beside(replace(results, pretrained=[decoder(256), decoder(512)]))
    data = table_2(both).table.data.set_index(["model", "column"])
    short, long = (data.loc[f"SmolLM2, {length} tokens"] for length in (256, 512))
    assert list(short.index) == ["exact", "OVO-1", "OVO-65", "OVO-32"]
    assert list(long.index) == ["exact", "OVO-1", "OVO-65"]
    assert short.loc["OVO-32"][["share", "paper_r", "paper"]].tolist() == [12.5, 65, 33.5]
    assert long.loc["OVO-1"][["ratio", "ratio_low"]].tolist() == pytest.approx([450, 450])
    assert long.loc["exact", "own_low"] < 20 < long.loc["exact", "own_high"]
    assert both.of_kernel("exponential").scale  # that of the models trained here
    alone = replace(both, records=[record for record in both.records if not record.scale])
    only = table_2(alone)  # no row or note of a kernel of which no model was trained
    assert {name.partition(",")[0] for name in only.table.data["model"]} == {"SmolLM2"}
    assert "have 256 and 512" in only.notes[0]
    assert not any("Ours are trained" in n or "Not evaluated yet" in n for n in only.notes)
    drawn, panels = figure_2(both).table.data, figure_1(both)
    assert set(drawn[drawn["whose"] == "pretrained"]["share"]) >= {100 / 256, 6.25, 12.5}
    assert len(panels.charts) == 4 == 2 * len(panels.choices)


def facts():
    full = CacheCell(cache=FULL, keep=1.0, kl=(1e-12,) * 2, nats=(0.1,) * 2, right=(1.0, 0.5))
    cells = [
        replace(full, cache=cache, keep=keep, kl=(0.1, 0.2), right=(right, keep))
        for cache, right in (("KVzip", 1.0), (REFERENCE_CACHE, 0.25), (FACTS[0], 0.75))
        for keep in (0.5, 0.25)
    ]
    return CacheRecord(
        model="tiny", task="needles", text="novels", description="", prefix=512, run_on=run_on(),
        cells=(full, *cells),
    )  # fmt: skip


def test_the_answer_has_a_panel_of_each_decoder_and_one_of_facts():
    settings = {("exact", ""): 20.0, ("zero_output", ""): 60000.0}
    for r in (1, 2, 4):
        settings |= {(name, f'{{"r": {r}}}'): 20.0 + 80 / r**2 for name in OPTIMAL_METHODS}
        settings["optimal_v_aware_mean", f'{{"r": {r}, "mean": true}}'] = 20.0 + 40 / r**2
    small, large = (of_values(n, "causal", "exponential", settings, {}) for n in ("a", "b"))
    papers = replace(small, text=replace(small.text, description="WikiText-103 test, 1"))
    exhibit = answer([large, replace(small, length=64), papers], [facts()])
    titles = [panel.to_dict()["title"] for panel in exhibit.charts]
    assert [title[0].partition(":")[0] for title in titles] == ["b", "a", "Facts in a prompt"]
    assert titles[1][1] == "WikiText-103 test, 512 tokens"  # before a shorter window of another
    data = exhibit.table.data
    row = data[(data["model"] == "a") & (data["count"] == 2)].set_index("series")["value"]
    assert row[words.ORACLES["optimal_v_aware"]] == pytest.approx(2.0)
    assert row["output, the mean a candidate"] == pytest.approx(1.5)
    right = data[data["series"] == "KVzip (reads twice)"].set_index("count")["value"]
    assert right.to_dict() == {0.5: 75.0, 0.25: 62.5}
    assert "attention off: × 3,000" in exhibit.caption
    assert "of 2 prompts, with a quarter of the keys: all keys 50%, the default 0%" in (
        exhibit.caption
    )
    assert answer([], [facts()]) is None and len(answer([small], []).charts) == 1


def test_table_3_says_how_much_of_the_evaluation_text_is_copied():
    parts = {"documents": 1, "tokens": 10, "words": 200}
    sources = {
        name: {"train": {"tokens": 90}, "evaluation": parts | {"copied_words": copied}}
        for name, copied in (("a", 3), ("b", 1))
    }
    exhibit = table_3({"sources": sources})
    copied = exhibit.table.display.set_index("corpus")["copied words, %"]
    assert copied[["a", "b", "PG19 (Rae et al., 2020)"]].tolist() == ["1.5", "0.5", DASH]
    assert "1.0% in all" in exhibit.notes[0]


def test_the_papers_numbers_agree_and_disagree_as_its_notes_say():
    assert sum(training for _, _, training, _ in TABLE_3) == pytest.approx(10e6 * 510)
    assert all(held == 2000 * 510 for *_, held in TABLE_3)
    instances = TABLE_4_LONG["steps"] * TABLE_4_LONG["batch_size"] / TABLE_4_LONG["epochs"]
    (masked,) = table_4({})  # and no table of causal models where none was trained
    assert instances == 9_904_000 and "9.904M" in masked.notes[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(6700.21), "6,700.2"),
        (number(math.nan), DASH),
        (number(3.21e18), "3.21e+18"),
        (signed(-0.04), "0.0"),
        (signed(-1.26), "−1.3"),
        (interval(1.0, math.nan), DASH),
        (with_interval(69, 65, 76, 0), "69 (65 to 76)"),
        (with_interval(69, None, None, 0), "69"),
        (times(1.097), "× 1.10"),
        (times(195.9), "× 196"),
        (setting_value(True), "y"),
        (setting_value(5e-6), "5e-6"),
        (tokens_count(1.53e9), "1.53B"),
        (tokens_count(999), "999"),
    ],
)
def test_numbers_as_text(text, expected):
    assert text == expected


def test_a_mark_says_a_sentence_with_its_unit():
    mark = {"series": "exponential", "count": 4, "value": 0.1541, "low": 0.127, "high": 0.181}
    single = {"training_first": 3.0, "training_second": -2.0}
    trained = mark | {"value": -1234.5, "low": None} | single
    assert sentences(pd.DataFrame([mark, trained]), "{series}, r = {count}", " nats", "+") == [
        "exponential, r = 4: +0.154 nats (0.127 to 0.181)",
        "exponential, r = 4: −1,230 nats; −2 to 3 over trainings",
    ]
