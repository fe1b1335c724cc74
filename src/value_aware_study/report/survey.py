"""The survey in the report: every method side by side, at equal budgets, in time and in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from value_aware_attention.measurement.record import Record
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Section
from value_aware_study.report.exhibits import (
    costs,
    distance,
    exponents,
    patterns,
    survey_claims,
    time_and_memory,
    trained,
)
from value_aware_study.report.results import Results
from value_aware_study.report.survey_records import Measurements

__all__ = ["survey_section"]

LEAD = (
    "Every method of the survey beside the two oracles: keys chosen by weight (OVO), and keys "
    "chosen for the output (OVA), which no other choice of as many keys can beat."
)


def survey_section(
    records: Sequence[Record], variants: Sequence[Record], benchmark: Mapping[str, Any]
) -> Section:
    """What there is of the survey; its lead names what was not measured.

    `records` are of every method at equal budgets, `variants` of models trained with a method;
    `benchmark` is what pipelines.benchmark wrote, {} where it was not run.
    """
    found = [*_of_models(records, variants), *_of_time(benchmark)]
    missing = [name for name, exhibits in found if not exhibits]
    lead = f"{LEAD} Not measured yet: {', '.join(missing)}." if missing else LEAD
    exhibits = [exhibit for _, exhibits in found for exhibit in exhibits]
    machines = captions.machines([*records, *variants])
    machines += [Measurements(benchmark).machine] if benchmark else []
    return Section("survey", "The survey", lead, exhibits, machines)


Found = list[tuple[str, Sequence[Exhibit]]]


def _of_models(records: Sequence[Record], variants: Sequence[Record]) -> Found:
    results = Results.of(records)
    met = [distance.exhibit(results)] if len(distance.budget_settings(results)) else []
    return [
        ("the distance to the optimum", met),
        ("attention patterns", _known(patterns.exhibit(results.records))),
        ("models trained with a method", _known(trained.exhibit(variants, results.records))),
    ]


def _of_time(benchmark: Mapping[str, Any]) -> Found:
    if not benchmark:
        return [("time and memory", [])]
    measured = Measurements(benchmark)
    return [
        ("the claims of time and memory", [survey_claims.exhibit(measured)]),
        ("time and memory", time_and_memory.exhibit(measured)),
        ("the growth of cost", _known(exponents.exhibit(measured))),
        ("the cost tables", costs.exhibit(measured)),
    ]


def _known(exhibit: Exhibit | None) -> list[Exhibit]:
    return [exhibit] if exhibit else []
