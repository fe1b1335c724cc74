"""The contents of a page: which exhibits answer which question, in the order of reading."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from value_aware_attention.files import with_checksum
from value_aware_attention.measurement.cache_record import CacheRecord, DecodingRecord
from value_aware_attention.measurement.headline import headline
from value_aware_attention.measurement.record import Record
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Page, Section
from value_aware_study.report.exhibits import (
    benchmark,
    budgets,
    caches,
    claims,
    drawing,
    every_r,
    explorer,
    how,
    layers,
    model,
    paper_figures,
    paper_tables,
    survey,
)
from value_aware_study.report.measured import measured_on, of_kernels, of_models
from value_aware_study.report.page import write_page
from value_aware_study.report.results import Results

QUESTION = "If attention may look at only r keys, which should they be?"
LEAD = (
    "Keys are chosen by attention weight (OVO: the r largest, renormalised) or for the attention "
    "output (OVA: the convex combination of at most r values closest to it). Both choices are "
    "oracles that look at exact attention: they measure what a method could reach, not what it "
    "costs."
)
ANSWER = (
    "The bars count the keys chosen by weight (OVO) that do as well as a few keys chosen for the "
    "output (OVA), in the trained network and in one with random weights; the loss of the model "
    "that keeps few keys stands beside them where it was measured. Below the bars every claim of "
    "the paper has a verdict, with the number of comparisons that agree."
)
PAPER = (
    "Tables 1 to 4 and Figures 1 to 3, ours beside the paper's, whose models are larger. Compare "
    "the order of the methods and the ratios to exact attention, not the levels; hollow marks are "
    "the paper's."
)
EVERY_R = (
    "What is not in the paper: every number of keys, in the model's loss and in the layers' "
    "output. At one number of keys, the distance between OVO and OVA is what choosing for the "
    "output gains; the further right the two curves meet, the more keys the gain lasts for."
)
SURVEY = (
    "Every method of the survey at equal budgets, beside keys chosen by weight (OVO) and the best "
    "keys found for the output (OVA); a mark further left is closer to exact attention. Time and "
    "memory of one layer follow: a mark to the right of the dashed line costs more than dense "
    "attention of that length."
)
CACHES = (
    "A compressed key-value cache keeps one set of keys for all later queries. Every method keeps "
    "the same number of keys in all and is judged on queries that it has not seen: a mark further "
    "left, or lower, is closer to the exact model, and its colour says which queries were observed."
)
CACHES_QUESTION = "Which keys should a compressed cache keep?"
CACHES_LEAD = (
    "A compressed key-value cache keeps one set of keys for all later queries. Methods that score "
    "keys one by one stand beside sets that are chosen together for the attention output, with the "
    "same number of keys in every head and with one budget for the whole model. The models are "
    "small and were trained for these tasks; no pretrained decoder was measured."
)
DECODING = (
    "One line around model.generate (hugging_face.compressed_cache) compresses what a prompt has "
    "filled. A lower point is closer to the model with its full cache, one further left takes "
    "less memory or time."
)
PROBE = (
    "Both choices of keys, by attention weight (OVO) and for the output (OVA), look at exact "
    "attention: they measure what a method could reach, not what it costs."
)
READ = (
    "At one number of keys, the distance between the two choices is what choosing by weight loses. "
    "In the maps a bright cell is a head that needs many keys, or that few keys serve badly."
)
POST_HOC = (
    "The model was trained with another kernel than the one measured (post hoc): exact attention "
    "here is exact attention with that kernel, and the end metric is that of a model that never "
    "met it."
)
HOW, HOW_TITLE = (
    "The models, the text and the machine behind every number of this run. A row is one model with "
    "exact attention: the value that every approximation above is compared with.",
    "How it was measured",
)

Found = tuple[str, Exhibit | Sequence[Exhibit] | None]
"""An exhibit, or several, and the name that the section's lead has for one not measured yet."""


