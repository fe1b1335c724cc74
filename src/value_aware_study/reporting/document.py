"""A page of results: tables, figures, claims and text, written with their files to one folder."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment

from value_aware_study.report.claim import Claims
from value_aware_study.report.formatting import Figure, Table
from value_aware_study.reporting import figures

__all__ = ["Part", "Text", "write_page"]

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

# Everything that is filled in is escaped here, but for the `html` of a text, which is our own.
PAGE = Environment(autoescape=True).from_string("""
{%- macro html_table(frame) -%}
<div class="scroll"><table>
<thead><tr>{% for name in frame.columns %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in frame.to_numpy().tolist() -%}
<tr>{% for cell in row %}<td{% if cell | string | length > long_text %} class="words"{% endif %}>
{{- cell }}</td>{% endfor %}</tr>
{% endfor -%}
</tbody></table></div>
{%- endmacro -%}

{%- macro Table(part) -%}
<section id='{{ part.name }}'><h2>{{ part.title }}</h2>
{{ html_table(part.display) }}
<p class='caption'>{{ part.caption }} (<a href='{{ part.name }}.csv'>CSV</a>, {# -#}
<a href='{{ part.name }}.md'>Markdown</a>)</p></section>
{%- endmacro -%}

{%- macro Figure(part) -%}
<section id='{{ part.name }}'><h2>{{ part.title }}</h2>
<figure><img src='{{ part.name }}.png' alt='{{ part.title }}'>
<figcaption>{{ part.caption }}</figcaption></figure></section>
{%- endmacro -%}

{%- macro Claims(part) -%}
<section id='claims'><h2>{{ part.title }}</h2>
<p class='caption'>{{ part.about }}</p>
<ul>
{% for answer in part.answers -%}
<li><p><b>{{ answer.claim }}</b> {{ answer.verdict_said() }}</p><p class='caption'>
{%- for line in answer.lines() %}{{ line }}{% if not loop.last %}<br>{% endif %}{% endfor -%}
</p></li>
{% endfor -%}
</ul></section>
{%- endmacro -%}

{%- macro Text(part) -%}
{% if part.title %}<section><h2>{{ part.title }}</h2>{% endif -%}
{% if part.strong %}<p><strong>{{ part.strong }}</strong></p>
{% endif -%}
{% for paragraph in part.paragraphs %}<p>{{ paragraph }}</p>
{% endfor -%}
{% if part.frame is not none %}{{ html_table(part.frame) }}{% endif -%}
{{ part.html | safe }}{% if part.title %}</section>{% endif %}
{%- endmacro -%}

{%- set kinds = {"Table": Table, "Figure": Figure, "Claims": Claims, "Text": Text} -%}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for part in parts -%}
{{ kinds[part.__class__.__name__](part) }}
{% endfor -%}
</body>
</html>
""")


@dataclass(frozen=True)
class Text:
    """Words between the exhibits: paragraphs, a small table, and HTML of our own."""

    title: str = ""
    paragraphs: Sequence[str] = ()
    strong: str = ""
    frame: pd.DataFrame | None = None
    html: str = ""


Part = Table | Figure | Claims | Text


def write_page(
    folder: Path | str, title: str, parts: Sequence[Part], files: Mapping[str, str]
) -> None:
    """Writes tables (.csv, .md), figures (.png), other text files, and index.html with all parts.

    They appear in `folder` only once all of them are written. The same parts give the same bytes.
    """
    folder, texts = Path(folder), dict(files)
    for table in parts:
        if isinstance(table, Table):
            texts |= {f"{table.name}.csv": table.csv(), f"{table.name}.md": table.markdown()}
    texts["index.html"] = PAGE.render(title=title, parts=parts, style=STYLE, long_text=LONG_TEXT)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".page-") as temporary:
        made = Path(temporary)
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        for figure in parts:
            if isinstance(figure, Figure):
                figures.save(figure.chart, made / f"{figure.name}.png")
        for path in sorted(made.iterdir()):
            os.replace(path, folder / path.name)
