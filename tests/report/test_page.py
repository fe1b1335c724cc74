"""The page is one escaped file without a network, written whole, with the same bytes each time."""

import json
import os
import re
import zlib
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from synthetic import probed

from tests.refusals import assert_refused
from tests.report.pages import SLY, small_page
from value_aware_attention.records.record import Record
from value_aware_study.report import page as page_module
from value_aware_study.report.contents import report_page
from value_aware_study.report.exhibit import Page
from value_aware_study.report.frame import Results
from value_aware_study.report.page import PAPER_ADDRESS, write_page
from value_aware_study.safe_text import escaped
from value_aware_study.training.model_card import model_card

FILES = {
    "index.html",
    *("hero.csv", "hero.md", "hero.png"),
    *("picked.csv", "picked.md", "picked.png"),
    *("models.csv", "models.md"),
    *("explorer.json", "SHA256SUMS"),
}
VOID = {"meta", "link", "br", "img"}


@pytest.fixture
def page() -> Page:
    return small_page()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(small_page(), tmp_path_factory.mktemp("report")).parent


class Elements(HTMLParser):
    """Checks that elements are closed in order; collects them with their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        name = self.found[-1][1].get("id") if self.found else None
        if name:
            self.text[name] = self.text.get(name, "") + data


@pytest.fixture(scope="module")
def elements(report: Path) -> Elements:
    return Elements((report / "index.html").read_text(encoding="utf-8"))


def test_the_same_page_gives_the_same_bytes(report: Path, tmp_path: Path) -> None:
    write_page(small_page(), tmp_path)
    assert contents(tmp_path) == contents(report)
    assert set(contents(report)) == FILES


def test_the_page_is_whole_loads_nothing_and_has_every_anchor_once(elements: Elements) -> None:
    assert not elements.open
    previewed = "How much is lost? 4 keys do as well as 75."
    assert ("meta", {"name": "description", "content": previewed}) in elements.found
    for tag, attributes in elements.found:
        assert tag not in ("link", "img", "iframe") and "src" not in attributes
        assert (attributes.get("href") or "#").startswith(("#", PAPER_ADDRESS, *FILES))
    styles = (Path(page_module.__file__).parent / name for name in ("page.css", "explorer.css"))
    assert not any(re.search(r"url\(|@import", file.read_text()) for file in styles)
    names = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    links = {attributes["href"] for tag, attributes in elements.found if tag == "a"}
    assert len(names) == len(set(names))
    assert {link.removeprefix("#") for link in links if link} <= {*names, PAPER_ADDRESS, *FILES}
    assert {"claims", "model", "hero", "models", "explorer"} <= set(names)


def content(elements: Elements, exhibit: str) -> dict[str, Any]:
    """Unpacks what the page's script reads of an exhibit."""
    unpacked: dict[str, Any] = json.loads(
        zlib.decompress(b64decode(elements.text[f"{exhibit}-data"]))
    )
    return unpacked


def test_titles_names_and_tokens_are_escaped(report: Path, elements: Elements) -> None:
    text = (report / "index.html").read_text(encoding="utf-8")
    assert SLY not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    explored = json.loads(content(elements, "explorer")["exploration"])
    assert explored["models"][0]["tokens"][1] == f" {SLY}"
    assert content(elements, "models")["csv"].startswith(f"model,error\n{SLY},")


