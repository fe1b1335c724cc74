"""What value-aware-probe does once its options are read."""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from value_aware_attention.files import reading, write_text
from value_aware_attention.measurement.record import Record
from value_aware_attention.measurement.terminal import cache_table, side_by_side
from value_aware_attention.models.checkpoints import load_model, load_tokenizer
from value_aware_attention.probe import estimate, probe, probe_caches
from value_aware_attention.texts import read_texts


def run(given: Namespace) -> None:
    """Prints the report of each model, and a table of all where there are several.

    Raises ValueError for arguments that do not fit together, before a model is loaded.
    """
    disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; ours is one line
    measured = [one for one in given.models if not one.endswith(".json") or Path(one).is_dir()]
    if measured and not given.text:
        raise ValueError(f"--text is missing; {measured[0]} is measured on the text of a file")
    if given.json is not None and (len(given.models) != 1 or not measured or given.estimate):
        found = "an estimate" if given.estimate else f"{len(measured)} of {len(given.models)}"
        raise ValueError(f"--json keeps the record of one model that is measured, not {found}")
    if given.json is not None and (
        Path(given.json).is_dir() or not Path(given.json).parent.is_dir()
    ):
        raise ValueError(f"--json is {given.json}; give a file in a folder that is there")
    read = {
        one: earlier(one) for one in given.models if one not in measured
    }  # first, as it is fast
    texts = texts_of(given) if measured else []
    records = [read[one] if one in read else probed(one, texts, given) for one in given.models]
    if not given.estimate and (len(records) > 1 or not measured):
        print("", *side_by_side([one for one in records if one]), sep="\n")


def earlier(file: str) -> Record:
    """Reads the record of an earlier probe. Raises ValueError for a file without one."""
    with reading(Path(file), "probe the model again"):
        record = Record.from_json(Path(file).read_text("utf-8"), file)
    if not (record.attention and record.attention[0].output_error.keys_needed):
        raise ValueError(f"{file} has no measured layers; give the record of a probe")
    return record


def texts_of(given: Namespace) -> list[str]:
    """Reads the texts, once the folder that is to keep numbers is there; ValueError for neither."""
    try:
        Path(given.cache or ".").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--cache is {given.cache}; give a folder that can be made ({error.strerror})"
        ) from None
    try:
        return list(read_texts(given.text, show=print))
    except (OSError, ValueError) as error:
        raise ValueError(f"--text is {given.text}; {error}") from None


def probed(name: str, texts: list[str], given: Namespace) -> Record | None:
    """Measures a model and prints its report; None for an estimate alone."""
    model = load_model(name, dtype=given.dtype and getattr(torch, given.dtype))
    tokenizer = load_tokenizer(given.tokenizer or name)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    short = Path(name).resolve().name
    windows: Any = {"windows": given.windows, "length": given.length}
    options: Any = windows | {
        "rows": given.rows, "search": given.search, "sizes": given.sizes,
        "control": not given.no_control,
    }  # fmt: skip
    if given.estimate:
        print(f"{short}: {estimate(model, tokenizer, texts, **options)}")
        return None
    print(short)
    kept: Any = {"name": short, "seed": given.seed}
    caches = None
    if given.caches:  # first, as it refuses short windows
        estimate(model, tokenizer, texts, **options)  # refuses what the probe would refuse later
        caches = probe_caches(model, tokenizer, texts, **windows, **kept, progress=True)
    report = probe(model, tokenizer, texts, **options, **kept, cache=given.cache, show=print)
    if caches:
        print("", *cache_table(caches), sep="\n")
    print(f"\n{report.headline}")
    if given.json:
        write_text(given.json, report.record.to_json())
    return report.record
