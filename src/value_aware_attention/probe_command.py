"""The probe as a command of its own: value-aware-probe MODEL --text FILE."""

import logging
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from value_aware_attention.approximations.closest_combination import SEARCHES
from value_aware_attention.files import reading, write_text
from value_aware_attention.measurement.record import Record
from value_aware_attention.measurement.terminal import cache_table, side_by_side
from value_aware_attention.models.checkpoints import load_model, load_tokenizer
from value_aware_attention.probe import estimate, probe, probe_caches

EPILOG = """
examples:
  value-aware-probe sentence-transformers/all-MiniLM-L6-v2 --text notes.txt
  value-aware-probe ./my-llama --text notes.txt --search fast --json llama.json
  value-aware-probe llama.json other.json          two models side by side, nothing is measured

Keys chosen by weight and value-aware keys look at exact attention: they say what a method could
reach. Only safetensors are read, and no code of a model's folder is run.
"""


DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    """Reads the command line, measures or reads every model, and prints tables.

    Ends with one line where a model or text does not fit.
    """
    arguments = parser().parse_args()
    disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; ours is one line
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def parser() -> ArgumentParser:
    """Describes the options."""
    made = ArgumentParser(
        prog="value-aware-probe",
        description="How many keys does each layer and head of a model need on a text?",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "models", nargs="+", metavar="MODEL",
        help="a folder, a name on the Hugging Face hub, or a record (.json) of an earlier probe",
    )  # fmt: skip
    made.add_argument("--text", metavar="FILE", help="a text file in UTF-8")
    made.add_argument("--tokenizer", metavar="FOLDER", help="where the model's own has none")
    made.add_argument("--windows", type=int, default=8, help="of the text, evenly spaced (8)")
    made.add_argument("--length", type=int, help="tokens of a window (512, or all positions)")
    made.add_argument("--rows", type=int, default=32, help="queries of a head and window (32)")
    made.add_argument("--search", choices=SEARCHES, default="default", help="of value-aware keys")
    made.add_argument("--sizes", type=int, nargs="+", help="numbers of keys (1, 2, 4, ...)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--dtype", choices=DTYPES, help="of the weights (the checkpoint's own)")
    made.add_argument("--no-control", action="store_true", help="leave out random weights")
    made.add_argument("--caches", action="store_true", help="also methods that compress a cache")
    made.add_argument("--estimate", action="store_true", help="print time and memory, and stop")
    made.add_argument("--cache", metavar="FOLDER", help="keeps numbers: a stopped probe goes on")
    made.add_argument("--json", metavar="FILE", help="write the record of the one model there")
    return made


def run(given: Namespace) -> None:
    """Prints the report of each model, and a table of all where there are several.

    Raises ValueError for arguments that do not fit together, before a model is loaded.
    """
    measured = [one for one in given.models if not one.endswith(".json")]
    if measured and given.text is None:
        raise ValueError(f"--text is missing; {measured[0]} is measured on the text of a file")
    if given.json and (len(given.models) != 1 or not measured or given.estimate):
        found = "an estimate" if given.estimate else f"{len(measured)} of {len(given.models)}"
        raise ValueError(f"--json keeps the record of one model that is measured, not {found}")
    if given.json and (Path(given.json).is_dir() or not Path(given.json).parent.is_dir()):
        raise ValueError(f"--json is {given.json}; give a file in a folder that is there")
    read = {
        one: earlier(one) for one in given.models if one not in measured
    }  # first, as it is fast
    records = [read[one] if one in read else probed(one, given) for one in given.models]
    if not given.estimate and (len(records) > 1 or not measured):
        print("", *side_by_side([one for one in records if one]), sep="\n")


def earlier(file: str) -> Record:
    """Reads the record of an earlier probe. Raises ValueError for a file without one."""
    with reading(Path(file), "probe the model again"):
        record = Record.from_json(Path(file).read_text("utf-8"), file)
    if not (record.attention and record.attention[0].output_error.keys_needed):
        raise ValueError(f"{file} has no measured layers; give the record of a probe")
    return record


def probed(name: str, given: Namespace) -> Record | None:
    """Measures a model and prints its report; None for an estimate alone."""
    with reading(Path(given.text), "give a text file in UTF-8"):
        text = Path(given.text).read_text("utf-8-sig")
    dtype = getattr(torch, given.dtype) if given.dtype else None
    model, tokenizer = load_model(name, dtype=dtype), load_tokenizer(given.tokenizer or name)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    short = Path(name).resolve().name
    windows: Any = {"windows": given.windows, "length": given.length}
    options: Any = windows | {
        "rows": given.rows, "search": given.search, "sizes": given.sizes,
        "control": not given.no_control,
    }  # fmt: skip
    if given.estimate:
        print(f"{short}: {estimate(model, tokenizer, text, **options)}")
        return None
    print(short)
    kept: Any = {"name": short, "seed": given.seed}
    caches = None
    if given.caches:  # first, as it refuses short windows
        estimate(model, tokenizer, text, **options)  # refuses what the probe would refuse later
        caches = probe_caches(model, tokenizer, text, **windows, **kept, progress=True)
    report = probe(model, tokenizer, text, **options, **kept, cache=given.cache, show=print)
    if caches:
        print("", *cache_table(caches), sep="\n")
    print(f"\n{report.headline}")
    if given.json:
        write_text(given.json, report.record.to_json())
    return report.record
