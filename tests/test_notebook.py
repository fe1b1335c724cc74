"""The notebook runs from its first cell to its last, and holds the numbers that it states."""

import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks/minilm.ipynb"


def test_it_is_kept_as_it_ran_with_the_numbers_of_readme() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell.outputs):
        assert output.get("name") != "stderr", output.text
        assert not re.search(r"Warning|IProgress|(^|[\s'\"])/\w+/", output.get("text", ""))
    controls = pd.read_csv(ROOT / "results/hours/model_control.csv")
    control = controls.query("r == 4 and layer == 'all'").iloc[0]
    said, last = printed(notebook, "probe"), notebook.cells[-1].source
    assert f"4 value-aware keys match {control.keys_needed:.0f} " in said
    assert re.search(rf"match\s{control.keys_needed:.0f} of {control['keys']:.0f}", last)
    for way in ("aware", "oblivious"):
        cosine = control[f"cosine_optimal_v_{way}"]
        assert f"{cosine:.4f} (" in said and f"{cosine:.3f}" in last


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_value_aware_keys_are_far_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=900).execute(cwd=NOTEBOOK.parent)
    by_weight, slot, aware = map(float, re.findall(r"\): (\d\.\d+)", printed(notebook, "cosines")))
    assert aware > 0.95 > 0.85 > by_weight and aware > slot > by_weight
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
