"""Of several processes the first writes, failures are one line, and cards state every number."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from pipelines import train_causal
from tests.apps import copy_of_the_project, refusal, run_app
from tests.test_distributed import LENGTH, write_masked
from tests.training.processes import ROOT, exit_code, free_port, start, write_tokens
from value_aware_attention.files import write_checksums
from value_aware_study.training.model_card import model_card
from value_aware_study.training.modules import CausalTraining


def one_of_two(rank: int, port: int, root: Path) -> None:
    """Runs `trainer=ddp` as one of its two processes, in its own folder."""
    os.chdir(ROOT)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WANDB_MODE": "offline"}
    os.environ |= {"WORLD_SIZE": "2", "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
    rank_zero_only.rank = rank  # what Lightning reads from the environment when it is imported
    values = ["scale=smoke", "causal.steps=4", "trainer=ddp", "trainer.workers=0"]
    values += ["training.checkpoint_every=1", "trainer.accelerator=cpu", f"paths.root={root}"]
    sys.argv = ["pipelines.train_causal", *values]
    train_causal.main()


def files(root: Path) -> set[str]:
    """Lists the files that a run wrote, without Hydra's log."""
    written = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
    others = ("outputs/smoke/tokens", "logs/hydra")
    return {str(p) for p in written if not any(map(p.is_relative_to, others))}


@pytest.mark.slow
def test_of_two_processes_the_first_one_writes(tmp_path: Path) -> None:
    port, roots = free_port(), [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        write_tokens(root)
    processes = [start(one_of_two, rank, port, root) for rank, root in enumerate(roots)]
    assert [exit_code(process, seconds=180) for process in processes] == [0, 0]
    first, second = map(files, roots)
    assert not second
    assert {
        "outputs/smoke/models/causal_exponential/model.safetensors",
        "outputs/smoke/models/causal_exponential/tokenizer.json",
        "outputs/smoke/metrics/train/causal_exponential.json",
    } <= first
    assert sum(name.endswith(".wandb") for name in first) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("override", "words_of_line"),
    [
        ("masked.block=7", ("masked.block is 7; ", f"was made with {LENGTH}")),
        (
            "masked.fraction=0.0001",
            ("no masked token in 3 held-out sequences; masked.fraction is 0.0001",),
        ),
    ],
)
def test_values_that_do_not_fit_the_tokens_are_refused_before_any_work(
    tmp_path: Path, override: str, words_of_line: tuple[str, ...]
) -> None:
    write_masked(tmp_path)
    rows = tmp_path / f"outputs/smoke/tokens/masked/{LENGTH}/random"
    shutil.copy(rows / "evaluation.npy", rows / "train.npy")
    line = refusal(f"train_masked length=short {override}", tmp_path)
    assert all(words in line for words in words_of_line), line
    assert not (tmp_path / ".cache").exists()
    assert not (tmp_path / "outputs/smoke/metrics").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_gpu_that_is_too_small_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")
    monkeypatch.setattr(CausalTraining, "loss", Mock(side_effect=error))
    write_tokens(tmp_path)
    message = refusal("train_causal trainer.accumulate=2", tmp_path)
    assert message.startswith("error: out of GPU memory while training causal_exponential: ")
    assert "batch_size of 4 was taken in 2 micro-batches" in message
    assert "trainer.accumulate" in message and "trainer.checkpoint_activations=true" in message
    assert not (tmp_path / "outputs/smoke/models").exists()


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_without_betas_and_an_added_argument_are_in_the_record(
    tmp_path: Path,
) -> None:
    write_tokens(tmp_path)
    sgd = "causal.optimizer._target_=torch.optim.SGD"
    without = " ".join(f"~causal.optimizer.{name}" for name in ("betas", "eps", "adamw_rate"))
    run_app(f"train_causal {sgd} {without} +trainer.gradient_clip_val=0.5", tmp_path)
    metrics = tmp_path / "outputs/smoke/metrics/train/causal_exponential.json"
    recorded = json.loads(metrics.read_text())["hyperparameters"]
    assert (recorded["optimizer"], recorded["beta_1"]) == ("SGD", None)
    assert (recorded["gradient_clip_val"], recorded["precision"]) == (0.5, "32-true")


