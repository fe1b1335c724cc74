"""The survey's section answers claims from FABRICATED measurements: power laws of the length."""

import pytest
from drawn import rows
from surveyed import AGREES, BEYOND, DISAGREES, benchmark_record

from value_aware_study.benchmarking.measurement import training_times
from value_aware_study.report.claim import Answer
from value_aware_study.report.contents import survey_section
from value_aware_study.report.exhibit import Section
from value_aware_study.report.exhibits import benchmark
from value_aware_study.report.exhibits.benchmark import Measurements
from value_aware_study.report.exhibits.benchmark_claims import CLAIMS, answers
from value_aware_study.report.frame import Results


def beside_fused(answer: Answer) -> bool:
    return "Beside PyTorch's fused" in answer.claim


def of_eager(given: dict) -> list[Answer]:
    """Returns the answers that compare with eager attention, as the survey did."""
    return [answer for answer in answers(Measurements(given)) if not beside_fused(answer)]


def test_verdicts_follow_the_numbers_both_ways() -> None:
    # Among the agreeing laws Reformer is not below dense attention, which its own claim needs.
    with_reformer = AGREES | {"reformer": (1.1, 1.35)}
    found = answers(Measurements(benchmark_record(with_reformer)))
    by_claim = {answer.claim.split()[0]: answer for answer in found if not beside_fused(answer)}
    assert by_claim["Dense"].verdict == "holds"
    assert by_claim["Reformer"].verdict == "in part"
    without = {name: law for name, law in AGREES.items() if name != "reformer"}
    found = {a.claim.split()[0]: a.verdict for a in of_eager(benchmark_record(without))}
    assert found == {
        "Dense": "holds",
        "For": "holds",
        "Linformer": "in part",
        "Nyströmformer": "holds",
        "FNet": "holds",
        "Reformer": "not measured",
    }
    turned = {a.verdict for a in of_eager(benchmark_record(DISAGREES))}
    assert turned == {"contradicted here", "in part"}


def test_reformer_that_pays_off_early_holds_in_part() -> None:
    found = answers(Measurements(benchmark_record(DISAGREES)))
    early = next(answer for answer in found if "Reformer" in answer.claim)
    assert early.verdict == "in part"
    assert not early.findings[0].holds and "0.25" in early.findings[0].sentence


def noisy(given: dict, method: str) -> dict:
    """Spreads the rounds of one method over a factor of 6."""
    for cell in given["cells"]:
        if cell["method"] == method:
            rounds = cell["time"]["rounds"]
            spread = zip(rounds, (0.4, 2.4, 0.5, 2.0, 1.0, 1.0), strict=True)
            cell["time"]["rounds"] = [a * b for a, b in spread]
    return given


def test_what_the_rounds_do_not_tell_is_undecided() -> None:
    laws = {name: law for name, law in AGREES.items() if name != "reformer"}
    found = {a.claim.split()[0]: a for a in of_eager(noisy(benchmark_record(laws), "eager"))}
    assert found["Dense"].verdict == "in part" and "(0." in found["Dense"].findings[0].sentence
    time, memory = found["For"].findings
    assert time.holds is None and "undecided:" in time.sentence
    assert memory.holds is True  # it is not timed
    few = benchmark_record(laws)
    for cell in few["cells"]:
        cell["time"]["rounds"] = cell["time"]["rounds"][:3]
    timed = {f.holds for a in of_eager(few) for f in a.findings if " time" in f.sentence}
    assert None in timed


def test_a_verdict_on_a_cpu_says_so_and_what_it_does_not_tell() -> None:
    given = benchmark_record(AGREES)
    words = {}
    for device in ("cpu", "cuda"):
        given["layer"]["device"] = device
        claims = exhibits(survey_section(Results.of([], benchmark=given)))["survey_claims"]
        words[device] = " ".join([claims.caption, *claims.notes])
    assert "on this CPU," in words["cpu"] and "RTX 3090" in words["cpu"]
    assert "6 forward + backward" in words["cpu"]
    assert "on this GPU," in words["cuda"] and "RTX 3090" not in words["cuda"]


def test_nothing_measured_is_not_an_answer() -> None:
    empty = benchmark_record({}) | {"methods": {}}
    assert {a.verdict for a in answers(Measurements(empty))} == {"not measured"}
    assert len(of_eager(empty)) == len(CLAIMS) == 6


def test_exponents_are_the_powers_of_the_laws() -> None:
    measured = Measurements(benchmark_record(AGREES))
    assert measured.exponent("attention", "linformer", "milliseconds") == pytest.approx(1.1)
    assert measured.exponent("attention", "linformer", "peak_mib") == pytest.approx(1.1)
    assert measured.counted_exponent("nystrom", BEYOND) == pytest.approx(0.5)
    assert measured.exponent("forward", "linformer", "milliseconds") is None  # one length >= 2048
    assert training_times(measured.record["cells"])["eager"] == pytest.approx(100 * 4**1.2)


def exhibits(section: Section) -> dict:
    return {exhibit.name: exhibit for exhibit in section.exhibits}


def test_what_was_not_measured_is_left_out_and_named() -> None:
    given = benchmark_record(AGREES)
    given["cells"] = [cell for cell in given["cells"] if cell["length"] < 256]
    section = survey_section(Results.of([], benchmark=given))
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
    assert told and all(said.endswith(" MiB") for said in told)  # a peak has no interval
    drawn = {(row["name"], row["series"]): row for row in rows(long.charts[1]) if "low" in row}
    assert drawn["the eager", "L = 1,024"]["value"] == pytest.approx(100 * 2**1.2)


def test_exponents_are_drawn_beside_the_published_ones() -> None:
    growth = benchmark.exponents(Measurements(benchmark_record(AGREES)))
    [panel] = growth.charts
    drawn = {(row["name"], row["series"]): row["value"] for row in rows(panel)}
    assert drawn["the linformer", "time"] == pytest.approx(1.1)
    assert drawn["the linformer", "memory"] == pytest.approx(1.1)
    assert drawn["the linformer", "published"] == 1
