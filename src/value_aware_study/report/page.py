"""The page as one file that opens from disk without a network, and its exhibits as files."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from value_aware_attention.storage import new_files
from value_aware_study.markdown import escaped
from value_aware_study.report.exhibit import Exhibit, Page, Table
from value_aware_study.report.look import COLOURS, THEME, png, specification

__all__ = ["write_page"]

LARGEST = 8 * 2**20
"""Bytes of index.html: what a mail takes, and what opens at once."""
MOST_ROWS = 1000
"""Rows of a table that the page shows; it names the file that holds a longer one."""


def write_page(page: Page, folder: Path, beside: Mapping[str, str] | None = None) -> Path:
    """Writes index.html and each exhibit's .csv, .md, .png or .json to a folder; returns the page.

    The same page gives the same bytes. Files appear once all of them are written, index.html last;
    what a killed run left is removed. `beside` are more files by name, with their texts. Raises
    ValueError for a page above 8 MB.
    """
    folder = Path(folder)
    with new_files(folder, last="index.html") as aside:
        for exhibit in page.exhibits():
            _write_exhibit(exhibit, aside)
        html = _html(page).encode()
        if len(html) > LARGEST:
            raise ValueError(f"the page has {len(html):,} bytes; at most {LARGEST:,} are allowed")
        (aside / "index.html").write_bytes(html)
        for name, text in (beside or {}).items():
            (aside / name).write_text(text, encoding="utf-8")
    return folder / "index.html"


def _write_exhibit(exhibit: Exhibit, folder: Path) -> None:
    path = folder / exhibit.name
    if exhibit.table:
        heading = f"**{escaped(exhibit.title)}.** {escaped(exhibit.caption)}"
        text = f"{heading}\n\n{exhibit.table.markdown()}"
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        path.with_suffix(".csv").write_text(exhibit.table.csv(), encoding="utf-8")
    if exhibit.charts:
        path.with_suffix(".png").write_bytes(png(exhibit.charts, rows=len(exhibit.choices) or 1))
    if exhibit.exploration:
        path.with_suffix(".json").write_text(exhibit.exploration.to_json(), encoding="utf-8")


def _html(page: Page) -> str:
    environment = Environment(
        loader=PackageLoader("value_aware_study.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html").render(
        page=page,
        colours=COLOURS,
        theme=THEME,
        content=_content,
        shown=_shown,
        asset=_asset,
        vega=Markup(_vega()) if any(exhibit.charts for exhibit in page.exhibits()) else "",
    )


def _content(exhibit: Exhibit) -> dict[str, Any]:
    """What the page's script draws, and what a table is copied as."""
    content: dict[str, Any] = {"charts": [specification(chart) for chart in exhibit.charts]}
    if exhibit.table and _shown(exhibit.table):
        content["csv"] = exhibit.table.csv()
        content["markdown"] = exhibit.table.markdown()
        content["latex"] = exhibit.table.latex()
    if exhibit.exploration:
        content["exploration"] = asdict(exhibit.exploration)
    return content


def _shown(table: Table) -> bool:
    return len(table.data) <= MOST_ROWS


def _asset(name: str) -> Markup:
    return Markup(files("value_aware_study.report").joinpath(name).read_text(encoding="utf-8"))


@cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed, which the page's script finds in `window`."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle
