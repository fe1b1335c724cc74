"""The survey's section answers claims from FABRICATED measurements: power laws of the length."""

import pytest
from drawn import rows
from surveyed import AGREES, BEYOND, DISAGREES, Laws, benchmark_record

from value_aware_study.benchmarking.measurement import training_times
from value_aware_study.report.claim import Answer
from value_aware_study.report.contents import survey_section
from value_aware_study.report.exhibit import Section
from value_aware_study.report.exhibits import benchmark
from value_aware_study.report.exhibits.benchmark import (
    CLAIMS,
    OLDER,
    QUICK,
    Measurements,
    grows,
    slope,
)
from value_aware_study.report.frame import Results


def of_eager(record: dict) -> dict[str, Answer]:
    """Returns the answers that compare with eager attention, as the survey did."""
    answers = benchmark.answers(Measurements(record))
    return {a.claim.split()[0]: a for a in answers if "Beside PyTorch's fused" not in a.claim}


def verdicts(laws: Laws) -> dict[str, str]:
    return {claim: answer.verdict for claim, answer in of_eager(benchmark_record(laws)).items()}


def test_verdicts_follow_the_numbers_both_ways() -> None:
    without = {name: law for name, law in AGREES.items() if name != "reformer"}
    assert verdicts(without) == {
        "Dense": "holds",
        "For": "holds",
        "Linformer": "opposed",
        "Nyströmformer": "holds",
        "FNet": "holds",
        "Reformer": "not measured",
    }
    # Among the agreeing laws Reformer is not below dense attention, which its own claim needs.
    pays_off = verdicts(AGREES | {"reformer": (1.1, 1.35)})
    assert pays_off["Reformer"] == "opposed" and pays_off["Dense"] == "holds"
    assert set(verdicts(DISAGREES).values()) == {"opposed"}
    early = of_eager(benchmark_record(DISAGREES))["Reformer"].findings[0]
    assert not early.holds and early.sentence.startswith("128 tokens 0.25")


def noisy(record: dict, method: str) -> dict:
    """Spreads the rounds of one method over a factor of 6."""
    for cell in record["cells"]:
        if cell["method"] == method:
            rounds = cell["time"]["rounds"]
            spread = zip(rounds, (0.4, 2.4, 0.5, 2.0, 1.0, 1.0), strict=True)
            cell["time"]["rounds"] = [a * b for a, b in spread]
    return record


def test_what_the_rounds_do_not_tell_is_open() -> None:
    dense = of_eager(noisy(benchmark_record(AGREES), "eager"))["Dense"]
    assert dense.verdict == "open" and "(0." in dense.findings[0].sentence
    for finding in dense.findings:  # memory is not timed
        assert finding.holds is (None if finding.what.startswith("time") else True)
    few = benchmark_record(AGREES)
    for cell in few["cells"]:
        cell["time"]["rounds"] = cell["time"]["rounds"][:3]
    timed = [finding for answer in of_eager(few).values() for finding in answer.findings]
    assert {f.holds for f in timed if f.what.startswith("time")} == {None}


def test_a_verdict_on_a_cpu_says_so_and_what_it_does_not_tell() -> None:
    record = benchmark_record(AGREES)
    words = {}
    for device in ("cpu", "cuda"):
        record["layer"]["device"] = device
        claims = exhibits(survey_section(Results.of([], benchmark=record)))["survey_claims"]
        words[device] = " ".join([claims.caption, *claims.notes])
    assert "on this CPU," in words["cpu"] and "RTX 3090" in words["cpu"]
    assert "on this GPU," in words["cuda"] and "RTX 3090" not in words["cuda"]


def test_nothing_measured_is_not_an_answer() -> None:
    answers = of_eager(benchmark_record({}) | {"methods": {}})
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert len(answers) == len(CLAIMS) == 6


def test_a_record_of_older_code_is_marked() -> None:
    record = benchmark_record(AGREES)
    assert Measurements(record).how == record.pop("how")
    assert Measurements(record).how == OLDER


def test_exponents_are_the_powers_of_the_laws() -> None:
    measured = Measurements(benchmark_record(AGREES))
    assert slope(measured.by_length("attention", "linformer", QUICK)) == pytest.approx(1.1)
    assert slope(measured.by_length("forward", "linformer", QUICK)) is None  # one length >= 2048
    assert slope({length: length**0.5 for length in BEYOND}) == pytest.approx(0.5)
    assert (grows(-0.1), grows(None), grows(0.2)) == (None, None, 0.2)
    assert training_times(measured.record["cells"])["eager"] == pytest.approx(100 * 4**1.2)


def exhibits(section: Section) -> dict:
    return {exhibit.name: exhibit for exhibit in section.exhibits}


def test_what_was_not_measured_is_left_out_and_named() -> None:
    record = benchmark_record(AGREES)
    record["cells"] = [cell for cell in record["cells"] if cell["length"] < 256]
    section = survey_section(Results.of([], benchmark=record))
    assert "time_memory_short" in exhibits(section)
    assert not {"time_memory_long", "exponents", "distance"} & set(exhibits(section))
    assert "the distance to the optimum" in section.lead and "the growth of cost" in section.lead
    nothing = survey_section(Results.of([]))
    assert nothing.exhibits == [] and "time and memory" in nothing.lead


def test_dense_attention_is_a_named_line_at_every_length() -> None:
    long, _ = benchmark.time_and_memory(Measurements(benchmark_record(AGREES)))
    memory, time = (panel.to_dict()["layer"] for panel in long.charts)
    for lines, name, *_ in (memory, time):
        assert lines["mark"]["strokeDash"] and name["mark"]["text"] == "dense attention"
    told = {row["said"].rpartition(": ")[2] for row in rows(long.charts[0]) if "said" in row}
    assert told and all(text.endswith(" MiB") for text in told)  # a peak has no interval
    drawn = {(row["name"], row["series"]): row for row in rows(long.charts[1]) if "low" in row}
    assert drawn["the eager", "L = 1,024"]["value"] == pytest.approx(100 * 2**1.2)


def test_exponents_are_drawn_beside_the_published_ones() -> None:
    [panel] = benchmark.exponents(Measurements(benchmark_record(AGREES))).charts
    drawn = {(row["name"], row["series"]): row["value"] for row in rows(panel)}
    assert drawn["the linformer", "time"] == pytest.approx(1.1)
    assert drawn["the linformer", "memory"] == pytest.approx(1.1)
    assert drawn["the linformer", "published"] == 1
