"""A probed model in the report, and the page of a probe alone: how many keys it needs."""

from pathlib import Path

import pandas as pd

from value_aware_attention.files import with_checksum
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_attention.measurement.record import OutputError, Record
from value_aware_attention.probe.lines import headline
from value_aware_study.report import captions
from value_aware_study.report.caches import cache_section
from value_aware_study.report.exhibit import Exhibit, Page, Section
from value_aware_study.report.exhibits import (
    match_bars,
    model_end_metric,
    model_layers,
    model_skewness,
    output_error,
)
from value_aware_study.report.exhibits.model_heads import error_by_head, keys_by_head
from value_aware_study.report.measurements import of_kernels
from value_aware_study.report.page import write_page

__all__ = ["model_section", "write_probe"]

LEAD = (
    "Both choices of keys, by attention weight (OVO) and for the output (OVA), look at exact "
    "attention: they measure what a method could reach, not what it costs."
)
CAUSAL = (
    "A causal query sees its past alone: rows at all positions count alike, and one that sees no "
    "more keys than are kept is exact with either method."
)
POST_HOC = (
    "The model was trained with another kernel than the one measured (post hoc): exact attention "
    "here is exact attention with that kernel, and the end metric is that of a model that never "
    "met it."
)


def model_section(record: Record, name: str = "model") -> Section:
    """What a probe found; `name` is the section's anchor and begins those of its exhibits."""
    setting = _setting(record)
    kernels = of_kernels(record)
    drawn: list[Exhibit | None] = [
        match_bars.exhibit(record, f"{name}_matching_keys", setting),
        model_end_metric.exhibit(record, f"{name}_end_metric", setting),
        model_layers.exhibit(record, f"{name}_layers", setting),
        error_by_head(record, f"{name}_error_by_head", setting),
        keys_by_head(record, f"{name}_keys_by_head", setting),
        output_error.exhibit(kernels, f"{name}_output_error", setting),
        model_skewness.exhibit(record, f"{name}_skewness_gap", setting),
    ]
    lead = [headline(record), *([POST_HOC] if record.attention[0].post_hoc else [])]
    exhibits = [exhibit for exhibit in drawn if exhibit]
    run_on = record.run_on
    on = captions.machine(run_on.hardware, run_on.threads, run_on.versions)
    title, machines = f"Your model: {record.model}", [(record.model, on)]
    return Section(name, title, " ".join(lead), exhibits, machines)


def write_probe(record: Record, folder: Path | str, caches: CacheRecord | None = None) -> None:
    """Writes the page of a probe with its exhibits' files, record.json and heads.csv.

    `caches`, what cache methods lose on the same text, is a section of its own and caches.json.

    The same record gives the same bytes. A page that cannot be drawn leaves the folder as it was.
    """
    heads = _heads(record.attention[0].output_error)
    texts = {
        "record.json": with_checksum(record.to_json()),
        "heads.csv": heads.to_csv(index=False, float_format="%.8g"),
    }
    if caches is not None:
        texts["caches.json"] = with_checksum(caches.to_json())
    title = f"{record.model}: how many keys its attention needs"
    section = model_section(record)
    how = Section("how", "How it was measured", "; ".join(*section.machines), [])
    sections = [section, *([cache_section([caches])] if caches else []), how]
    write_page(Page(title, LEAD, sections), Path(folder), texts)


def _setting(record: Record) -> str:
    """How it was measured."""
    text, own = record.text, record.attention[0].output_error
    rows = own.rows // (own.heads * own.units)
    parts = [
        f"{record.model} ({record.architecture}, {own.layers} layers of {own.heads} heads of "
        f"{own.head_dim} dimensions), {record.kernel} kernel",
        f"{text.units} of {text.available_units} windows of {record.length} tokens, "
        f"{text.share_read:.0%} of the text's {text.tokens:,} tokens",
        f"{rows} queries of each head and window; OVA's search: {own.search}",
    ]
    causal = f" {CAUSAL}" if own.causal else ""
    return f"{'; '.join(parts)}.{causal}"


def _heads(errors: OutputError) -> pd.DataFrame:
    """Every layer, head, method and size: relative output error with its interval."""
    rows = [vars(at) for at in errors.errors if at.head is not None]
    return pd.DataFrame(rows, columns=["layer", "head", "method", "r", "error", "low", "high"])
