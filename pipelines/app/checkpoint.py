"""Checks that a checkpoint is a model of the run, and hashes the files that a record depends on."""

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from omegaconf import DictConfig

from value_aware_attention.files import CARD, CHECKSUMS, checksum, load_json, unnamed
from value_aware_attention.hugging_face.saved import check_files


def file_hash(paths: Iterable[Path | str]) -> str:
    """Computes a sha256 over names and sha256 of files and of every file below folders, in order.

    A model's card and checksums are left out: no number depends on them. A file whose checksum was
    compared before is not read again.
    """
    digest = sha256()
    for path in map(Path, paths):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if file.name not in (CARD, CHECKSUMS):
                digest.update(f"{file.name}\0{checksum(file)}\n".encode())
    return digest.hexdigest()


CONFIG_FILE, CHECKPOINT_WEIGHTS, TOKENIZER_FILE = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
)
TRAIN_AGAIN = "train the model again"


def check_checkpoint(cfg: DictConfig) -> None:
    """Refuses, before any work, a model that is missing, damaged or not of the values in `cfg`.

    These values are its sizes, and the tokens, which its own tokenizer must have made. Raises
    FileNotFoundError or ValueError.
    """
    folder, tokens = Path(cfg.checkpoint), Path(cfg.tokens)
    check_model(folder)
    beside = (tokens if tokens.is_dir() else tokens.parent) / "tokenizer" / TOKENIZER_FILE
    tokenizer = folder / TOKENIZER_FILE
    if not tokenizer.exists():
        raise FileNotFoundError(f"{tokenizer} is missing: {TRAIN_AGAIN}")
    if beside.is_file() and checksum(tokenizer) != checksum(beside):
        raise ValueError(
            f"{tokens} was made with another tokenizer ({beside}) than {folder} was trained with: "
            f"train the model on these tokens (dvc repro), or make the tokens of its training again"
        )
    config = load_json(folder / CONFIG_FILE, remedy=TRAIN_AGAIN)
    unsaid = {name: cfg.sizes[name] for name in cfg.sizes if name == "masked_fraction"}
    other = [name for name, size in cfg.sizes.items() if (unsaid | config).get(name) != size]
    if other:
        saved, asked = (
            ", ".join(f"{name} {sizes.get(name)}" for name in other)
            for sizes in (config, dict(cfg.sizes))
        )
        raise ValueError(
            f"{folder} holds a model with {saved}; scale={cfg.scale} asks for {asked}: train it at "
            f"this scale, or give the scale and values that it was trained with"
        )


def check_model(folder: Path) -> None:
    """Refuses a trained model of which a file is missing, damaged or changed since it was written.

    Raises FileNotFoundError or ValueError, which name the file.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is missing: train the model first (dvc repro)")
    for name in (CONFIG_FILE, CHECKPOINT_WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} is missing: {TRAIN_AGAIN}")
    check_files(folder, TRAIN_AGAIN)
    if (folder / CHECKSUMS).is_file() and (files := unnamed(folder)):
        raise ValueError(
            f"{folder / CHECKSUMS} does not name {files[0]}, which was added: {TRAIN_AGAIN}"
        )
