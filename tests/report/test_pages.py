import ast
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic import TEXT, UNKNOWN, with_cells
from value_aware_study.reporting import figures, write_report

from value_aware_study import reporting

TABLES = (
    *("table_1", "table_2", "table_3", "table_4", "table_4_causal"),
    *("skewness", "keys_needed", "claims"),
)
FILES = {
    *(f"{name}.{suffix}" for name in TABLES for suffix in ("csv", "md")),
    *(f"figure_{number}.png" for number in range(1, 9)),
    "grid.csv",
    "index.html",
}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def report(records, training, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    write_report(records, training, tokens, folder)
    return folder


def test_the_report_is_this_set_of_files(report):
    assert set(contents(report)) == FILES


def test_the_same_input_gives_the_same_bytes(report, records, training, tokens, tmp_path):
    shuffled = random.Random(0).sample(records, len(records))
    write_report(shuffled, dict(reversed(training.items())), tokens, tmp_path)
    assert contents(tmp_path) == contents(report)


def test_a_report_without_most_models_has_the_same_files(records, tmp_path):
    lonely = with_cells(records[0], lambda cell: replace(cell, **UNKNOWN))
    write_report([lonely], {}, {}, tmp_path)
    assert set(contents(tmp_path)) == FILES


def test_no_records_are_refused_in_one_line(training, tokens, tmp_path):
    with pytest.raises(ValueError, match="no evaluation records") as error:
        write_report([], training, tokens, tmp_path)
    assert "\n" not in str(error.value)


def test_a_failed_report_leaves_the_old_one(records, tmp_path, monkeypatch):
    (tmp_path / "index.html").write_text("old")

    def fail(chart, path):
        raise OSError("disk full")

    monkeypatch.setattr(figures, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(records, {}, {}, tmp_path)
    assert contents(tmp_path) == {"index.html": b"old"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects the links."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.images = [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        if tag == "img":
            self.images.append(attributes)
        elif tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_self_contained(report):
    text = (report / "index.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert not page.open
    own = set(page.links) - {"pretrained/index.html"}
    assert len(own) == len(set(page.links)) - 1 and all((report / link).is_file() for link in own)
    assert len(page.images) == 8 and all(image["alt"] for image in page.images)
    assert not re.search(r"https?://|<script", text)
    assert "make repro" in text and "synthetic test records" in text


def test_the_page_escapes_what_it_is_given(records, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "save", lambda chart, path: path.write_bytes(b""))
    sly = replace(records[0], text=replace(TEXT, description="<i>a & b</i>"))
    write_report([sly], {}, {}, tmp_path)
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<i>" not in text and "&lt;i&gt;a &amp; b&lt;/i&gt;" in text


def test_reporting_imports_nothing_heavy():
    heavy = {"torch", "transformers", "pytorch_lightning", "hydra", "dvc", "wandb"}
    for file in Path(reporting.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.partition(".")[0] for name in names}, file.name
