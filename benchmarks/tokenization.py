"""Times tokenizing by the stage `tokens` beside `tokenizers.encode_batch_fast`; measures memory.

    python -m benchmarks.tokenization                   # about six minutes on two cores
    python -m benchmarks.tokenization --seconds 30      # of rounds at most, but three rounds
    python -m benchmarks.tokenization --megabytes 20    # of text for memory, 200 without it
    python -m benchmarks.tokenization --text FILE       # with your own text (as corpus.path)
    python -m benchmarks.tokenization --quick           # little text, three rounds; writes nothing

Speed: in every round the same texts go through `encode_batch_fast` of the same tokenizer, which is
what the stage calls, in batches of as many documents (from a list in memory to nothing: every batch
is dropped), through `encode_batch`, which finds offsets too, with all texts at once, through
`token_stream` (from JSON lines to Arrow files, `</s>` after each document) and through
`write_tokens` (tokenizer training left out; to the arrays that training reads), with one thread.
Reading, shuffling and writing are what ours does beside its peer. Each run is a copy (fork) of one
process that has imported everything and holds texts and tokenizer: a run leaves the heap in pieces,
which slows the next. Each frees its result within its time: a corpus of any size has to. What is
imported is frozen for Python's garbage collector, whose pass over it, a quarter of a second, is a
tenth of a run here and nothing of a real corpus. Ratios are taken round by round, in time on the
clock and in CPU time, which other work on the machine disturbs less.
Memory: the largest resident size of a fresh process that runs `write_tokens`, tokenizer training
included, on 200 MB of text, pages of memory-mapped files included.
Writes results/benchmarks/tokenization.json and .md.
"""

import gc
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before tokenizers is imported: one thread

import datasets
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.record import HOW, finish, header, markdown, options, setting
from benchmarks.rounds import Seconds, in_rounds, ratio, verdict
from value_aware_study.data.text import Docstrings, TextFiles
from value_aware_study.data.tokenization import ByteLevelBPE
from value_aware_study.data.tokens import (
    DOCUMENTS_PER_BATCH,
    SourceQuota,
    token_stream,
    write_tokens,
)

MEGABYTE = 10**6
VOCABULARY, TRAINING_CHARACTERS, INSTANCE_LENGTH = 4096, 8 * MEGABYTE, 64
PACKAGES = ("scipy", "sympy", "sklearn", "pandas", "networkx", "numpy", "matplotlib")
SECONDS = 120.0
PEER = "encode_batch_fast"


def main() -> None:
    """Measures, prints the page, and writes it unless asked for --quick."""
    parser = options(__doc__, SECONDS)
    parser.add_argument("--text", type=Path, help="a file, folder or glob instead of docstrings")
    parser.add_argument("--megabytes", type=int, default=200, help="of text to measure memory on")
    parser.add_argument("--corpus", type=Path, help=SUPPRESS)  # the process measured
    given = parser.parse_args()
    datasets.disable_progress_bars()
    if given.corpus:
        print(json.dumps(resident(given.corpus)))
        return
    gc.collect()
    gc.freeze()
    speed_text, memory_text = (1, 4) if given.quick else (4, given.megabytes)
    sources = [TextFiles(given.text)] if given.text else [Docstrings(package=p) for p in PACKAGES]
    texts = [document.text for source in sources for document in source]
    measured = list(up_to(texts, speed_text * MEGABYTE))
    record = header("tokenization") | {
        "text": str(given.text.name) if given.text else "docstrings of " + ", ".join(PACKAGES),
        "speed": speed(measured, 0.0 if given.quick else given.seconds),
        "memory": memory(varied(texts), memory_text * MEGABYTE),
    }
    record["run_on"]["threads"] = 1
    finish("tokenization", record, page(record), keep=not given.quick)


