"""Every app runs tiny in a temporary folder: it writes, refuses and reuses as it says."""

import csv
import json
import math
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from scipy import stats
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from pipelines import SUCCESSORS
from pipelines.app import app, write_json
from pipelines.compare import moved
from tests.apps import ROOT, refusal, run_app
from tests.refusals import assert_refused
from value_aware_attention.approximations import Exact, OptimalValueOblivious, SlidingWindow
from value_aware_attention.files import checksum, load_json, save_json
from value_aware_attention.measurement import Record
from value_aware_attention.measurement.task import Task
from value_aware_attention.models import CausalLanguageModel, load_masked
from value_aware_attention.records.estimate import DASH, short, with_interval
from value_aware_study.evaluation.texts import causal_task
from value_aware_study.report.exhibits.claims import answers
from value_aware_study.report.frame import Results

CHAIN = (
    "corpus",
    "tokens",
    "train_causal kernel=elu",
    "train_masked length=short",
    "train_masked length=long",
    "train_causal kernel=elu attention=sliding_window attention.method.r=4",
    "train_masked length=short attention=linear_mixing",
    "evaluate kernel=elu",
    "evaluate model=masked length=long",
    "evaluate kernel=elu attention=sliding_window",
    "evaluate model=masked length=short attention=linear_mixing",
    "survey kernel=elu",
    "survey model=masked length=long",
    "report",
)
# Warnings of libraries that tests of our own code cannot mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes one whole smoke run, without pictures; returns its folder."""
    folder = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("value_aware_study.report.page.png", lambda *_: b"")
        for command in CHAIN:
            run_app(command, folder)
    return folder


def read(file: Path) -> Record:
    return Record.from_json(file.read_text(), str(file))


def record(folder: Path, model: str) -> Record:
    return read(folder / "outputs/smoke/records" / f"{model}.json")


def test_the_run_leaves_a_report_with_every_table_and_figure_that_names_no_machine(
    made: Path,
) -> None:
    report = {path.name for path in (made / "report").iterdir()}
    expected = {f"table_{n}.{kind}" for n in (1, 2, 3, 4) for kind in ("csv", "md")}
    expected |= {f"figure_{n}.png" for n in (1, 2, 3)} | {"index.html", "claims.md", "claims.csv"}
    expected |= {"distance.csv", "trained.csv", "distance.png", "patterns.png"}
    assert expected | {"figure_7.png", "explorer.json"} <= report
    assert not list(made.rglob("*.partial"))
    cards = (made / "outputs/smoke/models").glob("*/README.md")
    for path in [*(made / "report").glob("*.[chm]*"), *cards]:
        assert str(made) not in path.read_text()


@pytest.mark.parametrize(("model", "baselines"), [("causal_elu", 8), ("masked_long", 6)])
def test_a_full_budget_equals_exact_and_every_cell_has_its_count(
    made: Path, model: str, baselines: int
) -> None:
    evaluated = record(made, model)
    cells, length, exact = evaluated.cells, evaluated.length, evaluated.cells[0]
    assert exact.approximation == "exact" and exact.difference == 0
    full = [c for c in cells if c.parameters.get("r") == length and len(c.parameters) == 1]
    assert len(full) >= 2
    for cell in full:
        assert cell.value == pytest.approx(exact.value, rel=1e-3)
        assert max(cell.error.by_layer) < 1e-9
        assert cell.error.relative <= cell.error.high < 1e-9
    for cell in cells:
        assert cell.count == sum(cell.unit_counts) > 0
        assert cell.low <= cell.value <= cell.high
    assert len(evaluated.baselines) == baselines
    for counted in evaluated.baselines.values():  # on the targets of the grid
        assert counted.unit_counts == exact.unit_counts
    read = evaluated.baselines.get("5gram_tokens_read")
    assert read is None or read.tokens == 6 * 4 * 96


def test_the_short_model_reads_the_long_ones_text_in_pieces(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "outputs", tmp_path / "outputs")
    run_app("evaluate model=masked length=short", tmp_path)
    long, short = record(made, "masked_long"), record(tmp_path, "masked_short")
    longer = short.baselines["longer_text"]
    assert longer.length == long.length
    assert longer.unit_counts == long.cells[0].unit_counts
    assert long.baselines["longer_text"].unit_counts == longer.unit_counts
    claims = answers(Results.of([long, short]))
    (answer,) = (answer for answer in claims if "long sequences" in answer.claim)
    assert len(answer.findings) == 2


