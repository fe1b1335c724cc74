"""Stage benchmark: the survey's comparison of time and memory, measured on this machine.

The survey's lengths:  python -m pipelines.benchmark
Longer sequences:      python -m pipelines.benchmark 'benchmark.lengths=[128,1024,4096,16384]'
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app, plain, write_json
from pipelines.tracking import tracked
from value_aware_attention.measurement.record_cache import RecordCache
from value_aware_attention.measurement.run_on import run_on
from value_aware_attention.measurement.source import source_hash
from value_aware_study.benchmarking import Plan, Setting, Subject, measure
from value_aware_study.benchmarking.measurement import training_times


@app("benchmark")
def main(cfg: DictConfig) -> None:
    """Writes the record, and one metric a method."""
    subjects = [build_subject(name, plain(method)) for name, method in cfg.methods.items()]
    setting = build_setting(cfg.layer)
    lengths = {
        "forward": cfg.lengths,
        "forward_backward": cfg.lengths,
        "attention": cfg.attention_lengths,
    }
    plan = Plan(plain(DictConfig(lengths)), seconds=cfg.seconds, slowest=cfg.slowest)
    where = asdict(run_on()) | {"threads": setting.threads}
    source = source_of(subjects)
    cache = RecordCache(cfg.cache, {"run_on": where, "source": source})
    cells = measure(subjects, plan, setting, cache)
    record = {
        "run_on": where,
        "source": source,
        "layer": plain(cfg.layer) | {"device": setting.device, "threads": setting.threads},
        "plan": {**plan.lengths, "seconds": plan.seconds, "slowest": plan.slowest},
        "methods": {s.name: describe(cfg, s, plan, setting) for s in subjects},
        "cells": cells,
    }
    with tracked(cfg, "benchmark", setting.device) as run:
        write_json(cfg.metrics, training_times(cells))
        write_json(cfg.record, record, checksum=True)
        if run:
            run.summary.update(training_times(cells))


def build_setting(layer: DictConfig) -> Setting:
    """The layer's sizes, with this machine's device and threads where none are given."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = found if layer.device == "auto" else layer.device
    if device.startswith("cuda") and found != "cuda":
        raise ValueError(
            f"benchmark.layer.device is {device} and there is no GPU; auto takes the CPU"
        )
    threads = layer.threads or torch.get_num_threads()
    return Setting(**plain(layer) | {"device": device, "threads": threads})


def build_subject(name: str, method: dict[str, Any]) -> Subject:
    """A method of the config; what it is built from is checked when it is first run."""
    options = {"kernel": instantiate(method["kernel"])} if "kernel" in method else {}
    return Subject(
        name=name,
        build=instantiate(method["build"], _partial_=True, _convert_="all"),
        by_length={key: tuple(value) for key, value in method.get("by_length", {}).items()},
        mixes_hidden=method.get("mixes_hidden", False),
        **options,
    )


def describe(cfg: DictConfig, subject: Subject, plan: Plan, setting: Setting) -> dict[str, Any]:
    """What the report says of a method: names, every argument, published cost, multiply-adds."""
    method = plain(cfg.methods[subject.name])
    given = {key: value for key, value in method["build"].items() if key != "_target_"}
    lengths = sorted({length for measured in plan.passes().values() for length in measured})
    return {
        **{key: method[key] for key in ("label", "order", "exponent")},
        "class": method["build"]["_target_"].rpartition(".")[2],
        "arguments": given,
        "by_length": method.get("by_length", {}),
        "kernel": repr(subject.kernel),
        "multiply_adds": {str(n): subject.multiply_adds(n, setting) for n in lengths},
    }


def source_of(subjects: Sequence[Subject]) -> str:
    """Hash of the code that is timed, and of the code that times it."""
    timed = {subject.module_name for subject in subjects}
    return source_hash(measure.__module__, *sorted(timed))


if __name__ == "__main__":
    main()
