"""A result names the code it measured, and the overview says whether that code is current."""

import json
from importlib import import_module
from pathlib import Path

import pytest

import benchmarks
import checks
from benchmarks.record import header, overview, write

MODULES = [
    f"{package.__name__}.{file.stem}"
    for package in (benchmarks, checks)
    for file in sorted(Path(package.__path__[0]).glob("[a-z]*.py"))
]


def test_the_overview_tells_results_of_the_present_code_from_older_ones(tmp_path: Path) -> None:
    for name in ("peers", "adapter"):
        write(name, header(name), f"# {name}", tmp_path)
    assert (tmp_path / "peers.md").read_text() == "# peers"
    text = (tmp_path / "README.md").read_text()
    assert text.count("| current") == 2 and "`python -m benchmarks.peers" in text
    record = json.loads((tmp_path / "peers.json").read_text())
    for older in (record | {"source": "0" * 64}, {}):
        (tmp_path / "peers.json").write_text(json.dumps(older))
        adapter, peers = overview(tmp_path).splitlines()[-2:]
        assert "| current" in adapter and "| of older code |" in peers


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_imports_what_there_is(module: str) -> None:
    import_module(module)
