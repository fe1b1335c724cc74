"""Probes a loaded model and writes its page: what the apps probe and pretrained share."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipelines.app.checkpoint import file_hash
from pipelines.app.hydra_app import plain
from pipelines.app.tracking import log_record, tracked
from value_aware_attention.files import load_json
from value_aware_attention.hugging_face import own_kernel
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.terminal import cache_table
from value_aware_attention.models.checkpoints import checkpoint_files
from value_aware_attention.probe import probe, probe_caches
from value_aware_study.evaluation.explorer import exploration
from value_aware_study.evaluation.grid import setting
from value_aware_study.report.contents import write_probe
from value_aware_study.report.page import earlier_files


def probed(
    cfg: DictConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    checkpoint: str,
    name: str,
    folder: Path,
    description: str = "",
    named_by: str = "probe.name",
) -> dict[str, Any]:
    """Measures a loaded model, writes the record and its page into the folder, returns a row.

    Raises ValueError, before it measures, where the folder holds the page of another checkpoint;
    `named_by` is the key that gives it another name.
    """
    hashes = {"checkpoint": file_hash(checkpoint_files(checkpoint))}
    check_earlier(folder, name, model, hashes, named_by)
    kernels, own = [built_kernel(one) for one in cfg.kernels], kernel(cfg, model)
    if cfg.caches and own is not None:
        raise ValueError("caches=true measures the model's own kernel: leave out kernel, or caches")
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    with tracked(cfg, "probe", name) as run:
        caches = None
        if cfg.caches:  # first, as it refuses short windows
            caches = probe_caches(
                model, tokenizer, texts, windows=cfg.windows, length=cfg.length, seed=cfg.seed,
                draw=cfg.draw, name=name, progress=True,
            )  # fmt: skip
        report = probe(
            model, tokenizer, texts, windows=cfg.windows, length=cfg.length, rows=cfg.rows,
            search=cfg.search, sizes=cfg.sizes, kernel=own, methods=methods(cfg),
            kernels=kernels, between=cfg.between,
            skewness_gap=cfg.skewness_gap, control=cfg.control,
            seed=cfg.seed, draw=cfg.draw, name=name, cache=cfg.cache, show=print,
        )  # fmt: skip
        if caches:
            print("", *cache_table(caches), sep="\n")
        text = replace(report.record.text, description=description)
        record = replace(report.record, text=text, hashes=hashes)
        explored = exploration(name, model, tokenizer, texts, kernel=own)
        write_probe(record, folder, caches, explored)
        log_record(run, report.record)
    print(f"\n{report.headline}\n{folder / 'index.html'}")
    return {"model": name, **report.keys_needed()}


def check_earlier(
    folder: Path, name: str, model: PreTrainedModel, hashes: Mapping[str, str], named_by: str
) -> None:
    """Raises ValueError where the folder holds files of somebody else, or another model's record.

    A record from before checkpoints were hashed is this model's if name and architecture are equal.
    """
    earlier_files(folder)
    file = folder / "record.json"
    if not file.exists():
        return
    remedy = f"give {named_by}=<another name>, or remove {folder}"
    earlier = load_json(file, "hashes", "model", "architecture", remedy=remedy)
    given = {"hashes": hashes, "model": name, "architecture": type(model).__name__}
    compared = ("hashes",) if earlier["hashes"] else ("model", "architecture")
    if any(earlier[key] != given[key] for key in compared):
        raise ValueError(f"{folder} holds {earlier['model']} of another checkpoint: {remedy}")


def built_kernel(option: DictConfig) -> Kernel:
    """Builds the kernel of a config; ValueError where its `_target_` makes none."""
    built = instantiate(option)
    if not isinstance(built, Kernel):
        raise ValueError(
            f"{option._target_} makes no kernel; value_aware_attention.kernels has Elu and others"
        )
    return built


def kernel(cfg: DictConfig, model: PreTrainedModel) -> Kernel | None:
    """Returns the kernel asked for, with a warning; None where it is the model's own."""
    if cfg.kernel is None:
        return None
    asked, own = built_kernel(cfg.kernel.function), own_kernel(model)
    if asked == own:
        return None
    print(
        f"warning: the model was trained with {own}, not {asked}: what follows is post hoc",
        file=sys.stderr,
    )
    return asked


def methods(cfg: DictConfig) -> Mapping[str, Any]:
    """Returns each configured approximation as a function of the number of keys and the layer."""

    def build(name: str, r: int, layer: int) -> nn.Module:
        return setting(name, {**plain(cfg.methods[name]), "r": r}).build(layer)

    return {name: partial(build, name) for name in cfg.methods}