def task_of(made: Path, name: str) -> Task:
    """Sets up the evaluation task of a causal checkpoint as `evaluate` does at smoke scale."""
    model = CausalLanguageModel.from_pretrained(made / f"outputs/smoke/models/{name}")
    smoke = {"length": 96, "context": 64, "units": 4, "batch_size": 3, "recorded_units": 2}
    tokens = made / "outputs/smoke/tokens/causal/evaluation.npy"
    return causal_task(model=model, tokens=tokens, device="cpu", **smoke)


def test_cells_of_the_report_are_what_the_checkpoint_gives(made: Path) -> None:
    """Three randomly chosen cells of the report's grid, recomputed from the saved model."""
    methods = {"optimal_v_oblivious": OptimalValueOblivious, "sliding_window": SlidingWindow}
    task = task_of(made, "causal_elu")
    with (made / "report/grid.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["model"] == "causal_elu"]
    rows = [row for row in rows if row["approximation"] in methods]
    for row in random.Random(0).sample(rows, 3):
        method = methods[row["approximation"]](int(float(row["r"])))
        sums = task.run(lambda layer, method=method: method)
        assert math.exp(sums.mean()) == pytest.approx(float(row["value"]), rel=1e-4)


def test_a_model_is_evaluated_with_the_attention_it_was_trained_with(made: Path) -> None:
    models = {
        "causal_elu_sliding_window": ("SlidingWindow", "elu", {"r": 4}),
        "masked_short_linear_mixing": (
            "LinearMixing",
            None,
            {"length": 16, "width": 64, "seed": 0},
        ),
    }
    for model, (name, kernel, arguments) in models.items():
        trained = read(made / f"outputs/smoke/records/trained/{model}.json")
        (cell,) = trained.cells
        assert (trained.model, trained.trained_with, trained.kernel) == (model, name, kernel)
        assert trained.arguments == arguments
        assert cell.approximation == "exact" and cell.difference == 0
        (file,) = made.glob(f"outputs/smoke/metrics/train_*/{model}.json")
        training = json.loads(file.read_text())
        assert training["hyperparameters"]["attention"].startswith(f"{name}(")
    # what is on the grid of the default models is not touched
    records = (made / "outputs/smoke/records").glob("*.json")
    assert {path.stem for path in records} == {"causal_elu", "masked_long"}
    written = (made / "outputs/smoke/metrics/train/masked_long.json").read_text()
    assert "attention" not in json.loads(written)["hyperparameters"]


def test_its_own_attention_is_the_one_the_metric_is_of(made: Path) -> None:
    task = task_of(made, "causal_elu_sliding_window")
    assert [layer.attention.approximation.r for layer in task.model.layers] == [4, 4]
    trained = read(made / "outputs/smoke/records/trained/causal_elu_sliding_window.json")
    windowed, exact = (
        math.exp(task.run(lambda layer, method=method: method).mean())
        for method in (SlidingWindow(4), Exact())
    )
    assert trained.cells[0].value == pytest.approx(windowed, rel=1e-5)
    assert abs(windowed - exact) > 1e-3 * exact


@pytest.mark.parametrize("name", ["masked_short", "masked_long"])
def test_a_masked_checkpoint_is_an_ordinary_folder_with_its_tokenizer(
    made: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(made / "outputs/smoke/models" / name, tmp_path / "elsewhere")
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    inputs = read_text(folder, made / "outputs/smoke/tokens/masked/tokenizer")[:, :16]
    assert AutoTokenizer.from_pretrained(folder).mask_token_id == 4
    with torch.no_grad():
        logits = model(inputs).logits
        torch.testing.assert_close(logits, load_masked(folder)(inputs).logits)
    assert logits.shape == (*inputs.shape, model.config.vocab_size) and logits.isfinite().all()


def read_text(folder: Path, written: Path) -> torch.Tensor:
    """Tokenizes a text by a checkpoint's tokenizer, which is that of its training text."""
    text = "Return the number of tokens.\nEach is an integer >= 0: naïve, 42."
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids == PreTrainedTokenizerFast.from_pretrained(written)(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(folder).decode(ids) == text
    return torch.tensor([ids])


@pytest.mark.parametrize("name", ["causal_elu", "causal_elu_sliding_window", "masked_long"])
def test_a_model_card_says_what_the_metrics_say_and_its_code_loads_the_model(
    made: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = ModelCard.load(made / "outputs/smoke/models" / name / "README.md")
    (written,) = (made / "outputs/smoke/metrics").glob(f"train*/{name}.json")
    metrics = json.loads(written.read_text())
    for result in card.data.eval_results:
        assert result.metric_value == metrics[result.metric_type]
    assert f"{metrics['parameters']:,} parameters" in card.text and "Scale: smoke" in card.text
    assert "docstrings of networkx" in card.text
    monkeypatch.chdir(made / "outputs/smoke/models")
    read: dict = {}
    exec(card.text.split("```python\n")[1].split("```")[0], read)
    ids = torch.tensor([read["tokenizer"]("some text")["input_ids"]])
    assert read["model"](ids) is not None
    assert sum(p.numel() for p in read["model"].parameters()) >= metrics["parameters"]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("evaluate kernel=polynomial", ("causal_polynomial", "missing")),
        (
            "evaluate kernel=exponential model.checkpoint={made}/outputs/smoke/models/causal_elu",
            ("Elu(", "Exponential("),
        ),
        ("corpus corpus=local corpus.path=/no/such/file.txt", ("/no/such/file.txt",)),
        ("train_causal causal.length=10000000", ("10000000", "tokens")),
        ("train_causal paths.tokens=/no/such/folder", ("/no/such/folder", "tokenize the corpus")),
        (
            "train_causal scale=gpu trainer.accelerator=gpu paths.outputs={made}/outputs/smoke",
            ("operations of training", "hours", "trainer.accelerator=auto"),
        ),
        (
            "train_causal -m trainer=ddp kernel=elu",
            ("run the whole sweep again", "submitit_slurm"),
        ),
        ("report report.records=/no/such/folder", ("/no/such/folder", "no records")),
        (
            "train_masked attention=sliding_window attention.method._target_="
            "value_aware_attention.approximations.OptimalValueAware",
            ("OptimalValueAware", "gradients"),
        ),
        ("train_masked attention=sliding_window masked.dropout=0.1", ("dropout is 0.1",)),
        (
            "evaluate kernel=elu attention=sliding_window approximation=optimal_v_oblivious",
            ("causal_elu_sliding_window", "SlidingWindow(r=4", "optimal_v_oblivious"),
        ),
        (
            "train_masked length.warm_start={made}/outputs/smoke/models/masked_short_linear_mixing",
            ("masked_short_linear_mixing", "no attention"),
        ),
    ],
)
def test_bad_input_ends_with_one_line_and_nothing_written(
    made: Path, monkeypatch: pytest.MonkeyPatch, command: str, named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    outputs = {p: p.stat().st_mtime_ns for p in (made / "outputs").rglob("*") if p.is_file()}
    line = refusal(command.format(made=made), made)
    assert all(words in line for words in named), line
    assert {
        p: p.stat().st_mtime_ns for p in (made / "outputs").rglob("*") if p.is_file()
    } == outputs


def test_what_an_app_starts_shows_tracebacks_only_if_the_user_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "pipelines.corpus",
            "hydra.run.dir=.",
            "hydra/job_logging=none",
            "hydra.output_subdir=null",
        ],
    )
    variables: list[str | None] = []
    app("corpus")(lambda cfg: variables.append(os.environ.get("HYDRA_FULL_ERROR")))()
    assert variables == ["0"] and "HYDRA_FULL_ERROR" not in os.environ


def test_a_checkpoint_of_another_vocabulary_is_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "outputs", tmp_path / "outputs")
    run_app("tokens tokens.vocabulary_size=600", tmp_path)
    assert "vocabulary" in refusal("train_masked length=long", tmp_path)


