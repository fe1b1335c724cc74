"""A step taken in micro-batches or by two processes equals the step of the whole batch."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger

from tests.refusals import assert_refused
from tests.training.processes import exit_code, start
from tests.training.test_fit import logged, same
from tests.training.tiny import Batches, causal_batch, causal_module, masked_module, on_the_cpu
from value_aware_attention.kernels import Elu
from value_aware_study.data.batches import rows_of
from value_aware_study.training.fit import fit

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
