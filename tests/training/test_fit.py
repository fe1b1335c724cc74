"""The training loop learns, logs and resumes bit by bit; micro-batches take the same steps."""

import csv
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger

from tests.refusals import assert_refused
from tests.training.processes import exit_code, free_port, start
from tests.training.tiny import (
    Batches,
    causal_batch,
    causal_module,
    masked_batch,
    masked_module,
    on_the_cpu,
)
from value_aware_attention.files import DiskFull
from value_aware_attention.kernels import Elu
from value_aware_attention.models import TrainedAttention, attend_with
from value_aware_study.data.batches import rows_of
from value_aware_study.training.fit import CheckpointFiles, fit
from value_aware_study.training.modules import LanguageModeling, MaskedTraining
from value_aware_study.training.optimizers import BertAdam, Muon

State = dict[str, torch.Tensor]


def run(
    module: LanguageModeling,
    folder: Path,
    *,
    masked: bool = False,
    breaks_at: int | None = None,
    fingerprint: str = "a",
    steps: int = 13,
    evaluate_every: int = 5,
    checkpoint_every: int = 3,
    logger: CSVLogger | None = None,
    **options: Any,
) -> tuple[list[dict[str, float]], list[int]]:
    """Trains; returns the curve and the numbers of the batches that were read."""
    train = Batches(steps, masked=masked, breaks_at=breaks_at)
    curve = fit(
        module,
        train,
        Batches(2, masked=masked),
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        checkpoint_folder=folder,
        fingerprint=fingerprint,
        logger=logger,
        **on_the_cpu(**{"log_every_n_steps": 4} | options),
    )
    return curve, train.read


def logged(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def same(first: State, other: State) -> bool:
    return all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("steps", "evaluated"), [(13, [5, 10, 13]), (10, [5, 10])])
def test_every_step_reads_its_batch_and_evaluations_are_where_they_should(
    tmp_path: Path, steps: int, evaluated: list[int]
) -> None:
    module, before = causal_module(), torch.get_rng_state()
    curve, read = run(module, tmp_path, steps=steps)
    assert read == list(range(steps)) and [point["step"] for point in curve] == evaluated
    assert set(curve[0]) == {"step", "loss", "perplexity"}
    assert not list(tmp_path.iterdir()) and torch.equal(torch.get_rng_state(), before)


def test_progress_is_a_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("value_aware_study.training.fit.LOG_EVERY", 0.0)
    with caplog.at_level("INFO", logger="value_aware_study"):
        run(causal_module(), tmp_path / "small", enable_progress_bar=True)
    lines = [record.getMessage() for record in caplog.records if "small" in record.getMessage()]
    assert len(lines) == 13 and lines[-1].startswith("small: step 13 of 13, ")
    for value in ("train/loss ", "train/tokens_per_second ", "evaluation/perplexity "):
        assert value in lines[-1]
    assert lines[-1].endswith(", 00:00 left")