@pytest.mark.parametrize(
    ("options", "numbers", "hours"),
    [
        ("scale=paper trainer.accelerator=gpu", ("156,000,256", "31,520", "2,476,000"), [79]),
        ("scale=gpu trainer.accelerator=gpu", ("(3 kernels)",), [pytest.approx(0.475, abs=0.075)]),
        ("scale=laptop", ("(3 kernels)",), []),
    ],
)
def test_plan_prints_sizes_and_the_hours_of_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: str, numbers: tuple[str, ...], hours: list[float],
) -> None:  # fmt: skip
    run_app(f"plan {options}", tmp_path)
    printed = capsys.readouterr().out
    assert all(number in printed for number in numbers)
    totals = re.findall(r"([\d.]+) hours of training in all", printed)
    assert [float(total) for total in totals] == hours
    assert printed.count("an estimate, not measured") == len(hours)
    assert printed.splitlines()[0].split()[-1] == "optimizer"


def test_the_survey_meets_its_budgets_and_draws_every_method(made: Path) -> None:
    causal, masked = (
        read(made / f"outputs/smoke/records/survey/{name}.json")
        for name in ("causal_elu", "masked_long")
    )
    for record in (causal, masked):
        exact, *cells = record.cells
        assert exact.approximation == "exact" and exact.cost is None
        assert cells and all(abs(c.cost - c.budget) <= 0.1 * c.budget for c in cells)
        side = len(record.picture.tokens)
        for panel in record.picture.panels:
            assert [len(row) for row in panel.weights] == [side] * side
        assert record.picture.panels[0].approximation == "exact"
    methods = [{c.approximation for c in record.cells} for record in (causal, masked)]
    assert {"optimal_v_aware", "sliding_window", "random_keys"} <= methods[0] & methods[1]
    # The elu kernel and a causal mask: no features of the exponential, nothing that would leak.
    assert not methods[0] & {"orf", "random_fourier_features", "lsh", "nystrom", "linformer"}
    assert methods[1] >= {"orf", "linformer"} and "linear_attention" not in methods[1]
    seeds = [c.parameters["seed"] for c in masked.cells if c.approximation == "orf"]
    assert len(seeds) == len(set(seeds)) == 3


