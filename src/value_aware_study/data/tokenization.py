"""Tokenizer factories: `build(texts)` returns a fast tokenizer, the same for the same texts."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from value_aware_attention.hugging_face.saved import hub_answers, installed, local_folder, why_not

SPECIALS = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


class ByteLevelBPE:
    """Trains byte-level BPE on the corpus: ids 0-4 are `<s> <pad> </s> <unk> <mask>`, then bytes.

    Merges are learned from at most `training_characters` characters: the documents with the lowest
    hashes, so that the sample does not depend on their order.
    """

    def __init__(self, *, vocabulary_size: int, training_characters: int) -> None:
        smallest = len(SPECIALS) + 256
        if vocabulary_size < smallest:
            raise ValueError(f"vocabulary_size must be at least {smallest}, not {vocabulary_size}")
        self.vocabulary_size = vocabulary_size
        self.training_characters = training_characters

    def build(self, texts: Iterable[str]) -> PreTrainedTokenizerFast:
        tokenizer = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocabulary_size,
            special_tokens=list(SPECIALS.values()),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(sample(texts, self.training_characters), trainer=trainer)
        if (size := tokenizer.get_vocab_size()) < self.vocabulary_size:
            raise ValueError(
                f"the texts hold {size} tokens, vocabulary_size is {self.vocabulary_size}: lower it"
            )
        return _wrap(tokenizer, SPECIALS)


class WordLevel:
    """Builds the paper's word-level vocabulary: every training type, split at white space (A.2).

    As in fairseq, a line ends in `</s>`, and `<unk>` in the text is the special token. Ids 0-3 are
    `<s> <pad> </s> <unk>`; types follow by falling count. The size is padded to a multiple of
    `padding_multiple`: 267,744 on WikiText-103. There is no `<mask>`.
    """

    def __init__(self, *, padding_multiple: int = 8) -> None:
        if padding_multiple < 1:
            raise ValueError(f"padding_multiple must be at least 1, not {padding_multiple}")
        self.padding_multiple = padding_multiple

    def build(self, texts: Iterable[str]) -> PreTrainedTokenizerFast:
        counts = Counter(word for text in texts for word in text.split())
        if not counts:
            raise ValueError("a word-level vocabulary needs at least one word, the texts hold none")
        specials = {name: token for name, token in SPECIALS.items() if name != "mask_token"}
        types = counts.keys() - {*specials.values()}
        words = [*specials.values(), *sorted(types, key=lambda word: (-counts[word], word))]
        words += [
            f"madeupword{number:04d}" for number in range(-len(words) % self.padding_multiple)
        ]
        tokenizer = Tokenizer(
            models.WordLevel(
                {word: index for index, word in enumerate(words)}, unk_token=SPECIALS["unk_token"]
            )
        )
        tokenizer.normalizer = normalizers.Replace("\n", f" {SPECIALS['eos_token']} ")
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return _wrap(tokenizer, specials)


class PretrainedTokenizer:
    """Loads a published tokenizer.

    `path` is a name on the hub, a saved folder, `package:NAME/FOLDER` of an installed package, or a
    folder with RoBERTa's `vocab.json` and `merges.txt`. BERT's `[CLS]` and `[SEP]` replace missing
    start and end tokens.
    """

    def __init__(self, *, path: str) -> None:
        self.path = str(installed(path))

    def build(self, texts: Iterable[str]) -> PreTrainedTokenizerFast:
        """Loads the tokenizer as published, from the hub's cache if the hub does not answer.

        `texts` are not read.
        """
        folder = local_folder(self.path)
        files = {file.name for file in folder.iterdir()} if folder else set()
        if folder and "vocab.json" in files and "tokenizer.json" not in files:
            return self._from_vocabulary(folder)
        offline = folder is not None or not hub_answers()
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=offline)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"no tokenizer at {self.path!r}: {why_not(self.path, error)}"
            ) from None
        if tokenizer.eos_token is None and tokenizer.sep_token:  # BERT's
            tokenizer.bos_token, tokenizer.eos_token = tokenizer.cls_token, tokenizer.sep_token
        if tokenizer.eos_token_id is None or not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"tokenizer {self.path!r} must be a fast one with an end token </s>")
        tokenizer.backend_tokenizer.no_truncation()  # sentence encoders cut documents short
        tokenizer.backend_tokenizer.no_padding()
        return tokenizer

    def _from_vocabulary(self, folder: Path) -> PreTrainedTokenizerFast:
        if not (merges := folder / "merges.txt").is_file():
            raise FileNotFoundError(f"{merges} is missing beside vocab.json")
        tokenizer = _byte_level(models.BPE.from_file(str(folder / "vocab.json"), str(merges)))
        missing = [name for name in SPECIALS.values() if tokenizer.token_to_id(name) is None]
        if missing:
            raise ValueError(f"{folder / 'vocab.json'} lacks the tokens {' '.join(missing)}")
        return _wrap(tokenizer, SPECIALS)


def sample(texts: Iterable[str], characters: int) -> list[str]:
    """Selects the texts with the lowest hashes, in order, up to `characters` characters in total.

    One text longer than that is cut. Memory stays below the bound plus one text.
    """
    lowest: list[tuple[int, str]] = []  # a heap with the highest hash first
    total, bound = 0, 2**64
    for text in texts:
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        if key >= bound:
            continue
        heappush(lowest, (-key, text))
        total += len(text)
        while total > characters and len(lowest) > 1:
            highest, dropped = heappop(lowest)
            total -= len(dropped)
            bound = -highest
    return [text[:characters] for _, text in sorted(lowest, reverse=True)]


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrap(tokenizer: Tokenizer, specials: dict[str, str]) -> PreTrainedTokenizerFast:
    ends = {"cls_token": specials["bos_token"], "sep_token": specials["eos_token"]}
    # texts are packed and never truncated, so no text is too long
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **specials, **(ends if "mask_token" in specials else {})
    )
