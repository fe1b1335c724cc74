"""Checks that the files of saved models and tokenizers are whole and as they were written.

No model is imported, so that reading a tokenizer depends on no model's code.
"""

from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from value_aware_attention.files import check_checksums, load_json, reading

DESCRIPTIONS = ("config.json", "tokenizer.json", "tokenizer_config.json")


def check_files(folder: Path, remedy: str = "make it again") -> None:
    """Refuses a saved model or tokenizer whose files are damaged or have changed.

    JSON and the headers of the weights are read, and all bytes where the folder has checksums.
    Raises ValueError with the file's name and the remedy, also for an index that names files
    outside the folder.
    """
    for index in sorted(folder.glob("*.safetensors.index.json")):
        with reading(index, remedy):
            for file in load_json(index, "weight_map")["weight_map"].values():
                if Path(file).is_absolute() or ".." in Path(file).parts:
                    raise ValueError(f"{index} names {file}, which lies outside its folder")
    for name in DESCRIPTIONS:
        if (folder / name).exists():
            load_json(folder / name, remedy=remedy)
    for file in sorted(folder.glob("*.safetensors")):
        with reading(file, remedy), safe_open(file, "pt"):
            pass
    check_checksums(folder, remedy)


def saved_tokenizer(folder: Path | str, remedy: str = "make it again") -> PreTrainedTokenizerFast:
    """Loads the tokenizer that was saved in a folder; ValueError names the file that is damaged."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: {remedy}")
    check_files(file.parent, remedy)
    with reading(file, remedy):
        loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(file.parent)
    return loaded