@pytest.mark.parametrize("command", ["compare", "fingerprints", "scale"])
def test_a_command_without_a_config_has_help_too(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"pipelines.{command}", run_name="__main__")
    assert not stop.value.code and f"python -m pipelines.{command}" in capsys.readouterr().out


def test_what_moved_between_two_runs_is_paired_over_the_text(made: Path, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(made / "outputs/smoke/records", before / "records")
    changed = load_json(before / "records/causal_elu.json")
    cell = next(cell for cell in changed["cells"] if cell["parameters"] == {"r": 4})
    moves = np.arange(len(cell["unit_totals"])) / 10
    cell["unit_totals"] = [*map(float, cell["unit_totals"] + moves * cell["unit_counts"])]
    for folder, seed in ((before, 0), (after, 1)):
        write_json(folder / "fingerprints/corpus.json", {"values": {"seed": seed}, "code": {}})
    save_json(after / "records/causal_elu.json", json.dumps(changed))
    stage, (model, what, *_, change) = moved(before, after)
    assert stage == ("corpus", "seed = 1 (was 0)")
    assert (model, what) == ("causal_elu", "perplexity, OVO 4")
    margin = stats.t.ppf(0.975, len(moves) - 1) * moves.std(ddof=1) / len(moves) ** 0.5
    ends = (moves.mean(), moves.mean() - margin, moves.mean() + margin)
    assert change == with_interval(*ends, 3, short)
    changed["hashes"]["data"] = "another text"
    save_json(after / "records/causal_elu.json", json.dumps(changed))
    assert [*moved(before, after)][1][-1] == DASH
    assert_refused("share no fingerprint or record", lambda: [*moved(tmp_path, after)])


@pytest.mark.slow
def test_packed_weights_are_swept_where_nothing_was_trained(made: Path, tmp_path: Path) -> None:
    def make(folder: Path) -> subprocess.CompletedProcess[str]:
        command = ["make", "-f", str(ROOT / "Makefile"), "weights", "SCALE=smoke"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    assert "outputs/smoke has no models" in make(tmp_path).stderr
    assert not [*tmp_path.iterdir()] and make(made).returncode == 0
    archive = made / "outputs/weights-smoke.tar.gz"
    assert checksum(archive) in archive.with_name(f"{archive.name}.sha256").read_text()
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    assert not [*tmp_path.rglob("train.npy")]
    cell = "approximation=optimal_v_oblivious approximation.r=4"
    for model in ("kernel=elu", "model=masked length=long"):
        run_app(f"evaluate -m {model} {cell}", tmp_path)


@pytest.mark.parametrize(
    "command", sorted(SUCCESSORS.keys() - {"pipelines.pretrained", "pipelines.benchmark"})
)
def test_a_removed_command_names_what_replaces_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(command, run_name="__main__")
    line = f"error: {command} was removed in 1.1: {SUCCESSORS[command]}\n"
    assert (stop.value.code, capsys.readouterr()) == (2, ("", line))
