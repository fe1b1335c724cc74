"""A written corpus as token arrays: written through Arrow files, read as memory maps (A.1).

Everything passes in blocks, so that memory does not grow with the corpus.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from value_aware_attention.files import check_checksums, reading
from value_aware_attention.texts import read_texts
from value_aware_study.data.text import SPLITS
from value_aware_study.safe_text import inside

if TYPE_CHECKING:  # slow to import, and reading tokens needs neither
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

Tokens = NDArray[np.integer]
Counts = dict[str, dict[str, int]]

TOKENS_REMEDY = "run python -m pipelines.tokens again"
CORPUS_AGAIN = "run python -m pipelines.corpus again"

DOCUMENTS_PER_BATCH = 64
"""Documents tokenized at a time. A document can be a whole book, so this bounds the memory."""


def write_tokens(
    *,
    corpus: Path,
    sources: Mapping[str, Mapping[str, int | None]],
    build: Callable[[Iterable[str]], Any],
    seed: int,
    scratch: Path,
    stream_folder: Path | None = None,
    score_first: bool = False,
    instance_folder: Path | None = None,
    instance_lengths: Sequence[int] = (),
) -> dict[str, Any]:
    """Tokenizes `sources` of a corpus once; returns the counts per source and split.

    `sources` has the largest number of instances of each by split; None, or a missing split, is
    all. `build` makes the tokenizer from the training texts, or loads one. `stream_folder` gets one
    stream per split, <split>.npy, for a causal LM. Its evaluation text stays in order; with
    `score_first` it starts with `</s>`, as fairseq's does, so that its first token is a target too.
    `instance_folder` gets <length>/<source>/<split>.npy for a masked LM, and
    <length>/validation.npy of all sources. Both get tokenizer/. Temporary files lie in `scratch`.
    """
    _check_written(corpus, sources)
    tokenizer = build(
        text for name in sources for text in read_texts(inside(corpus, name) / "train.jsonl")
    )
    counts: dict[str, Counts] = {name: {} for name in sources}
    for folder in filter(None, (stream_folder, instance_folder)):
        tokenizer.save_pretrained(folder / "tokenizer")
    with TemporaryDirectory(prefix="arrow-", dir=scratch) as arrow:
        for split in SPLITS:
            order = seed if split == "train" or stream_folder is None else None
            options = {"tokenizer": tokenizer, "seed": order, "cache_dir": Path(arrow)}
            streams = _streams(corpus, sources, split, **options)
            for name, stream in streams.items():
                counts[name][split] = {"tokens": count_tokens(stream)}
            if stream_folder is not None and streams:
                write_stream(
                    list(streams.values()),
                    stream_folder / f"{split}.npy",
                    vocabulary_size=len(tokenizer),
                    seed=order,
                    first=tokenizer.eos_token_id if score_first and split == "evaluation" else None,
                )
            for length in instance_lengths:
                target = (instance_folder or scratch) / str(length)
                if split == "validation":
                    _write_validation(streams, tokenizer, length, target)
                else:
                    _write_instances(streams, sources, split, tokenizer, length, target, counts)
    return {"vocabulary_size": len(tokenizer), "sources": counts}


def _streams(
    corpus: Path, sources: Iterable[str], split: str, **options: Any
) -> dict[str, "Dataset"]:
    """Tokenizes a split of each source, except sources without validation text."""
    streams = {}
    for name in sources:
        file = inside(corpus, name) / f"{split}.jsonl"
        if split != "validation" or (file.exists() and file.stat().st_size):
            streams[name] = token_stream(file, **options)
    return streams


def _check_written(corpus: Path, sources: Collection[str]) -> None:
    missing = [name for name in sources if not inside(corpus, name).is_dir()]
    if missing or not sources:
        written = ", ".join(sorted(p.name for p in corpus.glob("*") if p.is_dir())) or "nothing"
        lacking = ", ".join(missing or ["no source"])
        raise FileNotFoundError(f"{corpus} lacks {lacking}; it holds {written}")
    check_checksums(corpus, CORPUS_AGAIN)


def _write_instances(
    streams: Mapping[str, "Dataset"],
    sources: Mapping[str, Mapping[str, int | None]],
    split: str,
    tokenizer: "PreTrainedTokenizerFast",
    length: int,
    folder: Path,
    counts: Mapping[str, Counts],
) -> None:
    """Writes each source's instances of one length and split, and adds to its `counts`."""
    for name, stream in streams.items():
        rows = write_instances(
            stream, inside(folder, name) / f"{split}.npy", tokenizer=tokenizer,
            instance_length=length, quota=sources[name].get(split),
        )  # fmt: skip
        counts[name][split] |= {"instances": rows, "instance_tokens": rows * (length - 2)}