def test_a_folder_of_the_users_is_refused_before_the_training(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "thesis.docx").touch()
    line = refusal(f"train_causal paths.models={tmp_path} train_causal.name=texts", tmp_path)
    assert line.startswith(f"error: {texts} holds thesis.docx, which no SHA")
    tokens = tmp_path / "outputs/smoke/tokens"
    command = f"train_causal paths.models={tokens} train_causal.name=causal"
    assert "holds evaluation.npy" in refusal(command, tmp_path)
    write_checksums(tokens / "causal")
    assert re.search("cannot be written from .*tokens/causal: one of", refusal(command, tmp_path))
    assert (texts / "thesis.docx").exists() and (tokens / "causal/train.npy").exists()


PAGE = (ROOT / "docs/recipe.md").read_text(encoding="utf-8")
COPIED = ("conf", "docs", "pipelines", "src", "tests", "README.md", "params.yaml", "pyproject.toml")
TRAINING = ("-m", "pipelines.train_causal", "scale=smoke", "logger=none",
            "trainer.accelerator=cpu", "optimizer@causal.optimizer=nadam")  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_of_the_project(tmp_path_factory.mktemp("project"), *COPIED)
    ((name, text),) = re.findall(r"\(`([\w/.]+)`\):\n\n```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": "src:."}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_it_trains_and_its_record_and_card_have_its_arguments(project: Path) -> None:
    write_tokens(project)
    done = run(project, *TRAINING, "causal.optimizer.momentum_decay=0.01")
    assert done.returncode == 0, done.stderr
    (file,) = project.glob("outputs/smoke/metrics/train/*.json")
    settings = json.loads(file.read_text())["hyperparameters"]
    assert settings["optimizer"] == "NAdam" and settings["momentum_decay"] == 0.01
    assert settings["beta_2"] == 0.98 and settings["momentum"] is None


def test_a_value_that_is_no_number_is_refused_at_once(project: Path) -> None:
    done = run(project, *TRAINING, "causal.optimizer.momentum_decay=inf")
    assert done.returncode == 1
    _, line = done.stderr.splitlines()  # the first says that there is no git to compare with
    assert "causal.optimizer.momentum_decay is inf; it must be at least 0" in line


CAUSAL = {
    "model": "causal_elu",
    "parameters": 1317632,
    "steps": 380,
    "tokens": 389120,
    "loss": 5.356531302134196,
    "perplexity": 211.98834614230697,
    "curve": [
        {"step": 100, "loss": 6.372697750727336, "perplexity": 585.6355985817588},
        {"step": 380, "loss": 5.356531302134196, "perplexity": 211.98834614230697},
    ],
    "hyperparameters": {"optimizer": "AdamW", "learning_rate": 5e-06, "warmup_proportion": None},
}
MASKED = {
    key: value for key, value in CAUSAL.items() if key not in ("perplexity", "curve", "model")
} | {
    "model": "masked_long",
    "error_percent": 85.15406162464986,
    "curve": [{"step": 380, "loss": 5.356531302134196, "error_percent": 85.15406162464986}],
}
ABOUT = {"data": "docstrings of numpy", "scale": "laptop", "kernel": "elu"}


@pytest.mark.parametrize("metrics", [CAUSAL, MASKED], ids=["causal", "masked"])
def test_every_number_of_the_metrics_is_stated(metrics: dict[str, Any]) -> None:
    text = ModelCard(model_card(metrics, **ABOUT)).text.replace(",", "")
    stated, expected = (
        [float(word) for word in re.findall(r"\d[\d.]*(?:e-?\d+)?(?=[\s|),}\]])", source)]
        for source in (text, json.dumps(metrics))
    )
    for number in expected:
        assert any(number == pytest.approx(written, rel=1e-5) for written in stated), number
    for words in ("docstrings of numpy", "Scale: laptop", "elu", "exact attention", "AdamW"):
        assert words in text


def test_the_metadata_are_the_hubs() -> None:
    data = ModelCard(model_card(MASKED, **ABOUT)).data
    assert data.pipeline_tag == "fill-mask" and data.library_name == "transformers"
    assert data.model_name == "masked_long" and "elu" in data.tags
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    assert results == {name: MASKED[name] for name in ("loss", "error_percent")}
    assert all("docstrings of numpy" in result.dataset_name for result in data.eval_results)
    assert ModelCard(model_card(CAUSAL, **ABOUT)).data.pipeline_tag == "text-generation"


def test_an_attention_of_its_own_is_named_and_loaded_with_it() -> None:
    attention = {"hyperparameters": MASKED["hyperparameters"] | {"attention": "LSH(r=4)"}}
    card = model_card(MASKED | attention, **ABOUT)
    assert "trained with LSH(r=4)" in card and "exact attention" not in card
    assert 'load_masked("masked_long")' in card
