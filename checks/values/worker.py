"""Runs command lines, each in a fork of one process that has imported all apps.

    python worker.py FOLDER < cases.json > outcomes.jsonl

Makes a run at smoke scale in FOLDER first; every case finds a copy of it.
"""

import json
import multiprocessing
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
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
    "evaluate",
)
"""Stages that run before all cases"""
FORK = multiprocessing.get_context("fork")


def main(folder: Path, cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Makes a run at smoke scale, then yields an outcome for every case."""
    checkout = Path.cwd()
    sys.path[:0] = [str(checkout / "src"), str(checkout)]
    for module in iter_modules([str(checkout / "pipelines")]):
        import_module(f"pipelines.{module.name}")
    whole = folder / "whole"
    whole.mkdir()
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(checkout / name, whole)
    for command in MADE:
        made = run(whole, command)
        if made["code"]:
            raise RuntimeError(f"{command} failed: {made['stderr']}")
    for case in cases:
        yield outcome(folder, case)


def outcome(folder: Path, case: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a case; returns its end, and the files that it changed."""
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
    ended = run(root, case["given"])
    later = files(root)
    changed = sorted({name for name, _ in set(earlier.items()) ^ set(later.items())})
    if changed or edit or setup or (root / "logs").exists():
        shutil.rmtree(root)
    return ended | {"changed": changed}


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Returns every file with its size and time, without those of logs, caches and DVC."""
    return {
        path.relative_to(root).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("logs", ".cache", ".dvc")
    }


def run(root: Path, command: str) -> dict[str, Any]:
    """Runs `python -m pipelines.<command>` in `root`."""
    errors = root.parent / "stderr"
    process = FORK.Process(target=start, args=(root, command, errors))
    process.start()
    process.join(LIMIT)
    ended = process.exitcode is not None
    if not ended and process.pid:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    text = errors.read_text(errors="replace") if errors.exists() else ""
    text = text.replace(f"{root}/", "").replace(str(root), "FOLDER")  # not compared
    lines = text.splitlines()
    return {
        "code": process.exitcode if ended else None,
        "stderr": [line[:500] for line in lines if line.strip() and "%|" not in line][:40],
    }


def start(root: Path, command: str, errors: Path) -> None:
    """Runs a case in its process."""
    os.setsid()
    os.chdir(root)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was not forked
    for descriptor, file in ((1, os.devnull), (2, str(errors))):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1) for descriptor in (1, 2))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    words = shlex.split(command)
    while words[0].partition("=")[0].isupper():
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    app, *arguments = words
    needed = [*FIXED, *ASKED.get(app, ())] if app != "fingerprints" else []
    # Hydra takes the later of two values of a key, but none of two options of a group a packaged
    # model takes the place of a model
    text = f" {' '.join(arguments)}".replace(" pretrained=", " probe.model= pretrained=")
    needed = [value for value in needed if f"{value.partition('=')[0]}=" not in text]
    sys.argv = [f"pipelines.{app}", *needed, *arguments]
    import_module(f"pipelines.{app}").main()


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    for line in main(Path(sys.argv[1]), json.load(sys.stdin)):
        print(json.dumps(line), flush=True)