def _write_validation(
    streams: Mapping[str, "Dataset"],
    tokenizer: "PreTrainedTokenizerFast",
    length: int,
    folder: Path,
) -> None:
    """Writes validation instances of all sources together, as one source may have too few words."""
    from datasets import concatenate_datasets

    if sum(map(count_tokens, streams.values())) >= length - 2:
        text = concatenate_datasets(list(streams.values()))
        write_instances(
            text, folder / "validation.npy", tokenizer=tokenizer, instance_length=length
        )


def held_out_split(folder: Path | str, tokens: int) -> str:
    """Names the split of learning curves: "validation" if one of its files has `tokens` tokens.

    Otherwise it is "evaluation": a small corpus may have little validation text, or none.
    """
    sizes = (read_tokens(file).size for file in Path(folder).rglob("validation.npy"))
    return "validation" if max(sizes, default=0) >= tokens else "evaluation"


def token_stream(
    file: Path, tokenizer: "PreTrainedTokenizerFast", *, seed: int | None, cache_dir: Path
) -> "Dataset":
    """Tokenizes documents of one source and split: `input_ids`, with `</s>` after each document.

    `seed` shuffles the documents; None keeps the order of the file. Special tokens written in a
    text are read as text. The Arrow files lie in `cache_dir` and may be deleted afterwards.
    """
    from datasets import Dataset, Features, List, Value

    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: write the corpus first")
    if not file.stat().st_size:
        raise ValueError(f"{file} is empty: {CORPUS_AGAIN}")
    # the JSON reader of `datasets` would rewrite texts that look like dates
    stream = Dataset.from_generator(
        _tokenized,
        features=Features({"input_ids": List(Value("int32"))}),
        cache_dir=str(cache_dir),
        gen_kwargs={
            "file": file,
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "end": tokenizer.eos_token_id,
            "written": file.stat().st_mtime_ns,  # part of the cache's name
        },
    )
    return stream if seed is None else stream.shuffle(seed=seed)


