import json
import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from synthetic import TEXT

from value_aware_study.report.frame import Results
from value_aware_study.report.records import read_folder


def written(folder, records):
    for record in records:
        (folder / f"{record.model}.json").write_text(record.to_json())
    return folder


def test_a_folder_of_records_is_read_in_the_order_of_its_files(records, tmp_path):
    found = read_folder(written(tmp_path, records))
    assert found == sorted(records, key=lambda record: record.model)


def test_a_folder_without_records_says_what_makes_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no records; run dvc repro first"):
        read_folder(tmp_path)


def test_a_record_of_another_version_is_refused_with_its_file_and_how_to_rebuild_it(
    records, tmp_path
):
    file = written(tmp_path, records[:1]) / f"{records[0].model}.json"
    for version in (0, None):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}))
        with pytest.raises(ValueError, match="dvc repro") as error:
            read_folder(tmp_path)
        assert str(file) in str(error.value) and f"version {version}" in str(error.value)


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
    message = str(error.value)
    assert f"'other': {mixed / records[1].model}.json" in message and "\n" not in message
    assert f"{records[0].model}.json" in message and "'synthetic" in message


def test_a_random_method_is_the_mean_of_its_seeds(results):
    wanted = {"r": 64, "rounds": 4}
    values = [
        cell.value
        for cell in results.models("masked_long")[0].cells
        if cell.approximation == "lsh" and wanted.items() <= cell.parameters.items()
    ]
    row = results.find("masked_long", "lsh", **wanted)
    assert len(values) == row["seeds"] == 3
    assert row["value"] == pytest.approx(fmean(values))
    assert (row["seeds_low"], row["seeds_high"]) == (min(values), max(values))


def of_cells(record, *changes):
    """Builds results of a record whose cells are changes of its first cell."""
    return Results.of(
        [replace(record, cells=tuple(replace(record.cells[0], **c) for c in changes))]
    )


def test_perplexities_of_seeds_are_averaged_in_nats(results):
    ends = [
        {"value": 100.0, "low": 90.0, "high": 110.0},
        {"value": 400.0, "low": 1.0, "high": 9.0},
    ]
    cells = [
        {"approximation": "random_keys", "parameters": {"r": 4, "seed": seed}, **of_seed}
        for seed, of_seed in enumerate(ends)
    ]
    row = of_cells(results.models("causal_elu")[0], *cells).find("causal_elu", "random_keys", r=4)
    assert row["value"] == pytest.approx(200.0)
    assert row["low"] == pytest.approx(math.sqrt(90))


def test_parameters_nobody_listed_keep_settings_apart(results):
    cells = [
        {"approximation": "strided", "parameters": {"r": 4, "stride": stride}} for stride in (1, 2)
    ]
    found = of_cells(results.models("masked_short")[0], *cells)
    assert len(found.settings) == 2
    assert found.find("masked_short", "strided", stride=2)["r"] == 4


def test_cells_whose_output_error_was_not_measured_have_none(results):
    found = of_cells(results.models("masked_short")[0], {"error": None})
    [row] = found.cells.to_dict("records")
    assert math.isnan(row["relative_output_error"])
    assert row["relative_output_error_by_layer"] == ""


def test_the_order_of_records_does_not_matter(records):
    shuffled = random.Random(1).sample(records, len(records))
    assert Results.of(shuffled).settings.equals(Results.of(records).settings)


def test_what_is_not_there_is_empty(results):
    assert results.find("masked_long", "optimal_v_aware", r=3) == {}
    assert results.find("no_such_model", "exact") == {}
    assert results.models("no_such_model") == [] and results.of_kernel("none") is None
