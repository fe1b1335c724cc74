"""Frames of SYNTHETIC records: settings over seeds and trainings, errors, and pages of them."""

import inspect
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from golden import with_units
from synthetic import TEXT, UNKNOWN, curve, output_error, probed, trained_again, with_cells
from synthetic import match as match_of

from tests.refusals import assert_refused
from value_aware_study.report import captions, contents
from value_aware_study.report.claim import Effect, over_trainings
from value_aware_study.report.exhibit import Page
from value_aware_study.report.exhibits import figures, layers, tables
from value_aware_study.report.frame import (
    Results,
    error_rows,
    of_kernels,
    of_models,
)
from value_aware_study.report.page import write_page
from value_aware_study.report.records import links_of, read_folder
from value_aware_study.report.words import of_trainings


def written(folder, records):
    for record in records:
        (folder / f"{record.model}.json").write_text(record.to_json())
    return folder


def test_a_folder_of_records_is_read_in_the_order_of_its_files(records, tmp_path):
    line = "holds no records; run dvc repro first"
    assert_refused(line, read_folder, tmp_path, error=FileNotFoundError)
    loaded = read_folder(written(tmp_path, records))
    assert loaded == sorted(records, key=lambda record: record.model)


def test_a_record_of_another_version_is_refused_with_its_file_and_how_to_rebuild_it(
    records, tmp_path
):
    file = written(tmp_path, records[:1]) / f"{records[0].model}.json"
    for version in (0, None):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}))
        line = rf"{re.escape(str(file))}.*version {version}.*dvc repro"
        assert_refused(line, read_folder, tmp_path)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("scales", {"scale": "other"}),
        ("corpora", {"text": replace(TEXT, description="other")}),
    ],
)
def test_records_of_different_runs_are_not_one_report(records, tmp_path, what, change):
    mixed = written(tmp_path, [records[0], replace(records[1], **change)])
    with pytest.raises(ValueError, match=f"one of its {what}") as error:
        read_folder(mixed)
    named = f"'other': {mixed / records[1].model}.json", f"{records[0].model}.json", "'synthetic"
    assert all(part in str(error.value) for part in named) and "\n" not in str(error.value)


def test_a_random_method_is_the_mean_of_its_seeds(results):
    setting = {"r": 64, "rounds": 4}
    values = [
        cell.value
        for cell in results.models("masked_long")[0].cells
        if cell.approximation == "lsh" and setting.items() <= cell.parameters.items()
    ]
    row = results.find("masked_long", "lsh", **setting)
    assert len(values) == row["seeds"] == 3 and row["value"] == pytest.approx(fmean(values))
    assert (row["seeds_low"], row["seeds_high"]) == (min(values), max(values))


def of_cells(record, *changes):
    """Builds results of a record whose cells are changes of its first cell."""
    return Results.of(
        [replace(record, cells=tuple(replace(record.cells[0], **c) for c in changes))]
    )


def test_perplexities_of_seeds_are_averaged_in_nats(results):
    ends = ({"value": 100.0, "low": 90.0, "high": 110.0}, {"value": 400.0, "low": 1.0, "high": 9.0})
    cells = [
        {"approximation": "random_keys", "parameters": {"r": 4, "seed": seed}, **of_seed}
        for seed, of_seed in enumerate(ends)
    ]
    row = of_cells(results.models("causal_elu")[0], *cells).find("causal_elu", "random_keys", r=4)
    assert (row["value"], row["low"]) == pytest.approx((200.0, math.sqrt(90)))


def test_parameters_nobody_listed_keep_settings_apart(results):
    cells = [
        {"approximation": "strided", "parameters": {"r": 4, "stride": stride}} for stride in (1, 2)
    ]
    strided = of_cells(results.models("masked_short")[0], *cells)
    assert len(strided.settings) == 2
    assert strided.find("masked_short", "strided", stride=2)["r"] == 4


def test_cells_whose_output_error_was_not_measured_have_none(results):
    unmeasured = of_cells(results.models("masked_short")[0], {"error": None})
    [row] = unmeasured.cells.to_dict("records")
    assert math.isnan(row["relative_output_error"]) and not row["relative_output_error_by_layer"]


def test_what_is_not_there_is_empty(results):
    assert results.find("masked_long", "optimal_v_aware", r=3) == {}
    assert results.find("no_such_model", "exact") == {}
    assert results.models("no_such_model") == [] and results.of_kernel("none") is None


# Two layers of norms 1 and 9: weighed by them, errors pool to the numbers in the tests.
OBLIVIOUS = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.0], [9.0, 8.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.0]]
AWARE = [[0.8, 0.3, 0.3, 0.0, 0.0], [6.0, 4.4, 2.3, 0.7, 0.0]]


def measured(oblivious=OBLIVIOUS, aware=AWARE, keys=100, sizes=(1, 2)):
    methods = {
        "optimal_v_oblivious": curve(range(1, len(oblivious[0]) + 1), oblivious),
        "optimal_v_aware": curve(range(1, len(aware[0]) + 1), aware),
    }
    matching = [match(layer, r) for layer in (None, 0, 1) for r in sizes]
    return output_error(keys, (1.0, 9.0), methods, matching, head_dim=4)