@pytest.mark.usefixtures("undrawn")
def test_a_long_table_is_in_a_file_beside_the_page(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MOST_ROWS", 0)
    page_elements = Elements(write_page(page, tmp_path).read_text(encoding="utf-8"))
    assert set(contents(tmp_path)) == {name for name in FILES if not name.endswith(".md")}
    assert not any(
        tag == "table" or "data-copy" in attributes for tag, attributes in page_elements.found
    )
    links = {attributes["href"] for tag, attributes in page_elements.found if tag == "a"}
    for name in ("hero", "picked", "models"):
        assert f"{name}.csv" in links and "csv" not in content(page_elements, name)
    saves = [attributes for _, attributes in page_elements.found if "data-save" in attributes]
    assert len(saves) == 4  # of the two figures


def test_a_failed_report_leaves_the_old_one(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_page(Page("old", "", []), tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    before = contents(tmp_path)
    monkeypatch.setattr(page_module, "png", Mock(side_effect=OSError("disk full")))
    assert_refused("disk full", write_page, page, tmp_path, error=OSError)
    assert contents(tmp_path) == before


@pytest.fixture
def less(page: Page) -> Page:
    return Page(page.title, page.lead, page.sections[1:])


@pytest.mark.usefixtures("undrawn")
def test_what_an_earlier_page_wrote_goes_and_files_of_others_stay(
    page: Page, less: Page, tmp_path: Path
) -> None:
    write_page(page, tmp_path, {"caches.json": "{}"})
    (tmp_path / "mine.csv").write_text("mine")
    (tmp_path / "picked.md").write_text("changed by hand")
    write_page(less, tmp_path)
    assert set(contents(tmp_path)) == {
        *("index.html", "models.csv", "models.md", "explorer.json", "SHA256SUMS"),
        *("mine.csv", "picked.md"),
    }


@pytest.mark.usefixtures("undrawn")
def test_a_page_killed_while_its_files_appear_is_replaced_by_the_next(
    page: Page, less: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_page(page, tmp_path)

    def killed(file: Path, target: Path) -> None:
        if file.name != "SHA256SUMS":
            raise KeyboardInterrupt("killed")
        file.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        assert_refused("killed", write_page, less, tmp_path, error=KeyboardInterrupt)
    write_page(less, tmp_path)
    write_page(page, tmp_path)
    assert set(contents(tmp_path)) == FILES


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("index.html", "<p>My site</p>", "index.html is no page of a report"),
        ("SHA256SUMS", f"{'0' * 64}  model.safetensors\n", "SHA256SUMS lists the files of no page"),
        ("SHA256SUMS", "12\n", r"SHA256SUMS is damaged .*: move it away"),
        ("hero.csv", "mine", "hero.csv is not of a page, which needs its name: move it away"),
    ],
)
def test_a_file_of_somebody_else_is_never_replaced(
    page: Page, tmp_path: Path, name: str, text: str, line: str
) -> None:
    (tmp_path / name).write_text(text)
    assert_refused(line, write_page, page, tmp_path)
    assert contents(tmp_path) == {name: text.encode()}


@pytest.mark.usefixtures("undrawn")
def test_a_page_without_a_list_is_replaced_and_nothing_is_removed(
    page: Page, less: Page, tmp_path: Path
) -> None:
    """Earlier versions wrote no list."""
    write_page(page, tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    write_page(less, tmp_path)
    assert set(contents(tmp_path)) == FILES


@pytest.mark.usefixtures("undrawn")
def test_a_page_too_large_is_refused_in_one_line(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MOST_BYTES", 1000)
    assert_refused("bytes; at most 1,000 are allowed", write_page, page, tmp_path)
    assert not contents(tmp_path)


TAG = "<img src=x> | `code` \\| [a](b)\n\n# head"
SAFE = r"&lt;img src=x&gt; \| \`code\` \\\| \[a\](b)  # head"


def test_what_would_be_markup_is_escaped_and_lines_are_one() -> None:
    assert escaped(TAG) == SAFE
    assert escaped("causal_elu, 4 keys (−0.3) α‖v‖ 5 %") == "causal_elu, 4 keys (−0.3) α‖v‖ 5 %"
    assert escaped("a & b &lt;") == "a &amp; b &amp;lt;"


@pytest.mark.usefixtures("undrawn")
def test_names_and_descriptions_of_a_report(
    records: list[Record], training: dict, tokens: dict, tmp_path: Path
) -> None:
    """All rows of a table have as many cells, and no markup of the data is left."""
    few = [content for content in records if content.model in ("causal_elu", "masked_short")]
    sly = [
        replace(content, model=content.model + TAG, text=replace(content.text, description=TAG))
        for content in few
    ]
    metrics = {name + TAG: content | {"model": name + TAG} for name, content in training.items()}
    sources = {f"{TAG} {name}": counts for name, counts in tokens["sources"].items()}
    probe = replace(probed(), model=TAG)
    results = Results.of(sly, metrics, tokens | {"sources": sources}, probed=[probe])
    write_page(report_page(results), tmp_path)
    assert SAFE in (tmp_path / "models.md").read_text()
    for file in tmp_path.glob("*.md"):
        text = file.read_text()
        assert "<img" not in text and "\n# head" not in text and "[a](" not in text, file.name
        rows = [line.replace(r"\\", "").replace(r"\|", "") for line in text.splitlines()]
        assert len({row.count("|") for row in rows if row.startswith("|")}) <= 1, file.name


def test_a_model_card() -> None:
    metrics = {
        "model": TAG, "parameters": 1, "steps": 1, "tokens": 1, "loss": 1.0, "perplexity": 2.0,
        "curve": [{"step": 1, "loss": 1.0, "perplexity": 2.0}],
        "hyperparameters": {"optimizer": "Muon", "attention": TAG, "data": TAG},
    }  # fmt: skip
    body = model_card(metrics, data=TAG, scale=TAG, kernel=TAG).split("---\n", 2)[2]
    text, _, rest = body.partition("```python")
    code, _, tables = rest.partition("```\n")
    assert "<img" in code and "\n# head" not in code  # Python's string, on one line
    for prose in (text, tables):
        assert SAFE in prose and "<img" not in prose and "\n# head" not in prose
