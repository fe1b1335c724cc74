"""Probes a model and writes its page: the part of the app that imports torch."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel

from pipelines.app.hydra_app import file_hash, plain
from pipelines.app.tracking import log_record, tracked
from value_aware_attention.files import load_json
from value_aware_attention.hugging_face import own_kernel
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.head_budgets import SINKS_AND_WINDOW, WINDOW
from value_aware_attention.measurement.measure import Method
from value_aware_attention.measurement.windows import metric_of
from value_aware_attention.models.checkpoints import checkpoint_files
from value_aware_attention.models.gguf_files import bits_a_weight
from value_aware_attention.probe import loaded, probe
from value_aware_study.evaluation.explorer import exploration
from value_aware_study.evaluation.grid import setting
from value_aware_study.report.contents import write_probe
from value_aware_study.report.page import earlier_files


def probed(
    cfg: DictConfig,
    checkpoint: str,
    texts: Sequence[str],
    *,
    name: str,
    folder: Path,
    description: str = "",
) -> dict[str, object]:
    """Measures a checkpoint, writes the record and its page into the folder, returns a row.

    Raises ValueError, before it measures, if the folder holds the page of another checkpoint.
    """
    model, tokenizer = loaded(checkpoint, tokenizer=cfg.tokenizer, dtype=cfg.dtype)
    hashes = {"checkpoint": file_hash(checkpoint_files(checkpoint))}
    check_earlier(folder, name, model, hashes)
    kernels, post_hoc = [built_kernel(option) for option in cfg.kernels], kernel(cfg, model)
    if cfg.caches and post_hoc is not None:
        raise ValueError("caches=true measures the model's own kernel: leave out kernel, or caches")
    same = ("windows", "length", "rows", "search", "sizes", "between", "skewness_gap", "control",
            "seed", "draw", "cache", "caches")  # fmt: skip
    measured = methods(cfg, metric_of(model))
    with tracked(cfg, "probe", name) as run:
        report = probe(
            model, tokenizer, texts, kernel=post_hoc, methods=measured, kernels=kernels,
            name=name, show=print, **{option: cfg[option] for option in same},
        )  # fmt: skip
        record = replace(
            report.record, text=replace(report.record.text, description=description),
            hashes=hashes, bits_a_weight=bits_a_weight(cfg.model or cfg.pretrained.weights),
        )  # fmt: skip
        write_probe(
            record,
            folder,
            report.caches,
            exploration(name, model, tokenizer, texts, kernel=post_hoc),
        )
        log_record(run, report.record)
    print(f"\n{report.headline}\n{folder / 'index.html'}")
    return {"model": name, **report.keys_needed()}


def check_earlier(
    folder: Path, name: str, model: PreTrainedModel, hashes: Mapping[str, str]
) -> None:
    """Raises ValueError if the folder holds other files or another model's record.

    A record from before checkpoints were hashed is this model's if name and architecture are equal.
    """
    earlier_files(folder)
    if not (file := folder / "record.json").exists():
        return
    remedy = f"give probe.name=<another name>, or remove {folder}"
    earlier = load_json(file, "hashes", "model", "architecture", remedy=remedy)
    measured = {"hashes": hashes, "model": name, "architecture": type(model).__name__}
    compared = ("hashes",) if earlier["hashes"] else ("model", "architecture")
    if any(earlier[key] != measured[key] for key in compared):
        raise ValueError(f"{folder} holds {earlier['model']} of another checkpoint: {remedy}")


def built_kernel(option: DictConfig) -> Kernel:
    """Builds the kernel of a config; ValueError if its `_target_` makes none."""
    if not isinstance((built := instantiate(option)), Kernel):
        raise ValueError(
            f"{option._target_} makes no kernel; value_aware_attention.kernels has Elu and others"
        )
    return built


def kernel(cfg: DictConfig, model: PreTrainedModel) -> Kernel | None:
    """Returns the requested kernel, with a warning; None if it is the model's own."""
    if cfg.kernel is None:
        return None
    asked, trained = built_kernel(cfg.kernel.function), own_kernel(model)
    if asked == trained:
        return None
    print(
        f"warning: the model was trained with {trained}, not {asked}: what follows is post hoc",
        file=sys.stderr,
    )
    return asked


def methods(cfg: DictConfig, metric: str) -> Mapping[str, Method]:
    """Returns each configured approximation as a function of the number of keys and the layer.

    There are two windows; a causal model (its metric is a perplexity) gets the one with first
    tokens.
    """

    def build(name: str, r: int, layer: int) -> nn.Module:
        option = plain(cfg.methods[name]) | {"r": r}
        if "sinks" in option:
            option["sinks"] = min(option["sinks"], r - 1)
        return setting(name, option).build(layer)

    left_out = WINDOW if metric == "perplexity" else SINKS_AND_WINDOW
    return {name: partial(build, name) for name in cfg.methods if name != left_out}
