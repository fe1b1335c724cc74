"""docs/add-a-figure.md, followed to the letter: a function, and a line of the page's contents."""

import inspect
import re
from pathlib import Path

import pytest
from synthetic import with_cells

from value_aware_study.report import contents
from value_aware_study.report.exhibit import Page
from value_aware_study.report.exhibits import layers
from value_aware_study.report.frame import Results
from value_aware_study.report.page import write_page

PAGE = Path(__file__).parents[2] / "docs/add-a-figure.md"


@pytest.mark.usefixtures("undrawn")
def test_a_figure_is_two_places(records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, line = re.findall(r"```\w+\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names = dict(vars(layers))
    exec(function, names)
    monkeypatch.setattr(layers, "keys_by_layer", names["keys_by_layer"], raising=False)
    names = dict(vars(contents))
    exec(inspect.getsource(contents._every_r).replace("    ]\n", f"{line}    ]\n"), names)
    few = with_cells(records[0], lambda cell: None if cell.parameters else cell)
    section = names["_every_r"](Results.of([few]))
    page = write_page(Page("Every r", "", [section]), tmp_path)
    assert 'id="keys_by_layer"' in page.read_text()
    assert {file.suffix for file in tmp_path.glob("keys_by_layer.*")} == {".csv", ".md", ".png"}
