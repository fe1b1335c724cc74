"""How many keys the attention of a trained model needs, on a text: any language model or encoder.

python -m pipelines.probe model=PATH_OR_NAME text=FILE [probe.search=fast] [probe.windows=16] \\
    [probe.length=256] [kernel=elu] [tokenizer=FOLDER]

Writes outputs/probe/<name>/, which no stage of dvc.yaml reads.
"""

import logging
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
from transformers.utils.logging import disable_progress_bar

from pipelines.app import app, plain
from pipelines.evaluate import setting
from pipelines.provenance import file_hash
from pipelines.start import written_out
from pipelines.tracking import log_record, tracked
from value_aware_attention.hugging_face import own_kernel
from value_aware_attention.hugging_face.checkpoints import (
    checkpoint_files,
    load_model,
    load_tokenizer,
)
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.cache_record import CacheRecord
from value_aware_attention.probe import probe, probe_caches
from value_aware_attention.storage import read_json
from value_aware_study.data.text_files import TextFiles
from value_aware_study.paths import inside
from value_aware_study.report.contents import write_probe
from value_aware_study.report.page import earlier_files


@app("probe")
def run(cfg: DictConfig) -> dict[str, Any]:
    """Writes <results>/<name>/, and returns a row for a multirun's table."""
    disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; ours is one line
    name = cfg.name or Path(cfg.model).resolve().name
    if not name:
        raise ValueError(f"model is {cfg.model}; its folder has no name: give probe.name=<name>")
    folder = inside(cfg.results, name)
    texts = [document.text for document in TextFiles(cfg.text)]
    tokenizer = load_tokenizer(cfg.tokenizer or cfg.model)
    model = load_model(cfg.model, dtype=precision(cfg.dtype))
    return probed(cfg, model, tokenizer, texts, checkpoint=cfg.model, name=name, folder=folder)


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
    """Measures a loaded model, and writes what was found into the folder.

    Raises ValueError, before it measures, where the folder holds what another checkpoint gave.
    """
    hashes = {"checkpoint": file_hash(checkpoint_files(checkpoint))}
    check_earlier(folder, name, model, hashes, named_by)
    kernels = [built_kernel(one) for one in cfg.kernels]
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    with tracked(cfg, "probe", name) as run:
        caches = caches_of(cfg, model, tokenizer, texts, name)
        report = probe(
            model, tokenizer, texts, windows=cfg.windows, length=cfg.length, rows=cfg.rows,
            search=cfg.search, sizes=cfg.sizes, kernel=kernel(cfg, model), methods=methods(cfg),
            kernels=kernels, between=cfg.between,
            skewness_gap=cfg.skewness_gap,
            seed=cfg.seed, draw=cfg.draw, name=name, cache=cfg.cache, show=print,
        )  # fmt: skip
        text = replace(report.record.text, description=description)
        write_probe(replace(report.record, text=text, hashes=hashes), folder, caches)
        log_record(run, report.record)
    print(f"\n{report.headline}\n{folder / 'index.html'}")
    return {"model": name, **report.keys_needed()}


def check_earlier(
    folder: Path, name: str, model: PreTrainedModel, hashes: Mapping[str, str], named_by: str
) -> None:
    """Raises ValueError where the folder's page is of somebody else, its record of another model.

    A record of before, without a hash, is of this one where model and architecture are the same.
    """
    earlier_files(folder)
    file = folder / "record.json"
    if not file.exists():
        return
    remedy = f"give {named_by}=<another name>, or remove {folder}"
    earlier = read_json(file, "hashes", "model", "architecture", remedy=remedy)
    given = {"hashes": hashes, "model": name, "architecture": type(model).__name__}
    compared = ("hashes",) if earlier["hashes"] else ("model", "architecture")
    if any(earlier[key] != given[key] for key in compared):
        raise ValueError(f"{folder} holds {earlier['model']} of another checkpoint: {remedy}")


def built_kernel(option: DictConfig) -> Kernel:
    """The kernel that a `_target_` makes; ValueError where it makes none."""
    built = instantiate(option)
    if not isinstance(built, Kernel):
        raise ValueError(
            f"{option._target_} makes no kernel; value_aware_attention.kernels has Elu and others"
        )
    return built


def caches_of(
    cfg: DictConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    name: str,
) -> CacheRecord | None:
    """What cache methods lose on the same windows, where that is asked for."""
    if not cfg.caches:
        return None
    return probe_caches(
        model, tokenizer, texts, windows=cfg.windows, length=cfg.length, seed=cfg.seed,
        draw=cfg.draw, name=name, progress=True,
    )  # fmt: skip


def precision(name: str | None) -> torch.dtype | None:
    """torch's dtype of that name; None is None."""
    allowed = ("float32", "bfloat16", "float16")
    if name is not None and name not in allowed:
        raise ValueError(f"dtype is {name}; it must be one of {', '.join(allowed)}, or null")
    return None if name is None else getattr(torch, name)


def kernel(cfg: DictConfig, model: PreTrainedModel) -> Kernel | None:
    """The kernel asked for, with a warning; None where it is the model's own."""
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
    """Every configured approximation as a function of the number of keys and the layer."""

    def build(name: str, r: int, layer: int) -> nn.Module:
        return setting(name, {**plain(cfg.methods[name]), "r": r}).build(layer)

    return {name: partial(build, name) for name in cfg.methods}


def main() -> None:
    """The app, with the short arguments written out."""
    sys.argv[1:] = written_out("probe", sys.argv[1:])
    run()


if __name__ == "__main__":
    main()
