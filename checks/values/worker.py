"""Runs command lines, each in a fork of one process that has imported all apps.

    python worker.py FOLDER < cases.json > outcomes.jsonl

Makes a run at smoke scale in FOLDER first; every case finds a copy of it.
"""

import builtins
import json
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIMIT = 60.0
"""Seconds after which a case counts as one that does not end"""
MEMORY = 8 * 2**30
"""Most bytes that a case may allocate"""
FIXED = ("scale=smoke", "logger=none", "trainer.accelerator=cpu")
ASKED = {
    "probe": (
        "probe.model=outputs/smoke/models/causal_exponential",
        "probe.text=outputs/smoke/corpus/networkx/train.jsonl",
    )
}
"""Required arguments, by app"""
MADE = (
    "corpus",
    "tokens",
    "train_causal",
    "train_masked length=short",
    "train_masked length=long",
    "train_in_context",
    "evaluate",
)
"""Stages that run before all cases"""
TOGETHER = ("run", "fingerprints", "verdict")
"""Commands that are no apps of Hydra"""
NAMES = """
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
from value_aware_attention import *
from value_aware_attention import (
    approximations, attention, caches, error, hugging_face, kernels, measurement, models, probe
)
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 16, 8)
tokens = torch.arange(24).view(2, 12)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=64,
)).eval()
"""
"""Code that runs before a call of the library"""
HEAVY = ("torch", "transformers", "pytorch_lightning", "value_aware_attention")
"""Packages that take long to import, which apps import after they have checked their values"""
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")
FORK = multiprocessing.get_context("fork")


def main(folder: Path, cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the seconds of the imports, then an outcome for every case."""
    checkout = Path.cwd()
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    imports = import_apps(sorted(path.stem for path in (checkout / "conf").glob("*.yaml")))
    whole = folder / "whole"
    whole.mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(checkout / name, whole)
    for command in MADE:
        made = run(whole, command)
        if made["code"]:
            raise RuntimeError(f"{command} failed: {made['stderr']}")
    yield {"imports": imports}
    for case in cases:
        yield outcome(folder, case, imports)


def import_apps(names: Sequence[str]) -> float:
    """Imports every app and the library; returns the CPU seconds."""
    before = time.process_time()
    exec(NAMES, {})
    for name in HEAVY:
        import_module(name)
    for name in (*names, *TOGETHER):
        if find_spec(f"pipelines.{name}"):  # conf/ also holds what apps share
            import_module(f"pipelines.{name}")
    return time.process_time() - before


def outcome(folder: Path, case: Mapping[str, Any], imports: float) -> dict[str, Any]:
    """Runs a case; returns its end, its CPU seconds, and the files that it changed."""
    root = folder / "case"
    if not root.exists():
        shutil.copytree(folder / "whole", root)
    if edit := case.get("edit"):
        file, (before, after) = root / "params.yaml", edit
        text = file.read_text()
        if before not in text:
            raise ValueError(f"params.yaml has no {before!r}")
        file.write_text(text.replace(before, after, 1))
    if setup := case.get("setup"):
        subprocess.run(["bash", "-ec", setup], cwd=root, check=True, stdout=subprocess.DEVNULL)
    earlier = files(root)
    found = run(root, case["given"])
    if found.pop("imported"):
        found["seconds"] += imports
    later = files(root)
    changed = sorted({name for name, _ in set(earlier.items()) ^ set(later.items())})
    if changed or edit or setup or (root / "logs").exists():
        shutil.rmtree(root)
    return found | {"changed": changed}


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Returns every file with its size and time, without those of logs, caches and DVC."""
    found = (path for path in root.rglob("*") if path.is_file())
    named = {path.relative_to(root).as_posix(): path.stat() for path in found}
    return {
        name: (stat.st_size, stat.st_mtime_ns)
        for name, stat in named.items()
        if name.split("/")[0] not in ("logs", ".cache", ".dvc")
    }


def run(root: Path, command: str) -> dict[str, Any]:
    """Runs `python -m pipelines.<command>` in `root`."""
    before = used()
    marker, errors = root.parent / "imported", root.parent / "stderr"
    marker.unlink(missing_ok=True)
    process = FORK.Process(target=start, args=(root, command, marker, errors))
    process.start()
    process.join(LIMIT)
    ended = process.exitcode is not None
    if not ended and process.pid:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    text = errors.read_text(errors="replace") if errors.exists() else ""
    text = text.replace(f"{root}/", "").replace(str(root), "FOLDER")  # of no interest
    lines = text.splitlines()
    return {
        "code": process.exitcode if ended else None,
        "stderr": [line[:500] for line in lines if line.strip() and "%|" not in line][:40],
        "seconds": used() - before,
        "imported": marker.exists(),
    }


def used() -> float:
    """Returns the CPU seconds of all ended processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def start(root: Path, command: str, marker: Path, errors: Path) -> None:
    """Runs a case in its process; makes `marker` as soon as the app imports a heavy package."""
    os.setsid()
    os.chdir(root)
    multiprocessing.set_start_method("fork", force=True)  # as of any process that nobody forked
    for descriptor, file in ((1, os.devnull), (2, str(errors))):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1) for descriptor in (1, 2))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if command.startswith("call "):
        return call(command.removeprefix("call "))
    words = shlex.split(command)
    while VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    app, *given = words
    asked = [*FIXED, *ASKED.get(app, ())] if app != "fingerprints" else []
    # what is given comes last: of two values of a key Hydra takes the later one, of options none
    asked = [one for one in asked if f"{one.partition('=')[0]}=" not in f" {' '.join(given)}"]
    sys.argv = [f"pipelines.{app}", *asked, *given]
    imported = builtins.__import__

    def marked(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] in HEAVY:
            marker.touch()
        return imported(name, *arguments, **options)

    builtins.__import__ = marked
    import_module(f"pipelines.{app}").main()


def call(code: str) -> None:
    """Runs a call of the library; a ValueError or an OSError ends in one line."""
    names: dict[str, Any] = {}
    exec(NAMES, names)
    try:
        exec(code, names)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    for line in main(Path(sys.argv[1]), json.load(sys.stdin)):
        print(json.dumps(line), flush=True)
