import copy
import math
import random
from statistics import fmean

import pytest

from value_aware_study.reporting.records import (
    cells,
    find,
    model_named,
    series_label,
    setting_label,
    settings,
)


def test_cells_keeps_every_cell_of_every_model(records):
    frame = cells(records)
    assert len(frame) == sum(len(record["cells"]) for record in records)
    assert set(frame["model"]) == {record["model"] for record in records}


def test_a_random_method_is_the_mean_of_its_seeds(records):
    wanted = {"r": 64, "rounds": 4}
    values = [
        cell["value"]
        for cell in model_named(records, "masked_long")["cells"]
        if cell["approximation"] == "lsh" and wanted.items() <= cell["parameters"].items()
    ]
    row = find(settings(records), "masked_long", "lsh", wanted)
    assert len(values) == row["seeds"] == 3
    assert row["value"] == pytest.approx(fmean(values))
    assert (row["seeds_low"], row["seeds_high"]) == (min(values), max(values))


def test_perplexities_of_seeds_are_averaged_in_nats(records):
    causal = copy.deepcopy(model_named(records, "causal_elu"))
    cell = causal["cells"][0]
    causal["cells"] = [
        {**cell, "approximation": "random_keys", "parameters": {"r": 4, "seed": seed}, **ends}
        for seed, ends in enumerate(
            [
                {"value": 100.0, "low": 90.0, "high": 110.0},
                {"value": 400.0, "low": 1.0, "high": 9.0},
            ]
        )
    ]
    row = find(settings([causal]), "causal_elu", "random_keys", {"r": 4})
    assert row["value"] == pytest.approx(200.0)
    assert row["low"] == pytest.approx(math.sqrt(90))


def test_parameters_nobody_listed_keep_settings_apart(records):
    record = copy.deepcopy(model_named(records, "masked_short"))
    cell = record["cells"][0]
    record["cells"] = [
        {**cell, "approximation": "strided", "parameters": {"r": 4, "stride": stride}}
        for stride in (1, 2)
    ]
    frame = settings([record])
    assert len(frame) == 2
    assert find(frame, "masked_short", "strided", {"stride": 2})["r"] == 4


def test_the_order_of_records_does_not_matter(records):
    shuffled = random.Random(1).sample(records, len(records))
    assert settings(shuffled).equals(settings(records))


def test_what_is_not_there_is_none(records):
    frame = settings(records)
    assert find(frame, "masked_long", "optimal_v_aware", {"r": 3}) is None
    assert find(frame, "no_such_model", "exact", {}) is None


def test_labels():
    lsh = {"approximation": "lsh", "r": 64, "rounds": 1}
    orf = {"approximation": "orf", "features": 256, "scaling": "paper"}
    assert setting_label(lsh) == "LSH r = 64, 1 round"
    assert setting_label(orf) == "ORF 256 features, as written"
    assert series_label({**orf, "scaling": "performer"}) == "ORF, Performer scaling"
    assert setting_label({"approximation": "optimal_v_aware", "r": 65}) == "OVA 65"
    assert setting_label({"approximation": "exact"}) == "exact"
    norm = {"approximation": "norm_weighted_keys", "r": 4}
    assert setting_label({**norm, "norm": 1}) == "α|v|, 1-norm (VATP) 4"
    assert series_label({**norm, "norm": 2}) == "α|v|, 2-norm (Kobayashi)"


def test_the_two_norms_are_two_settings_with_their_norm_in_a_column(records):
    frame = settings(records)
    of_norm = frame[
        (frame["model"] == "causal_elu") & (frame["approximation"] == "norm_weighted_keys")
    ]
    assert sorted(of_norm["norm"].unique()) == [1, 2]
    assert len(of_norm) == 2 * 6
