"""The notebook runs from its first cell to its last and finds the numbers that it states."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks/minilm.ipynb"


def test_it_is_kept_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_value_aware_keys_are_far_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300).execute(cwd=NOTEBOOK.parent)
    by_weight, aware = re.findall(r"\): (\d\.\d+)", printed(notebook, "cosines"))
    assert float(aware) > 0.9 > 0.8 > float(by_weight)
    (matching,) = re.findall(r"4 value-aware keys match (\d+)", printed(notebook, "probe"))
    assert int(matching) >= 20
    (random,) = re.findall(r"With random weights they match (\d+)", printed(notebook, "probe"))
    assert int(random) >= int(matching) - 5
    (drawn,) = cell(notebook, "chart").outputs
    assert "<svg" in drawn.data["image/svg+xml"]


def printed(notebook: NotebookNode, name: str) -> str:
    return "".join(output.get("text", "") for output in cell(notebook, name).outputs)


def cell(notebook: NotebookNode, name: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if cell.id == name)
