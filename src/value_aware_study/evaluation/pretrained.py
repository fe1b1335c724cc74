"""Measures a pretrained decoder: a grid, parts of its layers, and a control of random weights."""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from torch import nn
from transformers.utils.logging import disable_progress_bar

from value_aware_attention.approximations import Exact
from value_aware_attention.files import checksum, new_folder
from value_aware_attention.hugging_face.saved import gguf_file, installed
from value_aware_attention.measurement import LayerOptions, Record, Setting, Task, measure
from value_aware_attention.measurement.control import ZeroOutput, control
from value_aware_attention.measurement.layers import search_gap
from value_aware_attention.models.checkpoints import load_model, load_tokenizer
from value_aware_attention.records.matching import SLOT
from value_aware_attention.records.record import AWARE, OBLIVIOUS, WITH_MEAN
from value_aware_study.data.text import HUB, documents

DEFAULT = "docstrings"
"""Name of the default text, that of the cards"""
CONTROLLED = (4, 16)
"""Numbers of keys that are measured in all layers with random weights"""
ZERO = "zero_output"
"""Record's name of attention switched off"""
GAP_SIZES = (2, 3)
"""Numbers of keys for comparing the search with the best one, on the first window"""
CONTROL_TEXTS = 4
"""Windows for measuring random weights"""


def packaged_model(card: Mapping[str, Any], cache: Path | str) -> str:
    """Returns the folder of a card's model, or its name on the hub.

    A GGUF file is dequantised once, into a folder of `cache` with its sha256 in the name. Raises
    what `load_model` raises.
    """
    weights = weights_of(card)
    if not (file := gguf_file(weights)):
        return weights
    # 2: the tokenizers of earlier folders split blanks differently
    if not (folder := Path(cache) / f"{file.stem}-{checksum(file)[:12]}-2").exists():
        disable_progress_bar()
        with new_folder(folder) as partial:
            load_model(weights).save_pretrained(partial)
            load_tokenizer(weights).save_pretrained(partial)
    return str(folder)


def weights_of(card: Mapping[str, Any]) -> str:
    """Returns the folder or file of a card's weights, or their name on the hub."""
    return str(installed(card["weights"]))


def texts_of(text: str | None, card: Mapping[str, Any]) -> list[str]:
    """Reads the texts of a user's source as `documents` does; without one, those of a card."""
    sources = [documents(text)] if text else map(instantiate, card["texts"].values())
    return [document.text for source in sources for document in source]


def named_text(cfg: Any, sha256: str, default: str) -> tuple[str, str]:
    """Returns the text's name for files, and its description, from an app's config.

    A user's text without a `text_name` is named by its file and the first digits of `sha256`, that
    of its content; `default` describes the text of the cards. Raises ValueError for another text
    under the default's name, and for the default text under another name or description.
    """
    source = (cfg.text or DEFAULT).rstrip("/").removesuffix(".gz")
    stem = re.sub(r"[^\w.+-]+", "_", source if source.startswith(HUB) else Path(source).stem)
    name = cfg.text_name or "-".join(filter(None, (stem, sha256[:8])))
    if (name.casefold().partition("-")[0] == DEFAULT) == bool(cfg.text or cfg.description):
        raise ValueError(
            f"text is {cfg.text}, text_name {name}: {DEFAULT} is the name of the default text; a "
            f"text of yours has another one, and it alone (text=FILE) has a name or description"
        )
    return name, cfg.description or (f"{name}, a text of the user" if cfg.text else default)


def in_parts(
    settings: Sequence[Setting], parts: Mapping[str, Sequence[int]], sizes: Sequence[int]
) -> Iterator[Setting]:
    """Yields both optimal choices at `sizes` in one part of the layers; the others stay exact.

    A part is (first layer, layer after the last).
    """
    for setting in settings:
        if setting.approximation in (OBLIVIOUS, AWARE) and setting.parameters["r"] in sizes:
            for name, (first, end) in parts.items():
                yield replace(
                    setting,
                    parameters={**setting.parameters, "layers": name},
                    build=partial(_in_part, setting, range(first, end)),
                )


def _in_part(setting: Setting, layers: range, layer: int) -> nn.Module:
    return setting.build(layer) if layer in layers else Exact()


def measure_pretrained(
    task: Task, settings: Sequence[Setting], *, rows: int, search: str,
    random_seeds: Sequence[int], **options: Any,
) -> Record:  # fmt: skip
    """Measures settings, attention switched off, the layers, and random weights of each seed.

    In the layers, `rows` queries of each head and window are measured (0 = none). Random weights
    are measured on the first windows, with the settings of few keys. `options` are `measure`'s.
    """
    settings = [*settings, Setting(ZERO, {}, lambda layer: ZeroOutput())]
    layers = (
        LayerOptions(rows, search, between=False, skewness_gap=False, slots=True) if rows else None
    )
    whole = [setting for setting in settings if "layers" not in setting.parameters]
    record = measure(task, whole, layers=layers, **options)
    alone = measure(
        task,
        [setting for setting in settings if setting not in whole],
        layers=None,
        cell_errors=False,
        **options,
    )
    record = replace(record, cells=(*record.cells, *alone.cells[1:]))
    few = [
        setting
        for setting in whole
        if setting.approximation in (OBLIVIOUS, AWARE, WITH_MEAN, SLOT, ZERO)
        if setting.parameters.get("r", CONTROLLED[0]) in CONTROLLED
    ]
    beside = copy(task)
    beside.texts = task.texts[:CONTROL_TEXTS]
    options["weights"] = None  # random weights are not the stored ones
    alike = partial(measure, methods=few, layers=layers, cell_errors=False, **options)
    controls = [control(beside, alike, seed) for seed in random_seeds]
    gaps = [search_gap(task.layer_calls(), r, search, rows) for r in GAP_SIZES if rows]
    return replace(record, controls=tuple(filter(None, controls)), search_gaps=tuple(gaps))
