"""Tokenizing as the stage `tokens` does it, beside `tokenizers.encode_batch`; and its memory.

    python -m benchmarks.tokenization                # about five minutes on two cores
    python -m benchmarks.tokenization --text FILE    # with your own text (as corpus.path)
    python -m benchmarks.tokenization --quick        # little text, few rounds; writes nothing

Speed: in every round the same texts go through `encode_batch` of the same tokenizer (from a list in
memory to a list in memory), through `token_stream` (from JSON lines to Arrow files, `</s>` after
each document) and through `write_tokens` (tokenizer training left out; to the arrays that training
reads), with one thread. Each run is a copy (fork) of one process that has imported everything and
holds texts and tokenizer: a run leaves the heap in pieces, which slows the next. Each frees its
result within its time: a corpus of any size has to. What is imported is frozen for Python's garbage
collector, whose pass over it, a quarter of a second, is a tenth of a run here and nothing of a real
corpus. Ratios are taken round by round, in time on the clock and in CPU time, which other work on
the machine disturbs less.
Memory: the largest resident size of a fresh process that runs `write_tokens`, tokenizer training
included, on 200 MB of text, pages of memory-mapped files included.
Writes results/benchmarks/tokenization.json and .md.
"""

import argparse
import gc
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before tokenizers is imported: one thread

import datasets
from tabulate import tabulate
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from pipelines.provenance import run_on
from value_aware_attention.data.corpora import Docstrings, Document, TextFiles
from value_aware_attention.data.packing import token_stream
from value_aware_attention.data.tokenization import ByteLevelBPE
from value_aware_attention.data.tokens import SourceQuota, write_tokens

MEGABYTE = 10**6
VOCABULARY, TRAINING_CHARACTERS, INSTANCE_LENGTH = 4096, 8 * MEGABYTE, 64
PACKAGES = ("scipy", "sympy", "sklearn", "pandas", "networkx", "numpy", "matplotlib")
FOLDER = Path("results/benchmarks")
PEER = "encode_batch"


def main() -> None:
    """Measures, prints the page, and writes it unless asked for --quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="a file, folder or glob instead of docstrings")
    parser.add_argument("--quick", action="store_true", help="little text; writes nothing")
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)  # the process measured
    given = parser.parse_args()
    datasets.disable_progress_bars()
    if given.corpus:
        print(json.dumps(resident(given.corpus)))
        return
    gc.collect()
    gc.freeze()
    speed_text, memory_text, rounds = (1, 4, 2) if given.quick else (4, 200, 15)
    texts = [document.text for document in documents(given.text)]
    record = {
        "run_on": run_on() | {"threads": 1},
        "text": str(given.text.name) if given.text else "docstrings of " + ", ".join(PACKAGES),
        "speed": speed(list(up_to(texts, speed_text * MEGABYTE)), rounds),
        "memory": memory(varied(texts), memory_text * MEGABYTE),
    }
    print(page(record))
    if not given.quick:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "tokenization.json").write_text(json.dumps(record, indent=1) + "\n")
        (FOLDER / "tokenization.md").write_text(page(record))


def documents(path: Path | None) -> Iterator[Document]:
    """The text to measure on: a user's, or what every installation has."""
    if path:
        yield from TextFiles(path)
    else:
        for package in PACKAGES:
            yield from Docstrings(package=package)


def up_to(texts: Iterable[str], size: int) -> Iterator[str]:
    """The first texts that hold `size` bytes of UTF-8 together, or a little more."""
    for text in texts:
        yield text
        size -= len(text.encode())
        if size <= 0:
            return


def varied(texts: list[str]) -> Iterator[str]:
    """The texts once, and then again and again, lines in another order and numbered."""
    rng = random.Random(0)
    yield from texts
    for number in count(1):
        for text in texts:
            lines = text.split("\n")
            rng.shuffle(lines)
            yield "\n".join(f"{line} {number}" for line in lines)


def speed(texts: list[str], rounds: int) -> dict[str, Any]:
    """Seconds on the clock and of the CPU, by what was run, in rounds of all in random order."""
    tokenizer = ByteLevelBPE(
        vocabulary_size=VOCABULARY, training_characters=TRAINING_CHARACTERS
    ).build(texts)
    clock: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with TemporaryDirectory() as temporary:
        corpus = Path(temporary, "corpus")
        write_texts(texts, corpus)
        ways = ways_to_tokenize(texts, tokenizer, corpus)
        rng = random.Random(0)
        for _ in tqdm(range(rounds), unit="round"):
            for name in rng.sample(list(ways), len(ways)):
                with TemporaryDirectory() as scratch:
                    one, other = timed(ways[name], Path(scratch))
                clock.setdefault(name, []).append(one)
                cpu.setdefault(name, []).append(other)
    names = list(ways)
    return {
        "bytes": sum(len(text.encode()) for text in texts),
        "documents": len(texts),
        "clock_seconds": {name: clock[name] for name in names},
        "cpu_seconds": {name: cpu[name] for name in names},
    }


