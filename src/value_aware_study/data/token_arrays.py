"""Arrays of token ids: their type, and instances as the sequences that a model reads (Table 4)."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tokens", "rearrange", "token_dtype"]

Tokens = NDArray[np.integer]


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
