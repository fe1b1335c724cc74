"""The report as one HTML document with its own style, images by relative path."""

from collections.abc import Iterable, Sequence
from html import escape

import pandas as pd

from value_aware_study.reporting.captions import measured_on, versions
from value_aware_study.reporting.figure import Figure
from value_aware_study.reporting.records import Record, find, settings
from value_aware_study.reporting.table import Table, number

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: CanvasText; background: Canvas; }
h1 { font-size: 1.7rem; line-height: 1.25; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; }
section { margin: 2.5rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid; font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, td.words { text-align: left; }
td.words { white-space: normal; min-width: 14rem; }
tbody tr:nth-child(even) { background: color-mix(in srgb, CanvasText 5%, Canvas); }
figure { margin: 0; }
figure img { max-width: 100%; height: auto; background: white; border-radius: 4px; }
figcaption, .caption { font-size: .88rem; opacity: .85; max-width: 50rem; margin: .5rem 0 1rem; }
pre { padding: .8rem 1rem; overflow-x: auto;
  background: color-mix(in srgb, CanvasText 7%, Canvas); }
"""

# A cell longer than this is text that may wrap.
LONG_TEXT = 36

INTRODUCTION = """
If attention may look at only r keys, how much of the loss comes from choosing them by attention
weight instead of by the attention output? Language models are trained with exact attention, then
evaluated with the attention of every layer replaced by an approximation: optimal value-oblivious
(OVO, the r largest weights, renormalised), optimal value-aware (OVA, the convex combination of at
most r values closest to the exact output), methods between the two, a sliding window, LSH and
orthogonal random features (ORF). OVA is proved optimal at r = 1 and from r = head size + 1 on;
between, it is best found, an upper bound on the optimal error. Numbers called the paper's are those
printed in Value-aware Approximate Attention (Gupta and Berant, 2021); they belong to larger models
trained on other text.
"""

REPRODUCE = """
Every number and picture on this page is written by the report stage of the pipeline, from the
records of the evaluation. To run all of it, from the text to this page:
"""

# The order of the page; what is not named here follows.
FIRST = (
    *("table_1", "figure_1", "table_2", "figure_2", "figure_5", "figure_6", "figure_7"),
    *("keys_needed", "figure_8", "skewness", "figure_4"),
)

PRETRAINED = """
Figures 6 to 8 for the attention of a pretrained model, on real text, are on
<a href='pretrained/index.html'>a page of their own</a>; they are written by
<code>python -m pipelines.pretrained</code>, outside the pipeline.
"""

FACTS = {
    "model": "model",
    "kernel": "kernel",
    "length": "sequence length",
    "exact": "exact attention",
    "measured": "measured on",
    "data": "data",
    "hardware": "hardware",
    "versions": "versions",
    "scale": "scale",
}


def html_document(
    records: Sequence[Record],
    tables: Sequence[Table],
    figures: Sequence[Figure],
    other: Sequence[Record] = (),
    *,
    first: str = "",
) -> str:
    """The report as one HTML document; `other` are the records of another run.

    `first` is a section that comes before everything else.
    """
    known = sections(tables, figures)
    early = [name for name in FIRST if name in known]
    run = pd.concat([_facts(records), _facts(other)])
    order = [*early, *(name for name in known if name not in early)]
    body = [
        f"<p>{escape(INTRODUCTION.strip())}</p>",
        first,
        f"<section><h2>What was run</h2>{_html(run)}</section>",
        *(known[name] for name in order),
        f"<section><h2>A pretrained model</h2><p>{PRETRAINED}</p></section>",
        "<section><h2>Every cell</h2><p><a href='grid.csv'>grid.csv</a> has one line for each "
        "model, approximation, parameters and seed.</p></section>",
        f"<section><h2>Reproduce</h2><p>{escape(REPRODUCE.strip())}</p>"
        "<pre>make repro</pre></section>",
    ]
    return page("Value-aware approximate attention: results", body)


def sections(tables: Sequence[Table], figures: Sequence[Figure]) -> dict[str, str]:
    """The HTML of every table and figure by its name."""
    return {table.name: _table_section(table) for table in tables} | {
        figure.name: _figure_section(figure) for figure in figures
    }


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML document with the report's style."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _facts(records: Iterable[Record]) -> pd.DataFrame:
    """One row a model: what it is, its metric with exact attention, and what it was run on."""
    records = list(records)
    frame = settings(records)
    rows = []
    for record in records:
        exact = find(frame, record["model"], "exact", {})
        unit = " %" if record["metric"] == "error" else ""
        run_on = record.get("run_on", {})
        value = number(exact["value"] if exact else None)
        row = {name: str(record.get(name, "")) for name in FACTS}
        row |= {"exact": f"{record['metric']} {value}{unit}", "measured": measured_on(record)}
        row |= {name: str(run_on.get(name, "not recorded")) for name in ("data", "hardware")}
        row["versions"] = versions(record)
        rows.append(row)
    return pd.DataFrame(rows, columns=list(FACTS)).rename(columns=FACTS)


def _cell(text: str) -> str:
    words = ' class="words"' if len(text) > LONG_TEXT else ""
    return f"<td{words}>{escape(text)}</td>"


def _html(frame: pd.DataFrame) -> str:
    head = "".join(f"<th>{escape(str(name))}</th>" for name in frame.columns)
    lines = (
        "<tr>" + "".join(_cell(str(cell)) for cell in row) + "</tr>"
        for row in frame.to_numpy().tolist()
    )
    rows = "\n".join(lines)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _table_section(table: Table) -> str:
    links = f"<a href='{table.name}.csv'>CSV</a>, <a href='{table.name}.md'>Markdown</a>"
    return (
        f"<section id='{table.name}'><h2>{escape(table.title)}</h2>\n{_html(table.display)}\n"
        f"<p class='caption'>{escape(table.caption)} ({links})</p></section>"
    )


def _figure_section(figure: Figure) -> str:
    return (
        f"<section id='{figure.name}'><h2>{escape(figure.title)}</h2>\n<figure>"
        f"<img src='{figure.name}.png' alt='{escape(figure.title, quote=True)}'>\n"
        f"<figcaption>{escape(figure.caption)}</figcaption></figure></section>"
    )
