"""The contents of a page: which exhibits answer which question, in reading order."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from value_aware_attention.files import with_checksum
from value_aware_attention.records.cache_record import CacheRecord
from value_aware_attention.records.headline import headline
from value_aware_attention.records.record import Record
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report import captions, words
from value_aware_study.report.exhibit import Exhibit, Page, Section
from value_aware_study.report.exhibits import (
    answer,
    caches,
    claims,
    drawing,
    figures,
    layers,
    model,
    pretrained,
    survey,
    tables,
)
from value_aware_study.report.frame import Results, of_kernels, of_models
from value_aware_study.report.page import write_page

READ = (
    "At one number of keys, the distance between the two choices is what choosing by weight loses. "
    "In the maps, a bright cell is a head that needs many keys, or has a large error with few."
)
HOW_LEAD, HOW_TITLE = (
    "The models, the text and the machine of this run. A row is one model with exact attention, "
    "with which its approximations are compared.",
    "How it was measured",
)
FOR = {
    "smoke": "Runs of scale smoke test the code: no number of their models means anything. ",
    "laptop": "Models of scale laptop are trained for minutes: they are for trying things, not for "
    "conclusions. ",
}
"""Scale -> what its models are for"""
LINKS = {
    "README": "README.md",
    "Manual": "docs/manual.md",
    "Code": "CONTRIBUTING.md",
    "Records": "docs/run-files.md",
}
"""Files of the project that the page of a run links to"""

Exhibits = Exhibit | Sequence[Exhibit] | None
Named = tuple[str, Exhibits]
"""(its name in "Not measured yet: ..." of the section's lead, an exhibit or several)"""


def report_page(results: Results, origin: str = "") -> Page:
    """Builds the page of one run. It leaves out exhibits without data; their sections say so.

    `origin` names the code that made it. Raises ValueError if no evaluation was recorded.
    """
    if not results.records:
        raise ValueError("no evaluation records given; a report needs at least one")
    before_the_paper = [
        *([pretrained_section(results.pretrained)] if results.pretrained else []),
        *([caches_section(results.prompted)] if results.prompted else []),
    ]
    sections = [_every_r(results)]
    if results.surveyed or results.variants:
        sections.append(survey_section(results))
    for place, record in enumerate(results.probed, start=1):
        sections.append(model_section(record, "model" if place == 1 else f"model_{place}"))
    unchecked = (
        f"These files have no checksum and are read as they are: {', '.join(results.unchecked)}."
        if results.unchecked
        else ""
    )
    machines = [pair for section in [*before_the_paper, *sections] for pair in section.machines]
    sections.append(
        _section("how", HOW_TITLE, HOW_LEAD, [("", model.models(results, machines))], unchecked)
    )
    return Page(
        "If attention may look at only r keys, which should they be?",
        f"{FOR.get(results.records[0].scale, '')}Keys are chosen by attention weight (OVO: the r "
        "largest, renormalised) or for the attention output (OVA: the convex combination of at "
        "most r values closest to it). Both choices are oracles that look at exact attention: they "
        "show what is possible, not what it costs.",
        [
            _answer(results),
            *before_the_paper,
            _paper(results),
            Section(
                "everything",
                "Everything",
                "All measurements, and how they were made.",
                [],
                within=sections,
            ),
        ],
        origin,
        LINKS | dict(results.links),
    )


def _answer(results: Results) -> Section:
    """Builds the answer: the finding, the token explorer, and a drawing of the question."""
    labels = {record.model: record.model for record in results.probed} | results.names()
    return _section(
        "answer",
        "Answer",
        "",
        [
            ("", answer.answer(results.pretrained, results.prompted)),
            (
                "the token explorer",
                model.explorer(results.explored, labels, bool(results.replicates)),
            ),
            ("", drawing.drawing()),
        ],
    )


def pretrained_section(records: Sequence[Record]) -> Section:
    """Builds the section of pretrained models next to the strongest trivial baselines."""
    return _section(
        "pretrained",
        "On a pretrained decoder",
        "The paper's question in a model that others trained: keys chosen by weight and for the "
        "output beside rules that cost next to nothing, in the model's predictions and its layers.",
        _unnamed(
            [
                pretrained.few_keys(records),
                pretrained.predictions(records),
                pretrained.gap_closed(records),
                pretrained.every_setting(records),
            ]
        ),
        machines=[(pretrained.label(record), captions.machine_of(record)) for record in records],
    )


def caches_section(records: Sequence[CacheRecord]) -> Section:
    return _section(
        "caches",
        "Caches",
        "Which keys of a prompt a decoder's cache should keep. What is predicted comes after the "
        "prompt: none of the methods has seen it. A compressed cache saves memory before it saves "
        "time.",
        _unnamed([caches.to_use(records), *caches.caches_compared(records)]),
        machines=[
            (
                f"{r.model}, {words.plain_text(r.task)} of {r.text}, {r.prefix:,} tokens"
                f"{', BOS first' * r.begins_with_bos}",
                captions.machine_of(r),
            )
            for r in records
        ],
    )


def _paper(results: Results) -> Section:
    scale = results.records[0].scale
    published = {
        "published" if of == scale else of: verdicts
        for of, verdicts in results.verdicts.items()
        if of == scale or of not in FOR
    }
    claimed, results = claims.claims(results, published), pretrained.beside(results)
    return _section(
        "paper",
        "The paper",
        "The paper's claims with our verdicts, then its tables and figures next to ours. Its "
        "models are larger: compare the order of the methods and the ratios to exact attention. "
        "Hollow marks are the paper's.",
        [
            ("", claimed),
            ("Table 1", tables.table_1(results)),
            ("Figure 1", figures.figure_1(results)),
            ("Table 2", tables.table_2(results)),
            ("Figure 2", figures.figure_2(results)),
            ("Figure 3", figures.figure_3(results)),
            ("Table 3", tables.table_3(results.tokens)),
            ("Table 4", tables.table_4(results.training)),
        ],
    )


def _every_r(results: Results) -> Section:
    measured = of_models(results)
    exhibits: list[Named] = [
        ("Figure 4", figures.figure_4(results)),
        ("Figure 5", figures.figure_5(results)),
        (
            "Figure 6",
            layers.output_error(
                measured, "figure_6", captions.queries_of(measured), "Figure 6. ", "model"
            ),
        ),
        ("Figure 7", layers.figure_7(measured)),
        ("skewness", layers.skewness_gap(measured, "figure_8")),
        ("every cell", figures.grid_table(results)),
    ]
    return _section(
        "every_r",
        "Every r",
        "What is not in the paper: every number of keys, in the model's loss and in the layers' "
        "output. At one number of keys, the distance between OVO and OVA is what choosing for the "
        "output gains. The further right the two curves meet, the longer the gain lasts.",
        exhibits,
    )


def survey_section(results: Results) -> Section:
    """Builds the section of all the survey's methods at equal budgets.

    If the records are this run's own, it leaves out those of checkpoints that were not evaluated,
    and names them.
    """
    evaluated = {record.hashes.get("checkpoint") for record in results.records}
    of_evaluated = words.grouped(
        (bool(results.survey_of) or r.hashes.get("checkpoint") in evaluated, r)
        for r in results.surveyed
    )
    records, others = of_evaluated.get(True, []), of_evaluated.get(False, [])
    names = ", ".join(record.model for record in others)
    machines = captions.machines([*records, *results.variants])
    exhibits: list[Named] = [
        ("the distance to the optimum", survey.distance(Results.of(records))),
        ("attention patterns", survey.patterns(Results.of(records).records)),
        ("models trained with a method", survey.trained(results.variants, records)),
    ]
    return _section(
        "survey",
        "The survey",
        "Every method of the survey at equal budgets, beside keys chosen by weight (OVO) and the "
        "best keys found for the output (OVA); a mark further left is closer to exact attention.",
        exhibits,
        f"Left out, because their checkpoints were not evaluated: {names}."
        * bool(names)
        + f"Its models are those of the published run of scale {results.survey_of}. "
        f"{FOR.get(results.survey_of, '')}"
        * bool(results.survey_of)
        + " All models are from their first training."
        * bool(results.replicates and not results.survey_of),
        machines,
    )


def model_section(
    record: Record, name: str = "model", explored: Exploration | None = None
) -> Section:
    """Builds a probe's section; `name` is its anchor and the prefix of its exhibits' anchors."""
    setting = captions.probed_on(record)
    kernels = of_kernels(record)
    exhibits = [
        layers.control(record, f"{name}_control", setting),
        model.explorer(explored, {record.model: record.model}),
        layers.matching_bars(kernels, f"{name}_matching_keys", setting),
        model.end_metric(record, f"{name}_end_metric", setting),
        model.keys_of_layers(record, f"{name}_layers", setting),
        model.error_by_head(record, f"{name}_error_by_head", setting),
        model.keys_by_head(record, f"{name}_keys_by_head", setting),
        model.head_budgets(record, f"{name}_head_budgets", setting),
        layers.output_error(kernels, f"{name}_output_error", setting),
        layers.skewness_gap(kernels, f"{name}_skewness_gap", setting),
    ]
    lead = [f"{headline(record).rstrip('.')}.", READ]
    if record.attention[0].post_hoc:
        lead.append(
            "The model was trained with another kernel than the one measured (post hoc). Exact "
            "attention here is exact attention with the measured kernel, which the model has never "
            "met."
        )
    return _section(
        name,
        f"Probed: {record.model}",
        " ".join(lead),
        _unnamed(exhibits),
        machines=[(record.model, captions.machine_of(record))],
    )


def _unnamed(exhibits: Sequence[Exhibits]) -> list[Named]:
    """Returns exhibits that the section's lead does not list if they are missing."""
    return [("", exhibit) for exhibit in exhibits]


def _section(
    name: str,
    title: str,
    lead: str,
    named: Sequence[Named],
    more: str = "",
    machines: Sequence[tuple[str, str]] = (),
) -> Section:
    """Builds a section of the measured exhibits; its lead names the others, then appends `more`."""
    absent = ", ".join(title for title, exhibits in named if title and not exhibits)
    several = ([some] if isinstance(some, Exhibit) else some or [] for _, some in named)
    exhibits = [exhibit for some in several for exhibit in some]
    return Section(
        name,
        title,
        " ".join(filter(None, [lead, f"Not measured yet: {absent}." if absent else "", more])),
        exhibits,
        machines,
    )


def write_probe(
    record: Record,
    folder: Path | str,
    cached: CacheRecord | None = None,
    explored: Exploration | None = None,
) -> None:
    """Writes the page of a probe with its exhibits' files, record.json and heads.csv.

    `cached` (the loss of cache methods on the same text) adds caches.json. `explored`
    (`evaluation.explorer.exploration` of the same model) adds the token explorer and explorer.json.
    The same record gives the same bytes. If the page cannot be drawn, the folder stays unchanged.
    """
    heads = pd.DataFrame(
        [vars(at) for at in record.attention[0].output_error.errors if at.head is not None],
        columns=["layer", "head", "method", "r", "error", "low", "high"],
    )
    texts = {
        "record.json": with_checksum(record.to_json()),
        "heads.csv": heads.to_csv(index=False, float_format="%.8g"),
        **({"caches.json": with_checksum(cached.to_json())} if cached else {}),
    }
    section = model_section(record, explored=explored)
    write_page(
        Page(
            f"{record.model}: how many keys its attention needs",
            "Both choices of keys, by attention weight (OVO) and for the output (OVA), look at "
            "exact attention: they show what is possible, not what it costs.",
            [section, Section("how", HOW_TITLE, "; ".join(*section.machines), [])],
        ),
        Path(folder),
        texts,
    )
