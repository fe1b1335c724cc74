"""Trains in separate processes, which can be killed and can work together."""

import io
import multiprocessing
import os
import signal
import socket
import sys
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pipelines import train_causal
from value_aware_study.data.batches import CausalBatches
from value_aware_study.training.fit import CheckpointFiles

ROOT = Path(__file__).parents[2]
VOCABULARY = 60
# Every process starts as a copy of one that has imported everything.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])


def start(function: Any, *arguments: Any) -> ForkServerProcess:
    process = SERVER.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def exit_code(process: ForkServerProcess, seconds: float = 300) -> int | None:
    process.join(timeout=seconds)
    return process.exitcode


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_tokens(root: Path) -> None:
    """Writes random tokens as the stage `tokens` does for a causal model."""
    folder = root / "outputs/smoke/tokens/causal"
    save_tokenizer(folder / "tokenizer")
    numbers = np.random.default_rng(0)
    for split in ("train", "evaluation"):
        np.save(folder / f"{split}.npy", numbers.integers(VOCABULARY, size=4000, dtype=np.uint16))


def save_tokenizer(folder: Path) -> None:
    """Saves the tokenizer of these tokens, as beside the tokens and in a model's folder."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def train_app(root: Path, dies: str = "", at: int = 0) -> None:
    """Runs train_causal for 12 steps, a checkpoint every 2; `dies` names how a signal ends it."""
    os.chdir(ROOT)
    torch.set_num_threads(1)
    if dies:
        DEATHS[dies](at)
    values = ["scale=smoke", "causal.steps=12", "causal.dropout=0.1", "logger=none"]
    values += ["training.checkpoint_every=2", "training.evaluate_every=5"]
    values += ["trainer.accelerator=cpu", f"paths.root={root}"]
    sys.argv = ["pipelines.train_causal", *values]
    train_causal.main()


def kill(**options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_batch(number: signal.Signals, step: int) -> None:
    read = CausalBatches.__getitem__

    def patched(batches: CausalBatches, asked: int) -> torch.Tensor:
        if asked == step:
            os.kill(os.getpid(), number)
        return read(batches, asked)

    CausalBatches.__getitem__ = patched


def while_writing(step: int) -> None:
    """Dies with half of a checkpoint's bytes on the disk."""
    write = torch.save

    def patched(state: dict[str, Any], file: Any) -> None:
        if state["global_step"] == step:
            buffer = io.BytesIO()
            write(state, buffer)
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            file.flush()
            kill()
        write(state, file)

    torch.save = patched


def between_names(step: int) -> None:
    """Dies when the older checkpoint has its new name and the newer one has not."""
    save, rename = CheckpointFiles.save_checkpoint, os.replace

    def patched(
        files: CheckpointFiles, state: dict[str, Any], *arguments: Any, **named: Any
    ) -> None:
        if state["global_step"] == step:
            os.replace = lambda old, new: kill() if new == files.last else rename(old, new)
        save(files, state, *arguments, **named)

    CheckpointFiles.save_checkpoint = patched


DEATHS = {
    "while_training": partial(before_batch, signal.SIGKILL),
    "when_asked": partial(before_batch, signal.SIGTERM),
    "while_writing": while_writing,
    "between_names": between_names,
}
