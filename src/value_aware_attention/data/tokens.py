"""A written corpus to the token arrays that training and evaluation read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from value_aware_attention.data.batches import MaskedSequences
from value_aware_attention.data.corpora import SPLITS, read_texts
from value_aware_attention.data.packing import (
    count_tokens,
    token_stream,
    write_instances,
    write_stream,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["SourceQuota", "TokenizerFactory", "masked_sequences", "write_tokens"]

Counts = dict[str, dict[str, dict[str, int]]]


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
    instance_lengths: Sequence[int],
    folder: Path,
    seed: int,
) -> dict[str, Any]:
    """Tokenizes `sources` of a corpus into `folder`; returns counts per source and split.

    Writes tokenizer/ (a Hugging Face folder), and without `instance_lengths` one stream a split,
    {train,evaluation}.npy; with them <length>/<source>/{train,evaluation}.npy for each length.
    """
    missing = [name for name in sources if not (corpus / name).is_dir()]
    if missing or not sources:
        written = ", ".join(sorted(p.name for p in corpus.glob("*"))) or "nothing"
        wanted = ", ".join(missing or ["no source"])
        raise FileNotFoundError(f"{corpus} lacks {wanted}; it holds {written}")
    built = tokenizer.build(read_texts(corpus / name / "train.jsonl" for name in sources))
    built.save_pretrained(folder / "tokenizer")
    with TemporaryDirectory(prefix="arrow-") as arrow:
        streams = {
            split: {
                name: token_stream(
                    corpus / name / f"{split}.jsonl", built, seed=seed, cache_dir=Path(arrow)
                )
                for name in sources
            }
            for split in SPLITS
        }
        counts: Counts = {
            name: {split: {"tokens": count_tokens(streams[split][name])} for split in SPLITS}
            for name in sources
        }
        if not instance_lengths:
            for split in SPLITS:
                parts = list(streams[split].values())
                path = folder / f"{split}.npy"
                write_stream(parts, path, vocabulary_size=len(built), seed=seed)
        for length in instance_lengths:
            for split in SPLITS:
                for name, quota in sources.items():
                    path = folder / str(length) / name / f"{split}.npy"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    rows = write_instances(
                        streams[split][name],
                        path,
                        tokenizer=built,
                        instance_length=length,
                        quota=getattr(quota, split),
                    )
                    counts[name][split] |= {
                        "instances": rows,
                        "instance_tokens": rows * (length - 2),
                    }
    return {"vocabulary_size": len(built), "sources": counts}


def masked_sequences(
    *, folder: Path | str, split: str, length: int, fraction: float
) -> MaskedSequences:
    """The masked LM's sequences that `write_tokens` left in `folder`, all sources together.

    Instances of exactly `length` tokens are taken where they were written (the L - 2 chunks of
    A.1); otherwise the shorter ones are joined (Table 4).
    """
    from transformers import PreTrainedTokenizerFast

    root = Path(folder)
    lengths = sorted(int(path.name) for path in root.glob("*") if path.name.isdigit())
    if not lengths:
        raise FileNotFoundError(f"{root} holds no instances; run python -m pipelines.tokens first")
    instances = root / str(length if length in lengths else lengths[0])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(root / "tokenizer")
    return MaskedSequences(
        sorted(instances.glob(f"*/{split}.npy")),
        length=length,
        mask_token=tokenizer.mask_token_id,
        special_tokens=tokenizer.all_special_ids,
        vocabulary_size=len(tokenizer),
        fraction=fraction,
    )