def _tokenized(file: Path, tokenizer: str, end: int, written: int) -> Iterator[dict[str, Tokens]]:
    """Yields each document's tokens and `end`; tokenizes many documents at a time."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer)
    backend.encode_special_tokens = True
    texts = read_texts(file)
    while documents := list(islice(texts, DOCUMENTS_PER_BATCH)):
        for encoding in backend.encode_batch_fast(documents, add_special_tokens=False):
            yield {"input_ids": np.array([*encoding.ids, end], dtype=np.int32)}


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
    """Writes the streams of all sources as one 1-D `.npy`; returns the number of tokens.

    `first` is a token put in front, so that the first real one can be predicted; it is not counted.

    `seed` shuffles the documents of all sources, so that a part of the array is a sample of all of
    them; None writes the streams one after the other.
    """
    from datasets import concatenate_datasets

    stream = concatenate_datasets(list(streams))
    if (total := count_tokens(stream)) == 0:
        raise ValueError(f"{path}: the streams hold no tokens")
    if seed is not None:
        stream = stream.shuffle(seed=seed)
    before = [] if first is None else [np.array([first])]
    array = _array(path, vocabulary_size, (len(before) + total,))
    _fill(array, chain(before, _blocks(stream)))
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
    """Cuts one source's stream into instances: a 2-D `.npy` (instances, instance_length).

    Each row is `<s>`, the next `instance_length` - 2 tokens, `</s>`. Tokens that fill no row are
    dropped. At most `quota` rows are written (None = all). Returns their number.
    """
    pieces = instance_length - 2
    total = count_tokens(stream)
    if pieces < 1 or total < pieces:
        raise ValueError(
            f"{path}: a stream of {total} tokens fills no instance of {instance_length} tokens"
        )
    if (count := total // pieces if quota is None else min(quota, total // pieces)) == 0:
        raise ValueError(f"{path}: quota must be at least 1 or null, not {quota}")
    path.parent.mkdir(parents=True, exist_ok=True)
    array = _array(path, len(tokenizer), (count, instance_length))
    array[:, 0], array[:, -1] = tokenizer.bos_token_id, tokenizer.eos_token_id
    _fill(array[:, 1:-1].flat, _blocks(stream))
    array.flush()
    return count


def _array(path: Path, vocabulary_size: int, shape: tuple[int, ...]) -> np.memmap:
    """Makes a memory-mapped file of the smaller of uint16 and int32 that holds every id."""
    array: np.memmap = open_memmap(
        path, "w+", dtype=np.uint16 if vocabulary_size <= 2**16 else np.int32, shape=shape
    )
    if hasattr(os, "posix_fallocate"):  # on a full disk, writing to a map would kill Python
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _fill(places: "Tokens | np.flatiter", blocks: Iterable[Tokens]) -> None:
    """Copies blocks of tokens to places in order, until every place is filled."""
    start = 0
    for block in blocks:
        places[start : start + len(block)] = block[: len(places) - start]
        start += len(block)
        if start >= len(places):
            break


def _blocks(stream: "Dataset") -> Iterator[Tokens]:
    for batch in stream.with_format("arrow").iter(batch_size=DOCUMENTS_PER_BATCH):
        for chunk in batch["input_ids"].chunks:
            yield chunk.flatten().to_numpy()


def read_tokens(path: Path | str, *, dimensions: int | None = None) -> Tokens:
    """Maps a file of token ids into memory, after checking its checksum if it has one.

    Raises FileNotFoundError for a missing file. Raises ValueError, naming the file, if it is
    damaged, has changed since it was written, or does not have `dimensions` dimensions.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: tokenize the corpus first")
    with reading(path, TOKENS_REMEDY):
        tokens: Tokens = np.load(path, mmap_mode="r")
        if dimensions and tokens.ndim != dimensions:
            raise ValueError(f"{path} has {tokens.ndim} dimensions, {dimensions} are needed")
        if not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
            raise ValueError(f"it holds {tokens.size} numbers of type {tokens.dtype}, no token ids")
    check_checksums(path, TOKENS_REMEDY)
    return tokens


def check_vocabulary(path: Path | str, tokens: Tokens, size: int) -> None:
    """Raises ValueError for token ids outside a vocabulary of `size`."""
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < size:
            raise ValueError(
                f"{path} has the token {token}, the vocabulary has {size}: {TOKENS_REMEDY}"
            )


def rearrange(instances: Tokens, length: int) -> Tokens:
    """Joins consecutive instances into sequences of `length` tokens (Table 4: BSZ x ISZ to SQL).

    (instances, instance_length) -> (instances * instance_length // length, length). RoBERTa-4096
    reads eight wrapped instances of 512 as one sequence. Left-over instances are dropped.
    """
    count, instance_length = instances.shape
    if length % instance_length:
        raise ValueError(f"length {length} is not a multiple of the instances' {instance_length}")
    group = length // instance_length
    if count < group:
        raise ValueError(f"{count} instances of {instance_length} fill no sequence of {length}")
    return instances[: count // group * group].reshape(-1, length)


def merged_counts(
    documents: Mapping[str, Counts], causal: Mapping[str, Any], masked: Mapping[str, Any]
) -> dict[str, object]:
    """Merges the counts of the corpus with those of the causal and the masked tokens."""
    return {
        "sources": {
            name: {
                split: documents[name][split]
                | causal["sources"].get(name, {}).get(split, {})
                | masked["sources"].get(name, {}).get(split, {})
                for split in splits
            }
            for name, splits in documents.items()
        },
        "vocabulary_size": masked["vocabulary_size"],
        "causal_vocabulary_size": causal["vocabulary_size"],
    }