def match(layer, r):
    """Matches r keys with ten times as many, and one more for each layer."""
    return match_of(layer, r, 10 * r + (layer or 0))


def errors_of(*arguments, **options):
    return [row["error"] for row in error_rows(*arguments, **options)]


def test_errors_pool_as_sums_over_the_sum_of_norms():
    pooled = errors_of(measured(), "optimal_v_aware")
    assert pooled == pytest.approx([0.68, 0.47, 0.26, 0.07, 0.0])
    assert errors_of(measured(), "optimal_v_aware", layer=1)[0] == pytest.approx(6 / 9)
    assert [row["r"] for row in error_rows(measured(), "optimal_v_aware")] == [1, 2, 3, 4, 5]


def test_models_are_named_causal_ones_first_and_those_without_the_measurement_left_out(results):
    models = of_models(results)
    assert [item.label for item in models] == [
        "causal, exponential",
        "causal, polynomial (deg 2)",
        "causal, elu",
        "masked, 512 tokens",
    ]
    assert [item.output_error.keys for item in models] == [256, 256, 256, 512]
    assert len({item.mark for item in models}) == 4


def test_only_the_models_own_kernel_is_called_its_own():
    kernels = of_kernels(probed(("exponential", "polynomial", "elu", "made_up")))
    post_hoc = [f"{name}, post hoc" for name in ("polynomial (deg 2)", "elu", "made_up")]
    assert [item.label for item in kernels] == ["exponential, its own", *post_hoc]
    assert len({item.mark for item in kernels}) == 4


UNITS = np.full(6, 100.0)
ELU = {"model": "causal_elu", "approximation": "optimal_v_oblivious", "r": 4}
OVER_SEEDS, SAID = "range over trainings", "Means of 3 trainings"


@pytest.fixture(scope="module")
def again(records):
    """Every causal model three times: approximations add half as much, then twice."""
    return trained_again(records, 0.5, 2.0)


def test_the_range_of_a_change_is_of_each_training_against_its_own_exact_attention(again, results):
    trained, once = Results.of(again), results.find(among=results.changes, **ELU)["value"]
    row = trained.find(among=trained.changes, **ELU)
    singles = [row[f"training_{name}"] for name in ("first", "second", "third")]
    assert singles == pytest.approx([once, once / 2, once * 2])
    assert row["value"] == pytest.approx(fmean(singles)) and not of_trainings(results.changes)
    nats = trained.find(among=trained.nats, **ELU)["training_third"]
    assert math.exp(nats) == pytest.approx(trained.find(**ELU)["training_third"])


def test_the_mean_over_trainings_is_shown_with_the_interval_of_the_verdicts(records):
    trained = Results.of(trained_again(list(map(with_units, records)), 0.5, 2.0))
    changes, settings = (
        trained.find(among=frame, **ELU) for frame in (trained.changes, trained.settings)
    )
    first = trained.of_kernel("elu")
    effects = [
        [Effect("", "", "ratio", np.subtract(c.unit_totals, first.cells[0].unit_totals), UNITS)]
        for training in trained.trainings_of(first).values()
        for c in training.cells
        if (c.approximation, c.parameters) == (ELU["approximation"], {"r": ELU["r"]})
    ]
    [finding] = over_trainings(effects, {})
    nats = [math.log(end) for end in (finding.estimate, finding.low, finding.high)]
    assert [changes[end] - changes["value"] for end in ("low", "high")] == pytest.approx(
        [end - nats[0] for end in nats[1:]]
    )
    assert math.log(settings["high"] / settings["value"]) == pytest.approx(nats[2] - nats[0])


def test_what_was_trained_once_stays_as_it_is_beside_means(again, results):
    trained = Results.of(again)
    assert len(trained.settings) == len(results.settings)
    masked, once = (of.settings[of.settings["task"] == "masked"] for of in (trained, results))
    assert masked["training_second"].isna().all()
    assert masked["low"].tolist() == once["low"].tolist()
    labels = [{item.label for item in of_models(of)} for of in (trained, results)]
    assert labels[0] == labels[1]


def test_a_training_is_the_models_that_were_trained_as_often_under_their_first_names(
    again, records
):
    trainings = Results.of(again).trainings()
    assert [len(item.records) for item in trainings] == [len(records), 3, 3]
    third = trainings[2].of_kernel("elu")
    assert third.model == "causal_elu" and third.cells in [item.cells for item in again[5:]]
    assert len(Results.of(records).trainings()) == 1
    of_all = trained_again(records, 0.5, 0.9, tasks=("causal", "masked"))
    for item in (trainings := Results.of(of_all).trainings())[1:]:
        assert [r.model for r in item.records] == [r.model for r in trainings[0].records]


def test_another_method_or_length_of_training_is_no_replicate(records):
    long = next(record for record in records if record.model == "masked_long")
    others = [
        replace(long, model="masked_long_window", trained_with="SlidingWindow"),
        replace(long, model="masked_long_short", length=64),
    ]
    assert not Results.of([long, *others]).replicates
    assert len(Results.of([long, replace(long, model="masked_long_second")]).replicates) == 1


