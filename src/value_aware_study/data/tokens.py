"""A written corpus to the token arrays that training and evaluation read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from value_aware_attention.files import check_checksums
from value_aware_study.data.batches import MaskedSequences
from value_aware_study.data.corpora import AGAIN as CORPUS_AGAIN
from value_aware_study.data.corpora import SPLITS, read_texts
from value_aware_study.data.packing import (
    count_tokens,
    token_stream,
    write_instances,
    write_stream,
)
from value_aware_study.data.token_arrays import AGAIN, read_tokens
from value_aware_study.paths import inside

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "SourceQuota",
    "TokenizerFactory",
    "held_out_split",
    "masked_sequences",
    "write_tokens",
]

Counts = dict[str, dict[str, int]]


@runtime_checkable
class TokenizerFactory(Protocol):
    """Trains or loads a tokenizer; the texts may be ignored."""

    def build(self, texts: Iterable[str]) -> "PreTrainedTokenizerFast": ...


@dataclass(frozen=True, kw_only=True)
class SourceQuota:
    """The largest number of instances taken from a source per split; None = all."""

    train: int | None = None
    evaluation: int | None = None


def write_tokens(
    *,
    corpus: Path,
    sources: Mapping[str, SourceQuota],
    tokenizer: TokenizerFactory,
    seed: int,
    scratch: Path,
    stream_folder: Path | None = None,
    score_first: bool = False,
    instance_folder: Path | None = None,
    instance_lengths: Sequence[int] = (),
) -> dict[str, Any]:
    """Tokenizes `sources` of a corpus once; returns the counts per source and split.

    `stream_folder` gets one stream a split, <split>.npy, for a causal LM; its evaluation
    text stays in order, with `score_first` behind a `</s>`, as fairseq's, so that its first token
    is a target too. `instance_folder` gets <length>/<source>/<split>.npy for a masked LM, and
    <length>/validation.npy of all sources together. Each folder gets tokenizer/, a Hugging Face
    folder. Arrow files lie in `scratch` meanwhile.
    """
    _check_written(corpus, sources)
    built = tokenizer.build(read_texts(inside(corpus, name) / "train.jsonl" for name in sources))
    counts: dict[str, Counts] = {name: {} for name in sources}
    for folder in filter(None, (stream_folder, instance_folder)):
        built.save_pretrained(folder / "tokenizer")
    with TemporaryDirectory(prefix="arrow-", dir=scratch) as arrow:
        for split in SPLITS:
            order = seed if split == "train" or stream_folder is None else None
            options = {"tokenizer": built, "seed": order, "cache_dir": Path(arrow)}
            streams = _streams(corpus, sources, split, **options)
            for name, stream in streams.items():
                counts[name][split] = {"tokens": count_tokens(stream)}
            if stream_folder is not None and streams:
                write_stream(
                    list(streams.values()),
                    stream_folder / f"{split}.npy",
                    vocabulary_size=len(built),
                    seed=order,
                    first=built.eos_token_id if score_first and split == "evaluation" else None,
                )
            for length in instance_lengths:
                target = (instance_folder or scratch) / str(length)
                if split == "validation":
                    _write_validation(streams, built, length, target)
                    continue
                written = _write_instances(streams, sources, split, built, length, target)
                for name, count in written.items():
                    counts[name][split] |= count
    return {"vocabulary_size": len(built), "sources": counts}


def _streams(
    corpus: Path, sources: Iterable[str], split: str, **options: Any
) -> dict[str, "Dataset"]:
    """Tokenizes a split of each source; of validation text there may be none."""
    streams = {}
    for name in sources:
        file = inside(corpus, name) / f"{split}.jsonl"
        if split != "validation" or (file.exists() and file.stat().st_size):
            streams[name] = token_stream(file, **options)
    return streams


def _check_written(corpus: Path, sources: Mapping[str, SourceQuota]) -> None:
    missing = [name for name in sources if not inside(corpus, name).is_dir()]
    if missing or not sources:
        written = ", ".join(sorted(p.name for p in corpus.glob("*") if p.is_dir())) or "nothing"
        wanted = ", ".join(missing or ["no source"])
        raise FileNotFoundError(f"{corpus} lacks {wanted}; it holds {written}")
    needed = (corpus / name / f"{split}.jsonl" for name in sources for split in SPLITS)
    for file in needed:
        if file.exists() and not file.stat().st_size and file.stem != "validation":
            raise ValueError(f"{file} is empty: {CORPUS_AGAIN}")
    check_checksums(corpus, CORPUS_AGAIN)


def _write_instances(
    streams: Mapping[str, Any],
    sources: Mapping[str, SourceQuota],
    split: str,
    tokenizer: "PreTrainedTokenizerFast",
    length: int,
    folder: Path,
) -> Counts:
    """Writes the instances of one length and split, each source apart; counts them per source."""
    counts: Counts = {}
    for name, stream in streams.items():
        path = inside(folder, name) / f"{split}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        quota = getattr(sources[name], split)
        rows = write_instances(
            stream, path, tokenizer=tokenizer, instance_length=length, quota=quota
        )
        counts[name] = {"instances": rows, "instance_tokens": rows * (length - 2)}
    return counts


def _write_validation(
    streams: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast", length: int, folder: Path
) -> None:
    """Writes instances of all sources together, whose own validation texts may be a few words."""
    from datasets import concatenate_datasets

    text = concatenate_datasets(list(streams.values())) if streams else None
    if text is not None and count_tokens(text) >= length - 2:
        path = folder / "validation.npy"
        folder.mkdir(parents=True, exist_ok=True)
        write_instances(text, path, tokenizer=tokenizer, instance_length=length)


def held_out_split(folder: Path | str, tokens: int) -> str:
    """Names the split of learning curves: "evaluation" where validation text is too short.

    Of a corpus with few documents there may be no validation text, or less than `tokens`.
    """
    files = Path(folder).rglob("validation.npy")
    sizes = (read_tokens(file).size for file in files)
    return "validation" if max(sizes, default=0) >= tokens else "evaluation"


def masked_sequences(
    *, folder: Path | str, split: str, length: int, fraction: float
) -> MaskedSequences:
    """Reads the masked LM's sequences that `write_tokens` left in `folder`, all sources together.

    Instances of exactly `length` tokens are taken where they were written (the L - 2 chunks of
    A.1); otherwise the shorter ones are joined (Table 4).
    """
    from value_aware_attention.hugging_face.saved import saved_tokenizer

    root = Path(folder)
    lengths = sorted(int(path.name) for path in root.glob("*") if path.name.isdigit())
    if not lengths:
        raise FileNotFoundError(f"{root} holds no instances; run python -m pipelines.tokens first")
    instances = root / str(length if length in lengths else lengths[0])
    tokenizer = saved_tokenizer(root / "tokenizer", AGAIN)
    return MaskedSequences(
        sorted(instances.rglob(f"{split}.npy")),
        length=length,
        mask_token=tokenizer.mask_token_id,
        special_tokens=tokenizer.all_special_ids,
        vocabulary_size=len(tokenizer),
        fraction=fraction,
    )