@pytest.mark.parametrize("evaluate_every", [5, 13, 100])
def test_a_training_whose_model_could_not_be_written_is_not_taken_again(
    tmp_path: Path, evaluate_every: int
) -> None:
    often, fails = {"evaluate_every": evaluate_every}, Mock(side_effect=OSError("no room"))
    assert_refused("no room", run, causal_module(), tmp_path, error=OSError, save=fails, **often)
    module, straight, save = causal_module(), causal_module(), Mock()
    curve, read = run(module, tmp_path, save=save, **often)
    assert read == [] and not list(tmp_path.iterdir())
    save.assert_called_once_with(curve)
    expected, _ = run(straight, tmp_path / "straight", **often)
    assert curve == expected and same(module.state_dict(), straight.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_an_argument_ended_early_is_not_saved(tmp_path: Path) -> None:
    options = {"save": Mock(), "fast_dev_run": True}
    assert_refused("ended after 1 of 13 steps with", run, causal_module(), tmp_path, **options)
    options["save"].assert_not_called()


class SameBatch(Batches):
    def __getitem__(self, step: int) -> object:
        return super().__getitem__(0)


ATTENTIONS = {
    "learned": TrainedAttention("tests.training.tiny.LearnedScale", {"head_dim": 8, "seed": 0}),
    "linear": TrainedAttention(
        "value_aware_attention.models.LinearMixing", {"length": 12, "width": 16, "seed": 0}
    ),
}


def with_attention(name: str) -> MaskedTraining:
    module = masked_module(dropout=0.0)
    if name in ATTENTIONS:
        attend_with(module.model, ATTENTIONS[name])
    return module


@pytest.mark.parametrize("kind", ["causal", "masked", *ATTENTIONS])
def test_a_repeated_batch_is_learned_by_heart(tmp_path: Path, kind: str) -> None:
    masked = kind != "causal"
    module = causal_module(dropout=0.0, peak=3e-2) if not masked else with_attention(kind)
    settings = {"evaluate_every": 20, "checkpoint_every": 1000, "checkpoint_folder": tmp_path}
    batches = SameBatch(60, masked=masked), SameBatch(1, masked=masked)
    curve = fit(module, *batches, **settings, fingerprint="", **on_the_cpu())
    losses = [point["loss"] for point in curve]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * 3.7


def with_muon(module: LanguageModeling) -> LanguageModeling:
    module.make_optimizer = partial(Muon, lr=1.0)
    return module


MODULES = {
    "causal": causal_module,
    "masked": masked_module,
    "causal, Muon": lambda: with_muon(causal_module()),
    "masked, Muon": lambda: with_muon(masked_module()),
    "masked, learned attention": lambda: with_attention("learned"),
}


KILLS = [(5, 3, 4, 3, 1), (5, 5, 5, 5, 1), (5, 5, 7, 5, 1), (3, 6, 12, 12, 1), (4, 2, 11, 10, 1),
         (100, 4, 9, 8, 1), (3, 2, 1, 0, 2), (3, 2, 4, 4, 2), (3, 2, 5, 4, 2)]  # fmt: skip
KILLED = [(kind, *kill) for kind in ("causal", "masked") for kill in KILLS]
KILLED += [(kind, 5, 3, 8, 6, 1) for kind in list(MODULES)[2:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "evaluate_every", "checkpoint_every", "breaks_at", "resumes_at", "accumulate"), KILLED
)
def test_a_killed_run_continues_bit_by_bit(
    tmp_path: Path,
    kind: str,
    evaluate_every: int,
    checkpoint_every: int,
    breaks_at: int,
    resumes_at: int,
    accumulate: int,
) -> None:
    options = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    options |= {"masked": kind.startswith("masked"), "accumulate": accumulate}
    straight, killed, resumed = (MODULES[kind]() for _ in range(3))
    curve, _ = run(straight, tmp_path / "straight", **options)
    folder, death = tmp_path / "run", {"breaks_at": breaks_at, "error": KeyError}
    assert_refused("killed", run, killed, folder, **death, **options)
    again, read = run(resumed, folder, **options)
    assert read == [step for step in range(resumes_at, 13) for _ in range(accumulate)]
    assert again == curve
    assert same(resumed.state_dict(), straight.state_dict())


@pytest.mark.parametrize("change", [{"fingerprint": "b"}, {"accumulate": 2}])
def test_a_checkpoint_of_other_settings_is_not_continued(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert_refused("killed", run, causal_module(), tmp_path, breaks_at=8, error=KeyError)
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "previous.ckpt"}
    _, read = run(causal_module(), tmp_path, **change)
    assert sorted(set(read)) == list(range(13))


def test_dropout_depends_on_the_seed_and_the_step_alone(tmp_path: Path) -> None:
    states = []
    for number, seed in enumerate((3, 3, 4)):
        module = causal_module(seed=seed)
        torch.manual_seed(number)
        run(module, tmp_path)
        states.append(module.state_dict())
    assert same(states[0], states[1]) and not same(states[0], states[2])


def test_what_is_logged_and_at_which_steps(tmp_path: Path) -> None:
    module = causal_module()
    logger = CSVLogger(tmp_path / "logs", name="", version="")
    curve, _ = run(module, tmp_path / "checkpoint", logger=logger)
    rows = logged(tmp_path / "logs")
    train = {int(row["step"]): row for row in rows if row["train/loss"]}
    evaluation = {int(row["step"]): row for row in rows if row["evaluation/loss"]}
    assert list(train) == [4, 8, 12] and list(evaluation) == [5, 10, 13]
    assert "train/model_flops_utilisation" not in rows[0]  # no peak is known
    for step, row in train.items():
        assert float(row["train/learning_rate"]) == pytest.approx(module.schedule(step - 1))
        assert float(row["train/gradient_norm"]) > 0
        assert float(row["train/tokens_per_second"]) > 0
    for point in curve:
        row = evaluation[int(point["step"])]
        assert float(row["evaluation/perplexity"]) == pytest.approx(point["perplexity"])


def test_the_gradient_norm_is_that_before_clipping(tmp_path: Path) -> None:
    module = masked_module(dropout=0.0)
    module.make_optimizer = partial(BertAdam, lr=1.0, max_grad_norm=1e-3)
    module.loss(masked_batch(0)).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    module.zero_grad()
    logger = CSVLogger(tmp_path / "logs", name="", version="")
    run(module, tmp_path / "checkpoint", masked=True, steps=1, log_every_n_steps=1, logger=logger)
    (row,) = [row for row in logged(tmp_path / "logs") if row["train/loss"]]
    assert float(row["train/gradient_norm"]) == pytest.approx(float(expected.norm()), rel=1e-4)


def test_settings_that_leave_nothing_to_do(tmp_path: Path) -> None:
    assert_refused(r"steps 0, .* must be at least 1$", run, causal_module(), tmp_path, steps=0)


def test_any_argument_of_lightnings_trainer_is_passed_on(tmp_path: Path) -> None:
    def weights(**trainer: Any) -> State:
        module = causal_module(dropout=0.0)
        module.make_optimizer = partial(torch.optim.SGD, lr=1.0)
        settings = {"evaluate_every": 1, "checkpoint_every": 1, "checkpoint_folder": tmp_path}
        fit(module, Batches(1), Batches(1), **settings, fingerprint="", **on_the_cpu(**trainer))
        return module.state_dict()

    before = causal_module(dropout=0.0).state_dict()
    assert not same(weights(), before)
    clipped = weights(gradient_clip_val=1e-12)
    torch.testing.assert_close(dict(clipped), dict(before), rtol=0, atol=1e-11)
    for name in ("gradient_clip", "max_steps"):
        assert_refused(name, weights, **{name: 1})


def test_the_last_checkpoint_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CheckpointFiles(tmp_path / "run")
    files.folder.mkdir()
    files.save_checkpoint({"global_step": 1}, files.last)

    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected")
    error.__cause__ = OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", Mock(side_effect=error))
    line, later = f"^no space left in {files.folder}", {"global_step": 2}
    assert_refused(line, files.save_checkpoint, later, files.last, error=DiskFull)
    assert [file.name for file in files.folder.iterdir()] == ["last.ckpt"]
    assert list(files.whole()) == [files.last]
    assert torch.load(files.last)["global_step"] == 1


STEPS = 6
Result = tuple[dict[str, torch.Tensor], list[dict[str, float]], list[float]]


class HeldOut(Batches):
    """Held-out batches, the last of a single row: too few for two processes."""

    def __getitem__(self, step: int) -> Any:
        batch = super().__getitem__(step)
        return rows_of(batch, slice(1)) if step == self.count - 1 else batch


def trained(folder: Path, masked: bool, **trainer: Any) -> Result:
    # no exponential kernel: it has no gradient for the keys' bias, and Adam enlarges what is left
    module = masked_module(dropout=0.0) if masked else causal_module(dropout=0.0, kernel=Elu())
    curve = fit(
        module,
        Batches(STEPS, masked=masked),
        HeldOut(2, masked=masked),
        evaluate_every=3,
        checkpoint_every=2,
        checkpoint_folder=folder / "checkpoints",
        fingerprint="",
        log_every_n_steps=1,
        logger=CSVLogger(folder / "logs", name="", version=""),
        **on_the_cpu(**trainer),
    )
    rows = logged(folder / "logs") if os.environ.get("LOCAL_RANK", "0") == "0" else []
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    return module.state_dict(), curve, losses


def assert_equal(ours: Result, whole: Result) -> None:
    """Allows for another order of sums, whose rounding Adam's division enlarges at first."""
    torch.testing.assert_close(ours[0], whole[0], rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(ours[1:], whole[1:], rtol=2e-6, atol=0)
    assert len(ours[2]) == STEPS


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_take_the_step_of_their_batch(
    tmp_path: Path, masked: bool, accumulate: int
) -> None:
    whole = trained(tmp_path / "whole", masked)
    assert_equal(trained(tmp_path / "parts", masked, accumulate=accumulate), whole)


def share(rank: int, port: int, folder: Path, masked: bool, accumulate: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
    result = trained(folder, masked, strategy="ddp", devices=2, accumulate=accumulate)
    torch.save(result, folder / f"{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("masked", "accumulate"), [(False, 1), (True, 1), (True, 2)])
def test_two_processes_take_the_steps_of_one(tmp_path: Path, masked: bool, accumulate: int) -> None:
    port = free_port()
    processes = [start(share, rank, port, tmp_path, masked, accumulate) for rank in (0, 1)]
    assert [exit_code(process) for process in processes] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert_equal(first, trained(tmp_path / "whole", masked))
    assert same(first[0], second[0]) and first[1] == second[1]
    assert not list((tmp_path / "checkpoints").iterdir())


def test_micro_batches_draw_different_dropout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, first_row, losses = causal_module(dropout=0.5), causal_batch(0)[:1], []
    compute = module.loss

    def of_equal_rows(batch: Any, targets: float | None = None) -> torch.Tensor:
        losses.append(compute(first_row.expand_as(batch), targets))
        return losses[-1]

    monkeypatch.setattr(module, "loss", of_equal_rows)
    settings = {"evaluate_every": 1, "checkpoint_every": 1, "checkpoint_folder": tmp_path}
    fit(module, Batches(1), HeldOut(1), **settings, fingerprint="", **on_the_cpu(accumulate=2))
    assert len(losses) == 2 and losses[0] != losses[1]


@pytest.mark.parametrize(
    ("accumulate", "message"),
    [
        (3, r"batch_size 4 does not divide over 1 devices with 3 .*; it must be a multiple of 3"),
        (0, "devices 1 and accumulate 0 must be at least 1"),
    ],
)
def test_a_batch_that_does_not_divide(tmp_path: Path, accumulate: int, message: str) -> None:
    assert_refused(message, trained, tmp_path, False, accumulate=accumulate)