def report_page(results: Results, origin: str = "") -> Page:
    """Builds the page of one run; an exhibit without data is left out, and its section says so.

    `origin` says which code made it.

    Raises ValueError where no evaluation was recorded.
    """
    if not results.records:
        raise ValueError("no evaluation records given; a report needs at least one")
    names = ["model", *(f"model_{place}" for place in range(2, len(results.probed) + 1))]
    has_survey = results.surveyed or results.variants or results.benchmark
    beside = [
        *([survey_section(results)] if has_survey else []),
        *([cache_section(results.caches)] if results.caches else []),
        *([decoding_section(results.decoded)] if results.decoded else []),
        *(model_section(*one) for one in zip(results.probed, names, strict=False)),
    ]
    sections = [
        _section("answer", "The claims", ANSWER, _answer(results)),
        _section("paper", "The paper", PAPER, _paper(results)),
        _section("every_r", "Every r", EVERY_R, _every_r(results)),
        *beside,
        _how(results, beside),
    ]
    return Page(QUESTION, LEAD, sections, origin)


def _answer(results: Results) -> list[Found]:
    """Lists the exhibits that answer, beside a drawing of the question.

    The first is of a probed model, or else a causal one; so the explorer's first model.
    """
    labels = {record.model: record.model for record in results.probed} | results.names()
    return [
        ("how many keys match", layers.hero(results)),
        ("the token explorer", explorer.explorer(results.explored, labels)),
        ("", drawing.drawing()),
        ("the claims", claims.claims(results)),
    ]


def _paper(results: Results) -> list[Found]:
    return [
        ("Table 1", paper_tables.table_1(results)),
        ("Figure 1", paper_figures.figure_1(results)),
        ("Table 2", paper_tables.table_2(results)),
        ("Figure 2", paper_figures.figure_2(results)),
        ("Figure 3", paper_figures.figure_3(results)),
        ("Table 3", paper_tables.table_3(results.tokens)),
        ("Table 4", paper_tables.table_4(results.training)),
    ]


def _every_r(results: Results) -> list[Found]:
    measured = of_models(results)
    on = measured_on(measured)
    return [
        ("Figure 4", every_r.figure_4(results)),
        ("Figure 5", every_r.figure_5(results)),
        ("Figure 6", layers.output_error(measured, "figure_6", on, "Figure 6. ", "model")),
        ("Figure 7", layers.figure_7(measured)),
        ("the keys needed in every layer", layers.keys_needed(measured)),
        ("Figure 8", layers.skewness_gap(measured, "figure_8", begins="Figure 8. ")),
        ("every cell", every_r.grid(results)),
    ]


def survey_section(results: Results) -> Section:
    """Builds the section of every method of the survey: equal budgets, time, and memory.

    Records of other checkpoints than the evaluation's are left out, and named.
    """
    records, others = results.of_checkpoints(results.surveyed)
    timed, machines = None, captions.machines([*records, *results.variants])
    if results.benchmark:
        timed = benchmark.Measurements(results.benchmark)
        machines.append(timed.machine)
    names = ", ".join(record.model for record in others)
    left_out = f"Left out, of other checkpoints than the evaluation's: {names}." if names else ""
    found: list[Found] = [
        ("the distance to the optimum", survey.distance(Results.of(records))),
        ("attention patterns", survey.patterns(Results.of(records).records)),
        ("models trained with a method", survey.trained(results.variants, records)),
        *(_timed(timed) if timed else [("time and memory", None)]),
    ]
    return _section("survey", "The survey", SURVEY, found, left_out, machines)


def _timed(measured: benchmark.Measurements) -> list[Found]:
    return [
        ("the claims of time and memory", benchmark.survey_claims(measured)),
        ("time and memory", benchmark.time_and_memory(measured)),
        ("the growth of cost", benchmark.exponents(measured)),
        ("the cost tables", benchmark.cost_tables(measured)),
    ]


def cache_section(records: Sequence[CacheRecord]) -> Section:
    """Builds the section on keys that a cache should keep, from records of models and texts."""
    records = caches.in_order(records)
    firsts = [one for one in records if not caches.is_again(one)] or records
    found = [
        budgets.by_memory(firsts),
        budgets.gains(records),
        budgets.keys_by_head(firsts),
        caches.by_text(firsts),
        caches.answers(records),
        caches.gain(records),
        caches.refit_gain(records),
        caches.gaps(firsts),
        caches.agreement(firsts),
        caches.every_cell(records),
    ]
    return _section("caches", "Caches", CACHES, [("", one) for one in found])


