"""The whole run of a scale in one command, on a machine with a copy of the files and no DVC.

    python -m pipelines.run scale=gpu
    python -m pipelines.run scale=gpu corpus=local corpus.path=FILE causal.steps=500 logger=none

Takes the stages of dvc.yaml up to the report, in its order, with the given overrides, and writes
outputs/<scale>/, its page in outputs/<scale>/report; `python -m pipelines.publish` keeps it. A run
that was ended is started again with the same command: stages that are done are left out, training
continues from its checkpoint, computed cells are found again. A stage is done again where its
fingerprint (its values and its code) is another, something that it made is gone, or a stage that it
reads from was done again.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipelines import plan
from pipelines.app import (
    USER_ERRORS,
    composed,
    one_line,
    say_edits,
    scale_of_params,
    write_json,
)
from pipelines.app.training import check_gpu
from pipelines.fingerprints import fingerprint
from value_aware_attention.files import load_json
from value_aware_study.paths import inside

LAST = "report"


@dataclass(frozen=True)
class Stage:
    """One entry of dvc.yaml: its app with arguments, and what it reads and writes."""

    name: str
    words: tuple[str, ...]
    deps: tuple[str, ...]
    outs: tuple[str, ...]

    def reads_from(self, other: "Stage") -> bool:
        return any(
            f"{dep}/".startswith(f"{out}/") or f"{out}/".startswith(f"{dep}/")
            for dep in self.deps
            for out in other.outs
        )


def main() -> None:
    try:
        run(sys.argv[1:])
    except subprocess.CalledProcessError as error:  # the stage itself has said why
        sys.exit(f"error: ended with exit code {error.returncode}; the same command goes on")
    except USER_ERRORS as error:
        sys.exit(f"error: {one_line(error)}")


def run(given: list[str]) -> None:
    """Every stage that is not done."""
    overrides = [*scale_of_params(given), *given]
    cfg = composed("plan", overrides)
    say_edits(cfg.scale, overrides)
    check_places(cfg)
    check_gpu(cfg, f"scale={cfg.scale}", lambda: plan.operations(plan.rows(cfg.plan, overrides)))
    outputs = f"{cfg.paths.root}/outputs/{cfg.scale}"
    chosen = {"paths.outputs": outputs, "paths.report": f"{outputs}/report"}
    overrides += [f"{key}={quoted(folder)}" for key, folder in chosen.items()]
    paths = composed("plan", overrides).paths
    done_again: list[Stage] = []
    for stage in stages(cfg):
        marker = inside(f"{outputs}/.done", stage.name, ".json")
        app, *words = stage.words
        found = fingerprint(app.removeprefix("pipelines."), [*words, *overrides])
        if kept(marker) == found and not any(map(stage.reads_from, done_again)):
            gone = next((out for out in outs(stage, paths) if not is_there(out)), None)
            if not gone:
                print(f"{stage.name}: done before", flush=True)
                continue
            print(f"{stage.name}: {gone} is gone or cut", flush=True)
        marker.unlink(missing_ok=True)
        start(stage.name, [*stage.words, *overrides])
        write_json(marker, found)
        done_again.append(stage)


def check_places(cfg: DictConfig) -> None:
    """Raises ValueError for folders that the run chooses itself."""
    chosen = {"outputs": f"{cfg.paths.root}/outputs", "report": f"{cfg.paths.root}/report"}
    for name, folder in chosen.items():
        if cfg.paths[name] != folder:
            raise ValueError(
                f"paths.{name} is {cfg.paths[name]}, which a run does not take: give paths.root, "
                f"below which it writes outputs/{cfg.scale} with the report in it"
            )


def stages(cfg: DictConfig) -> Iterator[Stage]:
    """Those of dvc.yaml up to the report, one for every value of a matrix.

    What makes a causal model comes again for every one of `grid.replicates`.
    """
    pipeline: Any = OmegaConf.to_container(OmegaConf.load("dvc.yaml"), resolve=False)
    for name, stage in pipeline["stages"].items():
        if stage["cmd"].endswith(".fingerprints"):
            continue
        axes = stage.pop("matrix", {})
        for axis, values in axes.items():
            for value in OmegaConf.select(cfg, values.strip("${}")):
                item = {f"${{item.{axis}}}": value}
                yield read_stage(f"{name}@{value}", stage, item)
                for replicate in cfg.grid.replicates if axis == "kernel" else ():
                    yield replicated(read_stage(f"{name}@{value}", stage, item), value, replicate)
        if not axes:
            yield read_stage(name, stage, {})
        if name == LAST:
            return


def read_stage(name: str, stage: dict[str, Any], item: dict[str, str]) -> Stage:
    def filled(text: str) -> str:
        for placeholder, value in item.items():
            text = text.replace(placeholder, value)
        return text

    outs = [next(iter(out)) if isinstance(out, dict) else out for out in stage["outs"]]
    return Stage(
        name,
        tuple(filled(stage["cmd"]).removeprefix("python -m ").split()),
        tuple(map(filled, stage["deps"])),
        tuple(map(filled, outs + stage.get("metrics", []))),
    )


def replicated(stage: Stage, kernel: str, replicate: str) -> Stage:
    """The stage of a kernel for another training of its model (conf/replicate)."""
    model, suffix = f"causal_{kernel}", f"_{replicate}"
    return Stage(
        f"{stage.name}-{replicate}",
        (*stage.words, f"replicate={replicate}"),
        tuple(dep.replace(model, model + suffix) for dep in stage.deps),
        tuple(out.replace(model, model + suffix) for out in stage.outs),
    )


def kept(file: Path) -> Any:
    """A file's JSON, such as a stage's fingerprint; None where it is not there or cut."""
    try:
        return load_json(file) if file.exists() else None
    except ValueError:
        return None


def outs(stage: Stage, paths: DictConfig) -> Iterator[Path]:
    """Where a stage writes: a folder of `paths`, or one of its outputs."""
    for out in stage.outs:
        name, _, rest = out.removeprefix("outputs/").partition("/")
        yield Path(paths.get(name, f"{paths.outputs}/{name}"), rest)


def is_there(out: Path) -> bool:
    """Whether an output is there and holds something; of JSON, whether it can be read."""
    if out.suffix == ".json":
        return kept(out) is not None
    return any(out.iterdir()) if out.is_dir() else out.is_file() and out.stat().st_size > 0


def quoted(text: str) -> str:
    """Text as the value of an override, whatever letters it has."""
    return "'{}'".format(text.replace("'", r"\'"))


def start(name: str, words: list[str]) -> None:
    """Runs an app as a process of its own."""
    print(f"{name}: python -m {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", *words], check=True)


if __name__ == "__main__":
    main()
