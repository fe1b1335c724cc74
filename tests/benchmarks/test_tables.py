"""Benchmarks run to tables at tiny sizes, and a result names the code that it measured."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import benchmarks
import checks
from benchmarks import record, training_step
from benchmarks.record import header, overview, write

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {
    "adapter": "largest difference",
    "cache_optimum": "## Error over the proved bound",
    "caches": "## Error on the observed queries",
    "optimal_value_aware": "call / fused",
    "survey": "Forward + backward, and the growth of cost",
    "training_step": "With both GPT-2 does the same work",
    "decoding": "## Processor time of a token",
    "peers --only FNet": "- FNet: FourierMixing() against transformers FNetBasicFourierTransform",
}
"""Maps a benchmark, with its options, to a part of its page."""
SLOW = ("survey", "cache_optimum", "decoding", "peers --only FNet")
PAGES = {"kills": "checks.kills.suite", "mutants": "checks.mutants_page"}
"""Maps a check to the module of its page; a benchmark makes its own."""
RECORDS = [file for file in sorted(record.FOLDER.glob("*.json")) if file.stem != "values"]


@pytest.mark.parametrize(
    ("command", "title"),
    [pytest.param(*row, marks=pytest.mark.slow if row[0] in SLOW else ()) for row in QUICK.items()],
)
def test_a_quick_run_prints_its_tables_and_writes_nothing(
    command: str,
    title: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *options = command.split()
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--quick", *options])
    import_module(f"benchmarks.{name}").main()
    printed = capsys.readouterr().out
    assert title in printed and "|:--" in printed and "nan" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_a_published_page_has_the_tables_of_its_record(file: Path) -> None:
    module = import_module(PAGES.get(file.stem, record.module_of(file.stem)))
    page = module.page(json.loads(file.read_text()))
    rendered, published = (
        [line for line in text.splitlines() if line.startswith("|")]
        for text in (page, file.with_suffix(".md").read_text())
    )
    assert rendered == published


def test_gpt2_with_our_loss_has_gpt2s_loss_of_every_target() -> None:
    model = training_step.gpt2(training_step.TINY, activation_function="relu")
    rows = torch.randint(training_step.TINY.vocabulary, (2, training_step.TINY.length + 1))
    ours = training_step._training(training_step.AsOurs(model))
    assert ours.count_targets(rows) == 2 * training_step.TINY.length
    torch.testing.assert_close(ours.loss(rows), training_step.own_loss(model, rows))
    assert {id(p) for p in ours.parameters()} == {id(p) for p in model.parameters()}


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
