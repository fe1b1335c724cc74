"""Stage evaluate_pretrained: a pretrained decoder on a text, over a grid of approximations.

A small cut, as in `dvc repro`:  python -m pipelines.evaluate_pretrained
The whole, on a text of yours:   python -m pipelines.evaluate_pretrained extent=tokens_512 \\
                                     text=FILE text_name=NAME 'description=TITLE, LICENCE'
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from pipelines.app import app, file_hash, own_values, plain
from value_aware_study.data.text import HUB

if TYPE_CHECKING:  # they import torch
    from value_aware_attention.measurement import Task
    from value_aware_attention.measurement.windows import TextWindows

FEWEST_WINDOWS = 4


@app("evaluate_pretrained", short=("text", "text_name", "description", "search"))
def main(cfg: DictConfig) -> None:
    """Writes <records>/<name>-<text>[-<own values>]-<extent>.json."""
    from pipelines.app import evaluating, tracking
    from value_aware_attention.call import chunked, max_elements_within
    from value_aware_attention.files import save_json
    from value_aware_attention.models.checkpoints import checkpoint_files
    from value_aware_attention.models.gguf_files import bits_a_weight
    from value_aware_attention.texts import text_paths
    from value_aware_study.evaluation.grid import grid
    from value_aware_study.evaluation.pretrained import (
        in_parts,
        measure_pretrained,
        named_text,
        weights_of,
    )  # fmt: skip
    from value_aware_study.safe_text import inside

    extent = plain(cfg.extent)
    hashes = {"checkpoint": file_hash(checkpoint_files(weights_of(cfg.model)))}
    if cfg.text and not cfg.text.startswith(HUB):
        hashes["text"] = file_hash(text_paths(Path(cfg.text)))
    text, description = named_text(cfg, hashes.get("text", ""), cfg.model.description)
    file = inside(
        cfg.records,
        f"{cfg.model.name}-{text}{own_values(cfg, 'evaluate_pretrained')}-{extent['name']}",
        ".json",
    )
    with chunked(max_elements_within(cfg.memory_gib)):
        task, read = windows(cfg, extent["length"], extent["windows"])
        settings = grid(plain(cfg.methods), plain(cfg.axes), extent["length"])
        alone = in_parts(settings, plain(cfg.model.parts), extent["parts_keys"])
        with evaluating.tracked_by_first(cfg, "evaluate_pretrained", hashes, text) as run:
            record = measure_pretrained(
                task, [*settings, *alone], rows=extent["rows"], search=cfg.search,
                random_seeds=extent["random_seeds"], name=cfg.name, cache=cfg.cache,
                description=description, weights=hashes["checkpoint"],
            )  # fmt: skip
            record = replace(
                record, scale=cfg.scale, hashes=hashes, text=read.described(record.text),
                bits_a_weight=bits_a_weight(cfg.model.weights),
            )  # fmt: skip
            save_json(file, record.to_json())
            tracking.log_record(run, record)
    print(file)


def windows(cfg: DictConfig, length: int, most: int) -> "tuple[Task, TextWindows]":
    """Loads the model on windows of the text. Raises ValueError for too few of them."""
    from value_aware_attention.probe import loaded, window_task
    from value_aware_study.evaluation.pretrained import packaged_model, texts_of

    texts = texts_of(cfg.text, cfg.model)
    model, tokenizer = loaded(packaged_model(cfg.model, cfg.cache))
    task, read = window_task(
        model, tokenizer, texts,
        windows=most, length=length, seed=0, context=length // 2,
    )  # fmt: skip
    if len(read) < FEWEST_WINDOWS:
        raise ValueError(
            f"the text fills {len(read)} windows of {length} tokens; {FEWEST_WINDOWS} are needed "
            f"for an interval: give a longer text, or shorter windows (extent.length)"
        )
    return task, read


if __name__ == "__main__":
    main()
