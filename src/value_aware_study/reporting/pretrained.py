"""The figures, table and page of a pretrained model's attention, from one record."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from value_aware_study.reporting import captions, figures, style
from value_aware_study.reporting.document import page, sections
from value_aware_study.reporting.measured_report import keys_needed_table, measured_figures
from value_aware_study.reporting.measurements import (
    Measured,
    keys_needed_sentence,
    with_output_error,
)
from value_aware_study.reporting.records import KERNEL_LABELS, KERNELS

__all__ = ["write_pretrained"]

# A name is a file's and an address on the page, and the table is called keys_needed.
NAMES = {
    "output_error": ("output_error", ""),
    "keys_needed": ("matching_keys", ""),
    "skewness_gap": ("skewness_gap", ""),
}
# A pretrained encoder attends with softmax; other kernels are put on its queries and keys.
OWN = "exponential"


def of_pretrained(record: Mapping[str, Any]) -> list[Measured]:
    """What was measured with each kernel on a pretrained model's queries, keys and values."""
    kernels = record["kernels"]
    return [
        _of_kernel(kernel, kernels[kernel])
        for kernel in sorted(kernels, key=lambda k: (k not in KERNELS, [*KERNELS, k].index(k)))
    ]


def _of_kernel(kernel: str, measures: Mapping[str, Any]) -> Measured:
    name = KERNEL_LABELS.get(kernel, kernel)
    label = f"{name}, {'its own' if kernel == OWN else 'post hoc'}"
    mark = style.KERNEL_MARKS.get(name, style.Mark(style.OTHER, "circle"))
    errors = measures["output_error"]
    return Measured(label, mark, errors, measures.get("skewness_gap"), errors["keys"])


def _setting(record: Mapping[str, Any]) -> str:
    run_on = record.get("run_on", {})
    installed = run_on.get("versions", {})
    versions = ", ".join(f"{name} {installed[name]}" for name in sorted(installed))
    return (
        f"{record['model']}, heads of {record['head_dim']} dimensions; text: {record['text']}; "
        f"hardware: {run_on.get('hardware', 'not recorded')}; {versions or 'no versions'}."
    )


def write_pretrained(record: Mapping[str, Any], folder: Path) -> None:
    """Write output_error, matching_keys and skewness_gap (.png), keys_needed and index.html.

    `record` holds `model`, `head_dim`, `text`, `run_on` and, for each of `kernels`, what the
    evaluation measures: `output_error` and, for some, `skewness_gap`. The same record gives the
    same bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    measured, setting = of_pretrained(record), _setting(record)
    drawn = measured_figures(measured, NAMES, setting)
    table = keys_needed_table(measured, setting)
    for figure in drawn:
        figures.save(figure.chart, folder / f"{figure.name}.png")
    (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    (folder / f"{table.name}.md").write_text(table.markdown(), encoding="utf-8")
    body = [_introduction(record, measured), *sections([table], drawn).values()]
    html = page(f"{record['model']}: value-aware attention, measured", body)
    (folder / "index.html").write_text(html, encoding="utf-8")


def _introduction(record: Mapping[str, Any], measured: Sequence[Measured]) -> str:
    lines = (
        f"<li>{escape(item.label)}: {escape(keys_needed_sentence(errors))}.</li>"
        for item, errors in with_output_error(measured)
    )
    return (
        f"<p>{escape(_setting(record))} {escape(captions.OPTIMAL)} "
        f"{escape(captions.BEST_FOUND)}</p>\n<ul>\n" + "\n".join(lines) + "\n</ul>"
    )
