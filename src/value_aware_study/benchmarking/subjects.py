"""Builds subjects of the benchmark from their configs, and describes them for the report."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hydra.utils import instantiate

from value_aware_attention.measurement.store import source_hash
from value_aware_study.benchmarking.measurement import Plan, measure
from value_aware_study.benchmarking.passes import Setting, Subject


def build_setting(layer: Mapping[str, Any]) -> Setting:
    """Takes the layer's sizes, with this machine's device and threads where none are given."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = found if layer["device"] == "auto" else layer["device"]
    if device.startswith("cuda") and found != "cuda":
        raise ValueError(
            f"benchmark.layer.device is {device} and there is no GPU; auto takes the CPU"
        )
    threads = layer["threads"] or torch.get_num_threads()
    return Setting(**{**layer, "device": device, "threads": threads})


def build_subject(name: str, method: Mapping[str, Any]) -> Subject:
    """Makes a subject of a method's config, whose arguments are checked when it first runs."""
    options = {"kernel": instantiate(method["kernel"])} if "kernel" in method else {}
    return Subject(
        name=name,
        build=instantiate(method["build"], _partial_=True, _convert_="all"),
        by_length={key: tuple(value) for key, value in method.get("by_length", {}).items()},
        mixes_hidden=method.get("mixes_hidden", False),
        **options,
    )


def describe(
    method: Mapping[str, Any], subject: Subject, plan: Plan, setting: Setting
) -> dict[str, Any]:
    """Lists a method's names, its arguments, its published cost, and its multiply-adds."""
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
    """Hashes the code that is timed and the code that times it."""
    timed = {subject.module_name for subject in subjects}
    return source_hash(measure.__module__, *sorted(timed))
