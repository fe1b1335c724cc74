"""Training processes killed at random moments: do they end with an uninterrupted run's weights?

python -m benchmarks.kill_and_resume [--kills 5] [--seed 0]

Trains the smoke-scale causal model with `python -m pipelines.train_causal`, once in one go and once
killed (SIGKILL) again and again: the first time while a checkpoint is being written, then at random
moments. Prints where each kill fell and the sha256 of both weights; ends with 1 if they differ.
"""

import random
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch

OVERRIDES = ("scale=smoke", "logger=none", "trainer.accelerator=cpu", "causal.dropout=0.1")
TRAINING = ("causal.steps=200", "training.checkpoint_every=5", "training.evaluate_every=20")


def process(app: str, root: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", f"pipelines.{app}", f"paths.root={root}", *OVERRIDES]
    values = TRAINING if app == "train_causal" else ()
    return subprocess.Popen([*command, *values], stderr=subprocess.DEVNULL)


def finish(app: str, root: Path) -> None:
    if code := process(app, root).wait():
        raise SystemExit(f"error: pipelines.{app} ended with exit code {code}")


def folder(root: Path) -> Path:
    return root / ".cache/checkpoints/causal_exponential"


def weights(root: Path) -> str:
    file = root / "outputs/models/causal_exponential/model.safetensors"
    return sha256(file.read_bytes()).hexdigest()


def being_written(root: Path) -> bool:
    return any(folder(root).glob(".last.ckpt.*"))


def checkpoint_files(root: Path) -> str:
    """What a kill left behind: the unfinished file and the steps of the whole ones."""
    unfinished = ["last.partial"] if being_written(root) else []
    steps = [
        f"{file.name} at step {torch.load(file, weights_only=True)['global_step']}"
        for file in sorted(folder(root).glob("*.ckpt"))
    ]
    return ", ".join([*unfinished, *steps]) or "nothing"


def kill_when(root: Path, moment: Callable[[], bool]) -> bool:
    """Starts or continues the training and kills it; False where it was done before the moment."""
    training = process("train_causal", root)
    while training.poll() is None and not moment():
        pass
    training.kill()
    return training.wait() < 0


def into_training(root: Path, seconds: float) -> Callable[[], bool]:
    """True that long after the process took the folder: most of its time it was importing."""
    lock, now = folder(root) / "lock", time.time()

    def passed() -> bool:
        time.sleep(0.001)
        return (
            lock.exists()
            and lock.stat().st_mtime > now
            and time.time() > seconds + max(now, lock.stat().st_mtime)
        )

    return passed


def killed_run(root: Path, kills: int, longest: float, numbers: random.Random) -> int:
    """How many kills fell into the run."""
    fallen = kill_when(root, lambda: being_written(root))
    print(f"killed while a checkpoint is written: left {checkpoint_files(root)}")
    for _ in range(kills - 1):
        seconds = numbers.uniform(0, longest)
        killed = kill_when(root, into_training(root, seconds))
        fallen += killed
        name = f"killed {seconds:.2f} s into training" if killed else "done before it was killed"
        print(f"{name}: left {checkpoint_files(root)}")
    return fallen


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        roots = straight, killed = Path(temporary, "straight"), Path(temporary, "killed")
        for root in roots:
            finish("corpus", root)
            finish("tokens", root)
        finish("train_causal", straight)
        took = time.time() - (folder(straight) / "lock").stat().st_mtime
        numbers = random.Random(arguments.seed)
        count = killed_run(killed, arguments.kills, 1.5 * took / arguments.kills, numbers)
        finish("train_causal", killed)
        one, other = weights(straight), weights(killed)
    print(f"in one go       {one}\nkilled {count} times  {other}")
    if one != other:
        raise SystemExit("error: the weights differ")


if __name__ == "__main__":
    main()
