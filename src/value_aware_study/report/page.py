"""The page as one file that opens from disk without a network, and its exhibits as files."""

import gzip
import json
import math
import zlib
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from value_aware_attention.files import (
    CHECKSUMS,
    checksum,
    listed,
    new_files,
    with_checksum,
    write_checksums,
)
from value_aware_study.report.exhibit import Exhibit, Page, Table
from value_aware_study.report.look import COLOURS, THEME, png, specification
from value_aware_study.safe_text import escaped

PAGE, OURS = "index.html", 'id="page-look"'
"""The page's file, and a mark that only our pages contain"""
MOST_BYTES = 8 * 2**20
"""Most bytes of index.html, so that it fits a mail and opens at once"""
PAPER_ADDRESS = "https://aclanthology.org/2021.emnlp-main.753"
BIBTEX = """@inproceedings{gupta-berant-2021-value,
  title = {Value-aware Approximate Attention},
  author = {Gupta, Ankit and Berant, Jonathan},
  booktitle = {Proceedings of EMNLP 2021},
  pages = {9567--9574},
  year = {2021},
  doi = {10.18653/v1/2021.emnlp-main.753}
}"""
MOST_ROWS = 1000
"""Most rows of a table on the page and in Markdown; a longer one refers to its CSV file"""
PACKED = """<!DOCTYPE html>
<meta charset="utf-8">
<title>Value-aware approximate attention: a published run</title>
<noscript>The page needs JavaScript; its tables and figures are beside this file.</noscript>
<script type="module">
const packed = Uint8Array.from(atob("{}"), (character) => character.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const page = await new Response(stream).text();
document.open();
document.write(page);
document.close();
</script>
"""
"""A page that unpacks itself: a quarter of the size in git"""


def write_page(page: Page, folder: Path, beside: Mapping[str, str] | None = None) -> Path:
    """Writes index.html and each exhibit's .csv, .md, .png or .json to a folder; returns the page.

    The same page gives the same bytes. Files appear once all of them are written, index.html last.
    Leftovers of a killed run are removed, as are files of an earlier page that this one does not
    write. SHA256SUMS lists the page's files. `beside` holds the texts of further files by name.
    Raises ValueError for a page above 8 MB, or if it would replace a foreign file.
    """
    folder = Path(folder)
    earlier = earlier_files(folder)
    if earlier or not (folder / PAGE).exists():  # pages of older versions have no list
        names = {
            exhibit.name + ending
            for exhibit in page.exhibits()
            for ending in (".csv", ".md", ".png", "_dark.png", ".json")
        }
        if taken := sorted(
            name for name in {*names, *(beside or {})} - set(earlier) if (folder / name).is_file()
        ):
            raise ValueError(
                f"{folder / taken[0]} is not of a page, which needs its name: move it away"
            )
    with new_files(folder, last=PAGE) as aside:
        for exhibit in page.exhibits():
            _write_exhibit(exhibit, aside)
        if len(content := html(page).encode()) > MOST_BYTES:
            raise ValueError(
                f"the page has {len(content):,} bytes; at most {MOST_BYTES:,} are allowed"
            )
        (aside / PAGE).write_bytes(content)
        for name, text in (beside or {}).items():
            (aside / name).write_text(text, encoding="utf-8")
        names = {file.name for file in aside.iterdir()}
        write_checksums(aside)
        # while the earlier list exists, so that a killed run leaves no unlisted file
        for file in (folder / name for name in set(earlier) - names):
            if file.is_file() and checksum(file) == earlier[file.name]:
                file.unlink()  # unchanged since
    return folder / PAGE


def earlier_files(folder: Path) -> dict[str, str]:
    """Reads the names and sha256 of the files that an earlier page wrote into a folder.

    Raises ValueError if index.html or SHA256SUMS do not belong to such a page.
    """
    page, files = folder / PAGE, listed(folder)
    if page.is_file() and OURS not in page.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{page} is no page of a report and would be replaced: move it away")
    if files and PAGE not in files:
        raise ValueError(f"{folder / CHECKSUMS} lists the files of no page: name another folder")
    return files


def _write_exhibit(exhibit: Exhibit, folder: Path) -> None:
    path = folder / exhibit.name
    if exhibit.table:
        path.with_suffix(".csv").write_text(exhibit.table.csv(), encoding="utf-8")
        if _shown(exhibit.table):
            text = (
                f"**{escaped(exhibit.title)}.** {escaped(exhibit.caption)}\n\n"
                f"{exhibit.table.markdown()}"
            )
            path.with_suffix(".md").write_text(text, encoding="utf-8")
    if exhibit.charts:
        title, rows = exhibit.title if exhibit.shared else "", math.ceil(len(exhibit.charts) / 3)
        for dark in (False, True)[: 1 + exhibit.shared]:
            path.with_name(f"{exhibit.name}{'_dark' * dark}.png").write_bytes(
                png(exhibit.charts, len(exhibit.choices) or rows, title, dark)
            )
    if exhibit.exploration:
        text = with_checksum(exhibit.exploration.to_json())
        path.with_suffix(".json").write_text(text, encoding="utf-8")


def html(page: Page) -> str:
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
        paper=PAPER_ADDRESS,
        bibtex=BIBTEX,
        colours=COLOURS,
        theme=THEME,
        content=_content,
        shown=_shown,
        asset=lambda name: Markup(
            files("value_aware_study.report").joinpath(name).read_text(encoding="utf-8")
        ),
        vega=Markup(_vega()) if any(exhibit.charts for exhibit in page.exhibits()) else "",
    )


def _content(exhibit: Exhibit) -> str:
    """Packs the charts for the page's script, and the texts for copying a table."""
    content: dict[str, Any] = {"charts": [specification(chart) for chart in exhibit.charts]}
    if exhibit.table and _shown(exhibit.table):
        content["csv"] = exhibit.table.csv()
        content["markdown"] = exhibit.table.markdown()
        content["latex"] = exhibit.table.latex()
    if exhibit.exploration:
        content["exploration"] = exhibit.exploration.to_json()
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b64encode(zlib.compress(text.encode(), 9)).decode()


def _shown(table: Table) -> bool:
    return len(table.data) <= MOST_ROWS


@cache
def _vega() -> str:
    """Returns Vega, Vega-Lite and vega-embed; the page's script finds them in `window`."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def pack(page: Path) -> str:
    """Returns a page that unpacks itself, for git."""
    return PACKED.replace("{}", b64encode(gzip.compress(page.read_bytes(), mtime=0)).decode())
