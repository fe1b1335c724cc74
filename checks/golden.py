"""Runs every stage at scale=smoke and compares the numbers with those of an earlier run.

    python -m checks.golden FOLDER [BEFORE]

Writes the numbers of each file of the run into FOLDER, under the file's name: sha256 of weights and
tokens, records and metrics without times, machine and hashes of code, tables of the page and of a
probe. With BEFORE, the folder of an earlier run, it prints every file that differs with its first
differing lines, and ends with exit code 1 if there is one. A change of structure alone changes no
number. Equal runs need one machine: another processor rounds differently.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from difflib import unified_diff
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checks.processes import REPOSITORY, app_process
from pipelines.fingerprints import stages

TIMED = {"fingerprints", "evaluate_pretrained", "caches"}
"""Apps whose outputs have no number that a second run repeats, or that smoke does not run"""
LAST = "report"
"""The app that runs last and reads the records of all others"""
VOLATILE = {
    *("run_on", "seconds", "prefill_seconds", "tokens_per_second"),
    *("content_sha256", "sha256", "code", "version"),
}
"""Keys of records whose values depend on the time or on the version of the code"""
COMPUTED = ("outputs", "report")
SCALE = "smoke"


def main() -> None:
    """Runs the stages, writes their numbers and compares them with those of an earlier run."""
    if len(sys.argv) not in (2, 3):
        sys.exit("error: give a folder for the numbers, and on request that of an earlier run")
    after = Path(sys.argv[1]).resolve()
    if after.exists():
        sys.exit(f"error: {after} exists; give a new folder")
    with TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        for app, overrides in commands(root):
            began = time.perf_counter()
            run(app, overrides, root)
            print(f"{app} {' '.join(overrides)}: {time.perf_counter() - began:.1f} s", flush=True)
        write_numbers(root, after)
    print(f"{sum(path.is_file() for path in after.rglob('*'))} files in {after}")
    if len(sys.argv) == 3:
        lines = list(differences(Path(sys.argv[2]), after))
        print("\n".join(lines) or "equal")
        sys.exit(1 if lines else 0)


def commands(root: Path) -> list[tuple[str, list[str]]]:
    """Returns app and overrides of every stage of dvc.yaml and of a probe, the report's last."""
    staged = [(app, overrides) for _, app, overrides in stages() if app not in TIMED]
    text = shutil.copy(REPOSITORY / "LICENSE", root.with_name("text.txt"))
    model = f"model={root}/outputs/{SCALE}/models/causal_exponential"
    probe = [model, f"text={text}", "caches=true", "probe.windows=2", "probe.length=96"]
    return [*sorted(staged, key=lambda command: command[0] == LAST), ("probe", probe)]


def run(app: str, overrides: list[str], root: Path) -> None:
    """Runs an app in a separate process, on one thread. Ends the program if it fails."""
    output = root.with_name("output")
    output.unlink(missing_ok=True)
    process = app_process(app, overrides, root, output)
    process.join()
    if process.exitcode:
        print(output.read_text(errors="replace"))
        sys.exit(f"error: {app} {' '.join(overrides)} ended with exit code {process.exitcode}")


def write_numbers(root: Path, folder: Path) -> None:
    """Writes the numbers of every file below `root` that a stage computed."""
    for path in sorted(path for name in COMPUTED for path in (root / name).rglob("*")):
        text = numbers(path) if path.is_file() and path.name != "SHA256SUMS" else ""
        if text:
            name = path.relative_to(root).as_posix().replace(f"outputs/{SCALE}/", "outputs/")
            written = folder / name
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(text)


def numbers(path: Path) -> str:
    """Returns a file's numbers as text, empty for a picture or a page."""
    if path.suffix == ".json":
        content = lasting(json.loads(path.read_text()))
        return json.dumps(content, indent=1, sort_keys=True) + "\n"
    if path.suffix in (".csv", ".md"):
        return path.read_text()
    if path.suffix in (".safetensors", ".npy", ".jsonl", ".txt", ".tokens"):
        return f"{sha256(path.read_bytes()).hexdigest()}\n"
    return ""


def lasting(content: Any) -> Any:
    """Removes the `VOLATILE` keys from JSON."""
    if isinstance(content, dict):
        return {key: lasting(value) for key, value in content.items() if key not in VOLATILE}
    return [lasting(value) for value in content] if isinstance(content, list) else content


def differences(before: Path, after: Path) -> Iterator[str]:
    """Yields each file that differs, with its first differing lines."""
    names = {path.relative_to(folder) for folder in (before, after) for path in folder.rglob("*")}
    for name in sorted(names):
        old, new = (
            (folder / name).read_text().splitlines() if (folder / name).is_file() else []
            for folder in (before, after)
        )
        if old != new:
            yield "\n".join([str(name), *list(unified_diff(old, new, lineterm="", n=0))[2:8]])


if __name__ == "__main__":
    main()