def ways_to_tokenize(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, corpus: Path
) -> dict[str, Callable[[Path], object]]:
    """What is compared; each starts from a tokenizer with an empty cache of words."""
    backend = tokenizer.backend_tokenizer.to_str()

    def peer(scratch: Path) -> object:
        return Tokenizer.from_str(backend).encode_batch(texts, add_special_tokens=False)

    def stream(scratch: Path) -> object:
        file = corpus / "text/train.jsonl"
        return token_stream(file, tokenizer, seed=0, cache_dir=scratch)

    def everything(scratch: Path) -> object:
        return write_all(corpus, _Built(tokenizer), scratch)

    return {PEER: peer, "token_stream": stream, "write_tokens": everything}


class _Built:
    """A tokenizer that is there already: its training is no part of the time."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def build(self, texts: Iterable[str]) -> PreTrainedTokenizerFast:
        return self.tokenizer


def timed(run: Callable[[Path], object], scratch: Path) -> tuple[float, float]:
    """Seconds on the clock and of the CPU in a copy of this process, the result's release in."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def measure() -> None:
        clock, cpu = time.perf_counter(), time.process_time()
        run(scratch)
        sender.send((time.perf_counter() - clock, time.process_time() - cpu))

    process = fork.Process(target=measure)
    process.start()
    spent = receiver.recv()
    process.join()
    return spent


def write_texts(texts: Iterable[str], folder: Path) -> int:
    """A corpus whose training text is `texts`, and a page of them its evaluation text; its bytes.

    Not with `write_corpus`, which shows a bar.
    """
    source = folder / "text"
    source.mkdir(parents=True)
    first = list(islice(texts := iter(texts), 20))
    written = {"evaluation": ["\n".join(first)[:10_000]], "train": chain(first, texts)}
    for split, content in written.items():
        with (source / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for text in content:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return (source / "train.jsonl").stat().st_size


def write_all(corpus: Path, tokenizer: Any, scratch: Path) -> dict[str, Any]:
    """The stage `tokens` for both tasks at once, as the default scale runs it."""
    return write_tokens(
        corpus=corpus,
        sources={"text": SourceQuota()},
        tokenizer=tokenizer,
        seed=0,
        scratch=scratch,
        stream_folder=scratch / "causal",
        instance_folder=scratch / "masked",
        instance_lengths=[INSTANCE_LENGTH],
    )


def memory(texts: Iterator[str], size: int) -> dict[str, Any]:
    """What a fresh process says after tokenizing `size` bytes of text."""
    with TemporaryDirectory() as temporary:
        written = write_texts(up_to(texts, size), Path(temporary, "corpus"))
        command = [sys.executable, "-m", "benchmarks.tokenization", "--corpus", temporary]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {"bytes": written, **json.loads(done.stdout.splitlines()[-1])}


def resident(folder: Path) -> dict[str, Any]:
    """Tokenizes <folder>/corpus; this process' largest resident size, before and in all."""
    before = largest_resident()
    tokenizer = ByteLevelBPE(vocabulary_size=VOCABULARY, training_characters=TRAINING_CHARACTERS)
    began = time.perf_counter()
    counts = write_all(folder / "corpus", tokenizer, folder)["sources"]["text"]["train"]
    return {
        "imports_bytes": before,
        "largest_bytes": largest_resident(),
        "seconds": round(time.perf_counter() - began, 1),
        "tokens": counts["tokens"],
    }


def largest_resident() -> int:
    """Bytes; Linux counts ru_maxrss in units of 1024."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def page(record: dict[str, Any]) -> str:
    """The table of times and the sentence about memory."""
    speeds, used, run = record["speed"], record["memory"], record["run_on"]
    clock, cpu = speeds["clock_seconds"], speeds["cpu_seconds"]
    rows = [
        (name, f"{speeds['bytes'] / MEGABYTE / median(clock[name]):.2f}",
         ratio(clock[PEER], clock[name]), ratio(cpu[PEER], cpu[name]))
        for name in clock
    ]  # fmt: skip
    headers = ["", "MB/s", f"speed / {PEER}", "the same in CPU time"]
    return (
        "# Tokenization in one process\n\n"
        f"{speeds['bytes'] / MEGABYTE:.1f} MB in {speeds['documents']:,} documents "
        f"({record['text']}), a byte-level BPE of {VOCABULARY:,}, one thread. {run['hardware']}; "
        f"versions: {json.dumps(run['versions'])}. Median of {len(clock[PEER])} rounds in random "
        "order; ratios are taken round by round, quartiles in brackets, over 1 = faster than "
        f"`{PEER}`.\n\n{tabulate(rows, headers, tablefmt='github')}\n\n"
        f"Memory: a fresh process that trains the tokenizer and tokenizes "
        f"{used['bytes'] / MEGABYTE:.0f} MB of JSON lines to {used['tokens']:,} tokens has at most "
        f"{used['largest_bytes'] / 2**30:.2f} GiB resident, pages of memory-mapped files included; "
        f"{used['imports_bytes'] / 2**30:.2f} GiB of that are there once everything is imported.\n"
    )


def ratio(peer: list[float], ours: list[float]) -> str:
    """Median and quartiles of the peer's time over ours, round by round."""
    paired = [a / b for a, b in zip(peer, ours, strict=True)]
    low, middle, high = quantiles(paired, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
