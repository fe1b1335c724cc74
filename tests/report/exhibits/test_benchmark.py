"""The survey's section shows FABRICATED times and memory: power laws of the length."""

import pytest
from drawn import rows
from surveyed import BEYOND, LAWS, benchmark_record

from value_aware_study.benchmarking.measurement import training_times
from value_aware_study.report.contents import survey_section
from value_aware_study.report.exhibit import Section
from value_aware_study.report.exhibits import benchmark
from value_aware_study.report.exhibits.benchmark import OLDER, QUICK, Measurements, slope
from value_aware_study.report.frame import Results


def test_a_record_of_older_code_is_marked() -> None:
    record = benchmark_record(LAWS)
    assert Measurements(record).how == record.pop("how")
    assert Measurements(record).how == OLDER


def test_exponents_are_the_powers_of_the_laws() -> None:
    measured = Measurements(benchmark_record(LAWS))
    assert slope(measured.by_length("attention", "linformer", QUICK)) == pytest.approx(1.1)
    assert slope(measured.by_length("forward", "linformer", QUICK)) is None  # one length >= 2048
    assert slope({length: length**0.5 for length in BEYOND}) == pytest.approx(0.5)
    assert training_times(measured.record["cells"])["eager"] == pytest.approx(100 * 4**1.2)


def exhibits(section: Section) -> dict:
    return {exhibit.name: exhibit for exhibit in section.exhibits}


def test_what_was_not_measured_is_left_out_and_named() -> None:
    record = benchmark_record(LAWS)
    record["cells"] = [cell for cell in record["cells"] if cell["length"] < 256]
    section = survey_section(Results.of([], benchmark=record))
    assert "time_memory_short" in exhibits(section)
    assert not {"time_memory_long", "exponents", "distance"} & set(exhibits(section))
    assert "the distance to the optimum" in section.lead and "the growth of cost" in section.lead
    nothing = survey_section(Results.of([]))
    assert nothing.exhibits == [] and "time and memory" in nothing.lead


def test_dense_attention_is_a_named_line_at_every_length() -> None:
    long, _ = benchmark.time_and_memory(Measurements(benchmark_record(LAWS)))
    memory, time = (panel.to_dict()["layer"] for panel in long.charts)
    for lines, name, *_ in (memory, time):
        assert lines["mark"]["strokeDash"] and name["mark"]["text"] == "dense attention"
    told = {row["said"].rpartition(": ")[2] for row in rows(long.charts[0]) if "said" in row}
    assert told and all(text.endswith(" MiB") for text in told)  # a peak has no interval
    drawn = {(row["name"], row["series"]): row for row in rows(long.charts[1]) if "low" in row}
    assert drawn["the eager", "L = 1,024"]["value"] == pytest.approx(100 * 2**1.2)


def test_exponents_are_drawn_beside_the_published_ones() -> None:
    [panel] = benchmark.exponents(Measurements(benchmark_record(LAWS))).charts
    drawn = {(row["name"], row["series"]): row["value"] for row in rows(panel)}
    assert drawn["the linformer", "time"] == pytest.approx(1.1)
    assert drawn["the linformer", "memory"] == pytest.approx(1.1)
    assert drawn["the linformer", "published"] == 1


def test_an_exponent_below_0_of_memory_is_left_out() -> None:
    """A peak that shrinks with the length is an artefact of the fit."""
    record = benchmark_record(LAWS)
    for cell in record["cells"]:
        if cell["method"] == "linformer":
            cell["peak_mib"] = 1 / cell["length"]
    [panel] = benchmark.exponents(Measurements(record)).charts
    drawn = {(row["name"], row["series"]) for row in rows(panel)}
    assert ("the linformer", "time") in drawn and ("the linformer", "memory") not in drawn
    assert ("the eager", "memory") in drawn