def up_to(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yields the first texts that together hold at least `size` bytes of UTF-8."""
    for text in texts:
        yield text
        size -= len(text.encode())
        if size <= 0:
            return


def varied(texts: list[str]) -> Iterator[str]:
    """Yields the texts, then forever again with lines shuffled and numbered."""
    rng = random.Random(0)
    yield from texts
    for number in count(1):
        for text in texts:
            lines = text.split("\n")
            rng.shuffle(lines)
            yield "\n".join(f"{line} {number}" for line in lines)


def speed(texts: list[str], limit: float) -> dict[str, Any]:
    """Measures seconds on the clock and of the CPU of every way, in paired rounds."""
    tokenizer = ByteLevelBPE(
        vocabulary_size=VOCABULARY, training_characters=TRAINING_CHARACTERS
    ).build(texts)
    with TemporaryDirectory() as temporary:
        corpus = Path(temporary, "corpus")
        write_texts(texts, corpus)
        ways = ways_to_tokenize(texts, tokenizer, corpus)
        cpu: Seconds = {name: [] for name in ways}
        clocks = {name: partial(in_copy, run, cpu[name]) for name, run in ways.items()}
        clock = in_rounds(clocks, [(name, PEER) for name in ways if name != PEER], limit)
    return {
        "bytes": sum(len(text.encode()) for text in texts),
        "documents": len(texts),
        "clock_seconds": clock,
        "cpu_seconds": {name: each[1:] for name, each in cpu.items()},  # the first is not counted
    }


def ways_to_tokenize(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, corpus: Path
) -> dict[str, Callable[[Path], object]]:
    """Returns the compared ways; each starts from a tokenizer with an empty cache of words."""
    text = tokenizer.backend_tokenizer.to_str()

    def fresh() -> Tokenizer:
        backend = Tokenizer.from_str(text)
        backend.encode_special_tokens = True
        return backend

    def peer(scratch: Path) -> None:
        backend = fresh()
        for first in range(0, len(texts), DOCUMENTS_PER_BATCH):
            batch = texts[first : first + DOCUMENTS_PER_BATCH]
            backend.encode_batch_fast(batch, add_special_tokens=False)

    trained = SimpleNamespace(build=lambda texts: tokenizer)  # training is no part of the time

    return {
        PEER: peer,
        "encode_batch": lambda scratch: fresh().encode_batch(texts, add_special_tokens=False),
        "token_stream": lambda scratch: token_stream(
            corpus / "text/train.jsonl", tokenizer, seed=0, cache_dir=scratch
        ),
        "write_tokens": partial(write_all, corpus, trained),
    }


def in_copy(run: Callable[[Path], object], cpu: list[float]) -> float:
    """Times a run in a copy of this process, release of its result included; appends CPU time."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    with TemporaryDirectory() as scratch:

        def measure() -> None:
            began, began_cpu = time.perf_counter(), time.process_time()
            run(Path(scratch))
            sender.send((time.perf_counter() - began, time.process_time() - began_cpu))

        process = fork.Process(target=measure)
        process.start()
        spent, spent_cpu = receiver.recv()
        process.join()
    cpu.append(spent_cpu)
    return spent


def write_texts(texts: Iterable[str], folder: Path) -> int:
    """Writes a corpus of training `texts`, a page of them for evaluation; returns its bytes.

    `write_corpus` would show a bar.
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
    """Runs the stage `tokens` for both tasks at once, as the default scale does."""
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
    """Measures memory in a fresh process that tokenizes `size` bytes of text."""
    with TemporaryDirectory() as temporary:
        written = write_texts(up_to(texts, size), Path(temporary, "corpus"))
        command = [sys.executable, "-m", "benchmarks.tokenization", "--corpus", temporary]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {"bytes": written, **json.loads(done.stdout.splitlines()[-1])}


def resident(folder: Path) -> dict[str, Any]:
    """Tokenizes <folder>/corpus; returns the largest resident size before and in all."""
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
    """Returns bytes; Linux counts ru_maxrss in units of 1024."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def page(record: dict[str, Any]) -> str:
    """Renders the table of times and the sentence about memory."""
    speeds, used = record["speed"], record["memory"]
    rows = [_cells(name, speeds) for name in speeds["clock_seconds"]]
    headers = ["", "MB/s", f"time / {PEER}", "verdict", "the same in CPU time", "verdict", "rounds"]
    return (
        "# Tokenization in one process\n\n"
        f"{speeds['bytes'] / MEGABYTE:.1f} MB in {speeds['documents']:,} documents "
        f"({record['text']}), a byte-level BPE of {VOCABULARY:,}, one thread. {setting(record)} "
        f"{HOW}\n\n{markdown(headers, rows)}\n\n"
        f"`{PEER}` is the call that `token_stream` makes, in the same batches of "
        f"{DOCUMENTS_PER_BATCH} documents, from a list in memory, every batch dropped; "
        "`encode_batch`, with all documents at once, finds offsets too. `token_stream` also reads "
        "JSON lines, shuffles, and writes Arrow files; `write_tokens` also writes the arrays that "
        "training reads.\n\n"
        f"Memory: a fresh process that trains the tokenizer and tokenizes "
        f"{used['bytes'] / MEGABYTE:.0f} MB of JSON lines to {used['tokens']:,} tokens has at most "
        f"{used['largest_bytes'] / 2**30:.2f} GiB resident, pages of memory-mapped files included; "
        f"{used['imports_bytes'] / 2**30:.2f} GiB of that are there once everything is imported.\n"
    )


def _cells(name: str, speeds: dict[str, Any]) -> list[str]:
    clock, cpu = (ratio(speeds[f"{kind}_seconds"], name, PEER) for kind in ("clock", "cpu"))
    rate = speeds["bytes"] / MEGABYTE / median(speeds["clock_seconds"][name])
    if name == PEER:
        return [name, f"{rate:.2f}", "1", "", "1", "", str(clock.rounds)]
    return [
        name, f"{rate:.2f}", str(clock), verdict(clock), str(cpu), verdict(cpu), str(clock.rounds)
    ]  # fmt: skip


if __name__ == "__main__":
    main()
