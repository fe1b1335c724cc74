"""Arrays of token ids: their type and files, and instances as a model reads them (Table 4)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from value_aware_attention.files import check_checksums, reading

__all__ = ["AGAIN", "Tokens", "check_vocabulary", "read_tokens", "rearrange", "token_dtype"]

Tokens = NDArray[np.integer]
AGAIN = "run python -m pipelines.tokens again"


def read_tokens(path: Path | str, *, dimensions: int | None = None) -> Tokens:
    """Maps a file of token ids into memory, after one pass over it where it has a checksum.

    Raises FileNotFoundError where there is none, and ValueError, with its name, for a file that is
    damaged, has changed since it was written or has not as many dimensions as are needed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: tokenize the corpus first")
    with reading(path, AGAIN):
        tokens: Tokens = np.load(path, mmap_mode="r")
        if dimensions and tokens.ndim != dimensions:
            raise ValueError(f"{path} has {tokens.ndim} dimensions, {dimensions} are needed")
        if not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
            raise ValueError(f"it holds {tokens.size} numbers of type {tokens.dtype}, no token ids")
    check_checksums(path, AGAIN)
    return tokens


def check_vocabulary(path: Path, tokens: Tokens, size: int) -> None:
    """Raises ValueError for tokens that a vocabulary of `size` does not have."""
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < size:
            raise ValueError(f"{path} has the token {token}, the vocabulary has {size}: {AGAIN}")


def rearrange(instances: Tokens, length: int) -> Tokens:
    """Join consecutive instances into sequences of `length` tokens (Table 4: BSZ x ISZ to SQL).

    (instances, instance_length) -> (instances * instance_length // length, length): RoBERTa-4096
    reads eight wrapped instances of 512 as one sequence. Left-over instances are dropped.
    """
    count, instance_length = instances.shape
    if length % instance_length:
        raise ValueError(f"length {length} is not a multiple of the instances' {instance_length}")
    group = length // instance_length
    if count < group:
        raise ValueError(f"{count} instances of {instance_length} fill no sequence of {length}")
    return instances[: count // group * group].reshape(-1, length)


def token_dtype(vocabulary_size: int) -> np.dtype[np.integer]:
    """Returns the smallest of uint16 and int32 that holds every id."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.int32)