def test_the_caption_says_how_often_each_kind_of_model_was_trained(records):
    elu = next(record for record in records if record.model == "causal_elu")
    again = [replace(elu, model=f"causal_elu_{name}") for name in ("second", "third")]
    results = Results.of([*records, *again])
    thrice = " Means of 3 trainings, 95% intervals over text and training."
    once = " One training of each model; intervals are over text alone."
    assert [captions.seeds(results, tasks=[task]) for task in ("causal", "masked")] == [
        thrice,
        once,
    ]


def test_without_replicates_nothing_is_said_of_seeds(records):
    once = Results.of(records[:1])
    for exhibit in (tables.table_2(once), figures.figure_5(once)):
        assert SAID not in exhibit.caption and OVER_SEEDS not in exhibit.table.display
        assert "One training of each model" in exhibit.caption
        assert "training_" not in exhibit.table.csv()


def test_with_replicates_single_trainings_are_pale_marks(records):
    exhibit = figures.figure_5(Results.of(trained_again(records[:1], 0.5, 2.0)))
    assert SAID in exhibit.caption and OVER_SEEDS in exhibit.table.display
    drawn = [layer for layer in exhibit.charts[0].layer if len(layer.data.columns) == 3]
    data = exhibit.table.data
    ours = data[data["model"] == "causal_exponential"]
    assert 3 * len(ours) in [len(layer.data) for layer in drawn]


def test_the_hyperparameters_have_the_seed_of_every_training(training):
    trainings = {
        f"{model}{name}": {"hyperparameters": {"seed": seed}}
        for model in ("causal_elu", "masked_short")
        for seed, name in ((0, ""), (2, "_third"), (1, "_second"))
    }
    data = [exhibit.table.data for exhibit in tables.table_4(trainings)]
    rows = [table.set_index("hyperparameter").loc["seed"] for table in data]
    assert (rows[0]["ours, short"], rows[1]["ours, elu"]) == ("0, 1, 2", "0, 1, 2")


def test_a_page_without_most_models_names_what_is_not_there(records):
    lonely = with_cells(records[0], lambda cell: replace(cell, **UNKNOWN))
    page = contents.report_page(Results.of([lonely]))
    leads = {section.title: section.lead for section in page.sections}
    assert list(leads) == ["Answer", "The paper", "Everything"]
    assert leads["The paper"].endswith("Not measured yet: Table 1, Figure 1, Figure 3.")
    assert "Not measured yet: the token explorer" in leads["Answer"]
    assert not {"table_1", "figure_1"} & {exhibit.name for exhibit in page.exhibits()}
    assert [part.name for part in page.sections[-1].within] == ["every_r", "how"]


def test_code_and_manual_are_linked_where_the_citation_has_them(tmp_path):
    file = tmp_path / "CITATION.cff"
    assert links_of(file) == {}
    file.write_text("title: t\nrepository-code: https://code\ndoi: 10.1/x\n")
    assert links_of(file) == {"Code": "https://code", "DOI": "https://doi.org/10.1/x"}


def test_no_records_are_refused_in_one_line():
    assert_refused("no evaluation records", contents.report_page, Results.of([]))


@pytest.mark.parametrize(
    ("scale", "is_said"), [("smoke", True), ("laptop", True), ("hours", False)]
)
def test_a_page_of_short_trainings_says_first_what_they_are_for(records, scale, is_said):
    short = next(record for record in records if record.model == "masked_short")
    page = contents.report_page(Results.of([replace(short, scale=scale)]))
    assert page.lead.startswith("Keys are chosen") is not is_said


def test_verdicts_of_published_runs_stand_beside_but_for_other_toys(records):
    scales = {scale: {} for scale in (records[0].scale, "laptop", "hours")}
    page = contents.report_page(Results.of(records[:1], verdicts=scales))
    claims = next(exhibit for exhibit in page.exhibits() if exhibit.name == "claims")
    columns = [name for name in claims.table.display if name.startswith("verdict,")]
    assert columns == ["verdict, published", "verdict, hours"]


PAGE = Path(__file__).parents[2] / "docs/add-a-figure.md"


@pytest.mark.usefixtures("undrawn")
def test_a_figure_is_two_places(records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, line = re.findall(r"```\w+\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names = dict(vars(layers))
    exec(function, names)
    monkeypatch.setattr(layers, "keys_by_layer", names["keys_by_layer"], raising=False)
    names = dict(vars(contents))
    exec(inspect.getsource(contents._every_r).replace("    ]\n", f"{line}    ]\n"), names)
    few = with_cells(records[0], lambda cell: None if cell.parameters else cell)
    section = names["_every_r"](Results.of([few]))
    page = write_page(Page("Every r", "", [section]), tmp_path)
    assert 'id="keys_by_layer"' in page.read_text()
    assert {file.suffix for file in tmp_path.glob("keys_by_layer.*")} == {".csv", ".md", ".png"}
