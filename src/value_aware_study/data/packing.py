"""Documents to one long token stream per source, and the stream to arrays on disk (A.1).

Everything passes through Arrow files and `.npy` memory maps in blocks; nothing in memory grows
with the corpus.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.format import open_memmap

from value_aware_study.data.corpora import read_texts
from value_aware_study.data.token_arrays import Tokens, token_dtype

if TYPE_CHECKING:  # slow to import, and reading packed tokens needs neither
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

DOCUMENTS_PER_BATCH = 64  # whole books too: bounds the memory


def token_stream(
    file: Path, tokenizer: "PreTrainedTokenizerFast", *, seed: int | None, cache_dir: Path
) -> "Dataset":
    """Tokenizes the documents of one source and split: `input_ids`, `</s>` after each document.

    The documents are in random order drawn from `seed`; None keeps the order of the file. Specials
    written in a text are text. The Arrow files lie in `cache_dir` and may be deleted afterwards.
    """
    import pyarrow
    from datasets import Dataset, Features, List, Value
    from tokenizers import Tokenizer

    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: write the corpus first")
    # not the JSON reader of `datasets`: Arrow's rewrites texts that look like dates
    documents = Dataset.from_generator(
        _rows,
        features=Features({"text": Value("string")}),
        cache_dir=str(cache_dir),
        gen_kwargs={"file": file, "written": file.stat().st_mtime_ns},  # what names the cache
    )
    if seed is not None:
        documents = documents.shuffle(seed=seed)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    end = tokenizer.eos_token_id

    def tokenize(batch: "pyarrow.Table") -> "pyarrow.Table":
        encoded = backend.encode_batch_fast(batch["text"].to_pylist(), add_special_tokens=False)
        ids = [np.array([*encoding.ids, end], dtype=np.int32) for encoding in encoded]
        # built as Arrow holds it: converting lists of lists takes a tenth of the whole time
        ends = np.cumsum([0, *map(len, ids)], dtype=np.int32)
        tokens = pyarrow.ListArray.from_arrays(ends, np.concatenate(ids))
        return pyarrow.table({"input_ids": tokens})

    return documents.with_format("arrow").map(
        tokenize,
        batched=True,
        batch_size=DOCUMENTS_PER_BATCH,
        writer_batch_size=DOCUMENTS_PER_BATCH,
        remove_columns=["text"],
        features=Features({"input_ids": List(Value("int32"))}),
        desc=f"tokenizing {file.parent.name}/{file.stem}",
    )


def count_tokens(stream: "Dataset") -> int:
    """Counts the tokens of a stream, `</s>` included."""
    return sum(len(block) for block in _blocks(stream))


def write_stream(
    streams: Sequence["Dataset"],
    path: Path,
    *,
    vocabulary_size: int,
    seed: int | None = None,
    first: int | None = None,
) -> int:
    """Write the streams of all sources as one 1-D `.npy`; returns the number of tokens.

    `first` is a token to put before them, not counted: what the first of them is predicted from.

    With a `seed` the documents of all sources are in random order, so that a part of the array is
    a sample of all of them; None keeps the streams one after the other.
    """
    from datasets import concatenate_datasets

    stream = concatenate_datasets(list(streams))
    total = count_tokens(stream)
    if total == 0:
        raise ValueError(f"{path}: the streams hold no tokens")
    if seed is not None:
        stream = stream.shuffle(seed=seed)
    before = [] if first is None else [first]
    start = len(before)
    dtype = token_dtype(vocabulary_size)
    array = _array(path, dtype, (start + total,))
    array[:start] = before
    for block in _blocks(stream):
        array[start : start + len(block)] = block
        start += len(block)
    array.flush()
    return total


def write_instances(
    stream: "Dataset",
    path: Path,
    *,
    tokenizer: "PreTrainedTokenizerFast",
    instance_length: int,
    quota: int | None = None,
) -> int:
    """Cut one source's stream into instances: a 2-D `.npy` (instances, instance_length).

    Each row is `<s>`, the next `instance_length` - 2 tokens, `</s>`; the rest of the stream that
    fills no row is dropped. At most `quota` rows are written (None: all). Returns their number.
    """
    pieces = instance_length - 2
    total = count_tokens(stream)
    if pieces < 1 or total < pieces:
        raise ValueError(
            f"{path}: a stream of {total} tokens fills no instance of {instance_length} tokens"
        )
    count = total // pieces if quota is None else min(quota, total // pieces)
    if count == 0:
        raise ValueError(f"{path}: quota must be at least 1 or null, not {quota}")
    dtype = token_dtype(len(tokenizer))
    array = _array(path, dtype, (count, instance_length))
    array[:, 0], array[:, -1] = tokenizer.bos_token_id, tokenizer.eos_token_id
    row = 0
    for block in _whole_pieces(_blocks(stream), pieces):
        rows = block.reshape(-1, pieces)[: count - row]
        array[row : row + len(rows), 1:-1] = rows
        row += len(rows)
        if row == count:
            break
    array.flush()
    return count


def _array(path: Path, dtype: np.dtype[np.integer], shape: tuple[int, ...]) -> np.memmap:
    array: np.memmap = open_memmap(path, "w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # room for it: writing to a map of a full disk ends Python
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _rows(file: Path, written: int) -> Iterator[dict[str, str]]:
    for text in read_texts([file]):
        yield {"text": text}


def _blocks(stream: "Dataset") -> Iterator[Tokens]:
    for batch in stream.with_format("arrow").iter(batch_size=DOCUMENTS_PER_BATCH):
        for chunk in batch["input_ids"].chunks:
            yield chunk.flatten().to_numpy()


def _whole_pieces(blocks: Iterator[Tokens], piece: int) -> Iterator[Tokens]:
    rest = np.empty(0, dtype=np.int32)
    for block in blocks:
        joined = np.concatenate([rest, block])
        whole = len(joined) // piece * piece
        yield joined[:whole]
        rest = joined[whole:]
