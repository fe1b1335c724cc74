"""The report's page: which exhibits answer which question, in the order of reading."""

from collections.abc import Sequence

from value_aware_attention.measurement.record import Record
from value_aware_study.report.exhibit import Exhibit, Page, Section
from value_aware_study.report.exhibits import (
    claims,
    figure_1,
    figure_2,
    figure_3,
    figure_4,
    figure_5,
    grid,
    hero,
    matching_keys,
    models,
    output_error,
    skewness,
    skewness_gap,
    table_1,
    table_2,
    table_3,
    table_4,
)
from value_aware_study.report.explorer import Exploration
from value_aware_study.report.measurements import measured_on, of_models
from value_aware_study.report.results import Results

__all__ = ["report_page"]

QUESTION = "If attention may look at only r keys, what does choosing them by weight lose?"
LEAD = (
    "Keys are chosen by attention weight (OVO: the r largest, renormalised) or for the attention "
    "output (OVA: the convex combination of at most r values closest to it). Both choices are "
    "oracles that look at exact attention: they measure what a method could reach, not what it "
    "costs."
)
PAPER = "Tables 1 to 4 and Figures 1 to 3, ours beside the paper's, whose models are larger."
EVERY_R = (
    "What is not in the paper: every number of keys, in the model's loss and in the layers' output."
)
HOW = "The models, the text and the machine behind every number of this run."

Found = tuple[str, Exhibit | None]


def report_page(
    results: Results,
    survey: Section | None = None,
    models: Sequence[Section] = (),
    explorer: Exploration | None = None,
    pretrained: Sequence[Record] = (),
    unchecked: Sequence[str] = (),
) -> Page:
    """The sections of one run; an exhibit without data is left out and named in its section.

    `survey` and `models` are ready sections. The first exhibit is of the first `pretrained` model,
    where there is one, else of the first causal model of the run, that of the exponential kernel.
    `unchecked` names files that were read without a checksum. Raises ValueError for no records.
    """
    if not results.records:
        raise ValueError("no evaluation records given; a report needs at least one")
    shown = hero.exhibit([*pretrained, *results.causal, *results.records], results)
    others = [*([survey] if survey else []), *models]
    sections = [
        _section(
            "answer",
            "The claims",
            "",
            [("how many keys match", shown), *(("", one) for one in claims.exhibit(results))],
        ),
        _section("paper", "The paper", PAPER, _paper(results)),
        _section("every_r", "Every r", EVERY_R, _every_r(results, explorer)),
        *others,
        _section("how", "How it was measured", HOW + _unchecked(unchecked), _how(results, others)),
    ]
    return Page(QUESTION, LEAD, sections)


def _section(name: str, title: str, lead: str, found: Sequence[Found]) -> Section:
    """The exhibits that there are; the lead names the others."""
    missing = ", ".join(what for what, exhibit in found if exhibit is None)
    said = [lead, f"Not measured yet: {missing}."] if missing else [lead]
    exhibits = [exhibit for _, exhibit in found if exhibit]
    return Section(name, title, " ".join(filter(None, said)), exhibits)


def _unchecked(files: Sequence[str]) -> str:
    """One sentence; nothing where there are none."""
    said = "These files have no checksum and are read as they are"
    return f" {said}: {', '.join(files)}." if files else ""


def _paper(results: Results) -> list[Found]:
    return [
        ("Table 1", table_1.exhibit(results)),
        ("Figure 1", figure_1.exhibit(results)),
        ("Table 2", table_2.exhibit(results)),
        ("Figure 2", figure_2.exhibit(results)),
        ("Figure 3", figure_3.exhibit(results)),
        ("Table 3", table_3.exhibit(results.tokens)),
        *(("Table 4", one) for one in table_4.exhibit(results.training)),
    ]


def _every_r(results: Results, explorer: Exploration | None) -> list[Found]:
    measured = of_models(results)
    return [
        ("the token explorer", _explorer(explorer)),
        ("Figure 5", figure_5.exhibit(results)),
        (
            "Figure 6",
            output_error.exhibit(
                measured, "figure_6", measured_on(measured), "Figure 6. ", "model"
            ),
        ),
        ("Figure 7", matching_keys.exhibit(measured, "figure_7", "Figure 7. ")),
        ("the keys needed in every layer", matching_keys.layers(measured)),
        ("Figure 4", figure_4.exhibit(results)),
        ("Figure 8", skewness_gap.exhibit(measured)),
        ("skewness", skewness.exhibit(results)),
        ("", grid.exhibit(results)),
    ]


def _how(results: Results, others: Sequence[Section]) -> list[Found]:
    machines = [one for section in others for one in section.machines]
    return [("", models.exhibit(results, machines))]


def _explorer(exploration: Exploration | None) -> Exhibit | None:
    if not exploration:
        return None
    return Exhibit(
        "explorer",
        "Token by token: which keys each method keeps",
        "Click a word of real text: the exact weights of its query, the keys that each method "
        "keeps with theirs, and the output error left.",
        exploration=exploration,
    )
