"""What runs on a cluster: sweeps through submitit, training on several devices."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.test_apps import run_app
from tests.training.processes import write_tokens
from value_aware_attention.kernels import Elu
from value_aware_attention.models import CausalLanguageModel


def write_model(root: Path) -> None:
    torch.manual_seed(0)
    model = CausalLanguageModel(
        vocabulary_size=60, layers=2, width=64, heads=1, feedforward=64, kernel=Elu(), dropout=0.0
    )
    model.save(root / "outputs/models/causal_elu")


@pytest.mark.skipif(find_spec("submitit") is None, reason="needs requirements-cluster.txt")
@pytest.mark.filterwarnings("ignore")
def test_a_sweep_of_submitit_jobs_prints_its_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path)
    write_model(tmp_path)
    sweep = "kernel=elu approximation=optimal_v_oblivious approximation.r=1,96"
    run_app(f"evaluate -m hydra/launcher=submitit_local {sweep}", tmp_path)
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    head, *rows = [words for words in lines if words[:1] in (["model"], ["causal_elu"])]
    assert head[:3] == ["model", "approximation", "r"]
    assert [row[:3] for row in rows] == [
        ["causal_elu", "optimal_v_oblivious", "1"],
        ["causal_elu", "optimal_v_oblivious", "96"],
    ]
    # a job each, and with every key the exact attention
    jobs = list((tmp_path / "logs/hydra/evaluate/.submitit").glob("*/*_result.pkl"))
    assert len(jobs) == 2
    kept = json.loads((tmp_path / "logs/hydra/evaluate/rows/1.json").read_text())
    assert dict(kept)["relative_output_error"] < 1e-9


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("train_causal trainer=ddp trainer.devices=3", ("batch_size 4", "3 devices", "of 3")),
        ("train_causal trainer.accumulate=8", ("batch_size 4", "8 micro-batches", "of 8")),
        ("train_causal -m trainer=ddp kernel=elu", ("run the whole sweep again", "submitit_slurm")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_train_together_is_refused_before_any_work(
    tmp_path: Path, command: str, named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path)
    with pytest.raises(SystemExit) as stop:
        run_app(command, tmp_path)
    message = str(stop.value)
    assert message.startswith("error: ") and "\n" not in message
    assert all(part in message for part in named), message
    assert not (tmp_path / ".cache").exists()
