"""Finds saved models and tokenizers, locally or on the hub, and checks their files."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

from huggingface_hub import constants, get_session
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedTokenizerFast

from value_aware_attention.files import check_checksums, load_json, reading
from value_aware_attention.named_models import resolved

SECONDS_TO_ANSWER = 6
PACKAGE_PREFIX = "package:"
"""Prefix of names of files and folders in installed packages"""
GGUF = ".gguf"
"""Suffix of llama.cpp's files, which hold a model and its tokenizer"""
OTHER_PART = re.compile(r"mmproj|-(?!0*1-)\d+-of-\d+\.", re.IGNORECASE)
"""Matches names of files with an image encoder or a later part of a model"""


def installed(name: str | Path) -> str | Path:
    """Resolves a named model, and `package:NAME/PATH` to a path in a package; keeps other names.

    The package is not imported. Raises FileNotFoundError if the package or path does not exist, and
    what `named_models.resolved` raises.
    """
    if not str(name).startswith(PACKAGE_PREFIX):
        return resolved(name)
    package, _, inner = str(name).removeprefix(PACKAGE_PREFIX).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    folders = spec.submodule_search_locations if spec else None
    if not folders or not (path := Path(folders[0], inner)).exists():
        raise FileNotFoundError(f"{name}: no such package, or no such path in it, is installed")
    return str(path)


def short_name(name: str | Path) -> str:
    """Returns the last part of a path or hub name, or the package of `package:NAME/PATH`."""
    if str(name).startswith(PACKAGE_PREFIX):
        return str(name).removeprefix(PACKAGE_PREFIX).partition("/")[0]
    return Path(name).resolve().name


def local_folder(name: str | Path) -> Path | None:
    """Returns the local folder of a name; None for a name on the hub, such as gpt2 or org/model.

    Raises FileNotFoundError for a path to a missing folder.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if str(name).startswith((".", "/", "~")) or len(folder.parts) > 2:
        raise FileNotFoundError(f"{name}: no such folder")
    return None


def gguf_file(name: str | Path) -> Path | None:
    """Returns the GGUF file of that name, or the only one in a folder without other weights.

    Image encoders and later parts of a model are not counted. Raises FileNotFoundError if the file
    is missing, ValueError if a folder has several.
    """
    path = Path(name)
    if path.suffix.lower() == GGUF:
        if not path.is_file():
            raise FileNotFoundError(f"{name}: no such file")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = [
        file
        for file in sorted(path.iterdir())
        if file.suffix.lower() == GGUF and not OTHER_PART.search(file.name)
    ]
    if len(files) > 1:
        raise ValueError(f"{name} has {len(files)} GGUF files: give one, such as {files[0]}")
    return files[0] if files else None


def only_local(name: str | Path) -> bool:
    """Returns whether to read only local files: for a folder, or if the hub does not answer."""
    return local_folder(name) is not None or not hub_answers()


def hub_answers() -> bool:
    """Returns within SECONDS_TO_ANSWER whether the hub is reachable; its client tries longer."""
    return _answers(constants.ENDPOINT)


@cache
def _answers(endpoint: str) -> bool:
    answered = Event()

    def ask() -> None:
        with suppress(Exception):  # the errors depend on the hub's HTTP client, which has changed
            get_session().head(endpoint, timeout=SECONDS_TO_ANSWER)
            answered.set()

    thread = Thread(target=ask, daemon=True)  # no timeout applies to resolving a host name
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return answered.is_set()


def why_not(name: str | Path, error: Exception) -> str:
    """Explains in one line why a model or tokenizer was not loaded, and what names are possible."""
    if Path(name).exists() or not only_local(name):
        return str(error).strip().splitlines()[0]
    return (
        f"{name} is no local folder, nor in the hub's cache here, and {constants.ENDPOINT} does "
        f"not answer (no network?): give a local folder"
    )


BUFFERS = (".masked_bias", ".attn.bias", ".attention.bias", ".inv_freq", ".causal_mask")
"""Suffixes of buffers that older layers saved with their weights: masks and frequencies"""


def check_files(folder: Path, remedy: str = "make it again") -> None:
    """Refuses a saved model or tokenizer whose files are damaged or have changed.

    Reads JSON files and the headers of the weights, and all bytes if the folder has checksums.
    Raises ValueError with the file's name and the remedy, also for an index with files outside the
    folder.
    """
    for index in sorted(folder.glob("*.safetensors.index.json")):
        with reading(index, remedy):
            for file in load_json(index, "weight_map")["weight_map"].values():
                if Path(file).is_absolute() or ".." in Path(file).parts:
                    raise ValueError(f"{index} names {file}, which lies outside its folder")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            load_json(folder / name, remedy=remedy)
    for file in sorted(folder.glob("*.safetensors")):
        with reading(file, remedy), safe_open(file, "pt"):
            pass
    check_checksums(folder, remedy)


@contextmanager
def without_report() -> Iterator[None]:
    """Silences transformers' table of missing and unused weights; `check_weights` checks them."""
    log = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def check_weights(
    name: str | Path, model: nn.Module, report: Mapping[str, Any], *, drawn: Collection[str] = ()
) -> None:
    """Raises ValueError for missing weights, drawn at random, and for layers that the config lacks.

    `report` is transformers' loading report. Modules named in `drawn` may lack weights. A
    checkpoint may have a head that the model lacks, and buffers of older versions.
    """
    if missing := [key for key in report["missing_keys"] if not {*key.split(".")} & {*drawn}]:
        raise ValueError(f"{name} lacks weights of its config: {_some(missing)}: give a whole one")
    if other := [
        f"{key} ({list(has)}, not {list(to_be)})" for key, has, to_be in report["mismatched_keys"]
    ]:
        raise ValueError(f"{name} has weights of other sizes than its config: {_some(other)}")
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if unused := [key for key in report["unexpected_keys"] if _is_in_layers(key, lists)]:
        raise ValueError(f"{name} has weights that its config has no place for: {_some(unused)}")


def _is_in_layers(key: str, lists: Sequence[str]) -> bool:
    """Returns whether a weight belongs to a layer, with any model prefix in its name."""
    above = re.split(r"\.\d+\.", key)[0]
    ours = any(
        a.endswith(b) or b.endswith(a) for a, b in [(f".{above}", f".{layers}") for layers in lists]
    )
    return ours and above != key and not key.endswith(BUFFERS)


def _some(keys: Collection[str]) -> str:
    """Lists the first three keys and counts the others."""
    first = sorted(keys)[:3]
    more = len(keys) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def saved_tokenizer(folder: Path | str, remedy: str = "make it again") -> PreTrainedTokenizerFast:
    """Loads the tokenizer saved in a folder; ValueError names a damaged file."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: {remedy}")
    check_files(file.parent, remedy)
    with reading(file, remedy):
        return PreTrainedTokenizerFast.from_pretrained(file.parent)
