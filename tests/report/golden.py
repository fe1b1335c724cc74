"""Writes the files of a SYNTHETIC run, builds its page, and reads its numbers and its layout."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import evaluated
import numpy as np
from synthetic import (
    ends,
    gap_cell,
    probed,
    survey_cell,
    survey_record,
    trained_again,
    with_attention,
    with_cells,
)

from tests.report.pages import exploration
from value_aware_attention.records.record import Baseline, SkewnessGap
from value_aware_study.report.contents import report_page
from value_aware_study.report.records import read

KEPT = Path(__file__).parent / "golden"
# Tables whose Markdown is kept next to their numbers: each has columns that no other one has
LAID_OUT = ("claims", "table_1", "table_2", "table_3", "table_4", "trained")
LINES = 40  # of a file that are kept; the lines beyond are kept as a sha256
UNITS = np.array([0.9, 1.0, 1.1, 0.95, 1.05, 1.0])


def loss(value, metric):
    return np.log(value) if metric == "perplexity" else value / 100


def units(value, metric, noise):
    """Builds six units of 100 targets whose mean gives the value; `noise` differs by setting."""
    means = loss(value, metric) * UNITS * (1 + 0.02 * noise * np.resize([1.0, -1.0], len(UNITS)))
    return {"unit_totals": tuple(100 * means), "unit_counts": (100.0,) * len(UNITS)}


def with_units(record):
    """Adds losses by unit; head size + 1 value-aware keys are exact to rounding."""

    def changed(cell):
        exact = cell.approximation == "optimal_v_aware" and cell.parameters["r"] > 64
        error = replace(cell.error, largest_error=1e-6 if exact else 0.5)
        noise = len(cell.approximation) % 5 / 5
        return replace(cell, error=error, **units(cell.value, record.metric, noise))

    return with_cells(record, changed)


def with_baselines(record):
    """Adds count models, and for the short model its score on the long model's text."""
    numbers = ends(90.0, 91.0, 80.0, 99.0) | units(90.0, record.metric, 0.1)
    counted = Baseline(**numbers, tokens=7)
    name = "5gram" if record.task == "causal" else "4grams_shown_token"
    baselines_by_name = {"unigram": counted, name: counted}
    if record.model == "masked_short":
        longer = ends(47.5, 48.5, 80.0, 99.0) | units(47.5, "error", 0.1)
        baselines_by_name["longer_text"] = Baseline(**longer, length=512)
    return replace(record, baselines=baselines_by_name)


def variants():
    """Yields a model trained with a method of the survey, and one trained with mixing."""
    exact = replace(survey_record("masked"), cells=(survey_cell("exact", {}, None, 0.0, 90.0),))
    windows = {"trained_with": "SlidingWindow", "arguments": {"r": 16, "engine": None}}
    yield replace(exact, model="masked_elu_sliding_window", **windows)
    yield replace(exact, model="masked_elu_fourier_mixing", trained_with="FourierMixing")


def stages(folder):
    records = [with_baselines(with_units(content)) for content in evaluated.records()]
    tiny = probed(("exponential", "elu"))
    gaps = (gap_cell(layer, degree, 4, {"4": 2 + degree}) for layer in (0, 1) for degree in (0, 2))
    tiny = with_attention(tiny, skewness_gap=SkewnessGap(rows=64, cells=tuple(gaps)))
    again = trained_again(records, 0.97, 1.02, tasks=("causal", "masked"))
    texts = {f"records/{content.model}": content for content in again}
    texts |= {
        f"records/survey/{content.model}": content
        for content in map(survey_record, ("causal", "masked"))
    }
    other = replace(survey_record(), model="other", hashes={"checkpoint": "other"})
    texts |= {"records/survey/other": other, "explored/all": exploration()}
    texts |= {f"records/trained/{content.model}": content for content in variants()}
    texts |= {
        "records/probe/a/record": replace(tiny, control=probed()),
        "records/probe/b/record": replace(tiny, model="<tiny>", unit="text"),
    }
    written = {name: content.to_json() for name, content in texts.items()}
    training = evaluated.training()
    written |= {f"metrics/train/{name}": json.dumps(content) for name, content in training.items()}
    written |= {"metrics/tokens": json.dumps(evaluated.tokens())}
    for name, text in written.items():
        file = folder / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def page(folder):
    """Builds the page of the places that conf/report.yaml names; nothing is published."""
    names = ("records", "published", "metrics", "explored", "results", "spread", "citation")
    return report_page(read({name: folder / name for name in names}))


def kept(page) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of every file that is kept of a page."""
    for exhibit in page.exhibits():
        if exhibit.table:
            yield f"{exhibit.name}.csv", shortened(exhibit.table.csv())
            if exhibit.name in LAID_OUT:
                yield f"{exhibit.name}.md", shortened(exhibit.table.markdown())
    yield "page.md", "\n\n".join(headings(page)) + "\n"


def headings(page) -> Iterator[str]:
    yield f"# {page.title}"
    for section in page.every_section():
        yield f"## {section.title} #{section.name}"
        for exhibit in section.exhibits:
            panels = f"{len(exhibit.charts)} panels" if exhibit.charts else "no panels"
            folded = ", folded" if exhibit.folded else ""
            yield f"### {exhibit.title} #{exhibit.name} ({panels}{folded})"


def shortened(text: str) -> str:
    lines = text.splitlines(keepends=True)
    if len(lines) <= LINES:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return "".join([*lines[:LINES], f"{len(lines)} lines, sha256 {digest}\n"])


def renew(texts):
    for file in KEPT.glob("*"):
        file.unlink()
    for name, text in texts.items():
        (KEPT / name).write_text(text, encoding="utf-8")