def caches_page(
    caches: Sequence[CacheRecord], decoded: Sequence[DecodingRecord], origin: str = ""
) -> Page:
    """Builds a page of cache methods alone: what each loses, then models that decode with them.

    Raises ValueError where none was recorded.
    """
    if not caches:
        raise ValueError("no records of caches given; make caches writes them")
    sections = [cache_section(caches), *([decoding_section(decoded)] if decoded else [])]
    every: list[CacheRecord | DecodingRecord] = [*caches, *decoded]
    said = dict.fromkeys(captions.machine_of(record) for record in every)
    models = ", ".join(dict.fromkeys(record.model for record in every))
    last = Section("how", HOW_TITLE, f"Models: {models}. Hardware: {'; '.join(said)}.", [])
    return Page(CACHES_QUESTION, CACHES_LEAD, [*sections, last], origin)


def decoding_section(records: Sequence[DecodingRecord]) -> Section:
    """Builds the section on models that decode with compressed caches."""
    machines = [(f"{record.model}, decoding", captions.machine_of(record)) for record in records]
    found: list[Found] = [("", budgets.by_cache(records))]
    return _section("decode", "Decoding", DECODING, found, machines=machines)


def model_section(
    record: Record, name: str = "model", explored: Exploration | None = None
) -> Section:
    """Builds a probe's section; `name` is its anchor and begins those of its exhibits."""
    setting = captions.probed_on(record)
    kernels = of_kernels(record)
    found = [
        layers.control(record, f"{name}_control", setting),
        explorer.explorer(explored, {record.model: record.model}),
        layers.matching_bars(kernels, f"{name}_matching_keys", setting),
        model.end_metric(record, f"{name}_end_metric", setting),
        model.keys_of_layers(record, f"{name}_layers", setting),
        model.error_by_head(record, f"{name}_error_by_head", setting),
        model.keys_by_head(record, f"{name}_keys_by_head", setting),
        model.head_budgets(record, f"{name}_head_budgets", setting),
        layers.output_error(kernels, f"{name}_output_error", setting),
        layers.skewness_gap(kernels, f"{name}_skewness_gap", setting),
    ]
    post_hoc = [POST_HOC] if record.attention[0].post_hoc else []
    lead = [f"{headline(record).rstrip('.')}.", READ, *post_hoc]
    machines = [(record.model, captions.machine_of(record))]
    title, exhibits = f"Your model: {record.model}", [("", one) for one in found]
    return _section(name, title, " ".join(lead), exhibits, machines=machines)


def _how(results: Results, beside: Sequence[Section]) -> Section:
    machines = [one for section in beside for one in section.machines]
    files = ", ".join(results.unchecked)
    said = f"These files have no checksum and are read as they are: {files}." if files else ""
    return _section("how", HOW_TITLE, HOW, [("", how.models(results, machines))], said)


def _section(
    name: str,
    title: str,
    lead: str,
    found: Sequence[Found],
    more: str = "",
    machines: Sequence[tuple[str, str]] = (),
) -> Section:
    """Builds a section of the exhibits found; its lead names the missing ones, then says `more`."""
    missing = ", ".join(what for what, exhibits in found if what and not exhibits)
    said = [lead, f"Not measured yet: {missing}." if missing else "", more]
    several = ([one] if isinstance(one, Exhibit) else one or [] for _, one in found)
    exhibits = [exhibit for some in several for exhibit in some]
    return Section(name, title, " ".join(filter(None, said)), exhibits, machines)


def write_probe(
    record: Record,
    folder: Path | str,
    cached: CacheRecord | None = None,
    explored: Exploration | None = None,
) -> None:
    """Writes the page of a probe with its exhibits' files, record.json and heads.csv.

    `cached` (the loss of cache methods on the same text) adds a section and caches.json, `explored`
    (`evaluation.explorer.exploration` of the same model) the token explorer and explorer.json. The
    same record gives the same bytes. A page that cannot be drawn leaves the folder as it was.
    """
    rows = [vars(at) for at in record.attention[0].output_error.errors if at.head is not None]
    heads = pd.DataFrame(rows, columns=["layer", "head", "method", "r", "error", "low", "high"])
    texts = {
        "record.json": with_checksum(record.to_json()),
        "heads.csv": heads.to_csv(index=False, float_format="%.8g"),
    }
    if cached is not None:
        texts["caches.json"] = with_checksum(cached.to_json())
    title = f"{record.model}: how many keys its attention needs"
    section = model_section(record, explored=explored)
    last = Section("how", HOW_TITLE, "; ".join(*section.machines), [])
    sections = [section, *([cache_section([cached])] if cached else []), last]
    write_page(Page(title, PROBE, sections), Path(folder), texts)
