"""Measures how far predictions of one GGUF file differ between llama.cpp and transformers.

    python -m benchmarks.llama_cpp FILE smollm2 gemma3 qwen   # minutes
    python -m benchmarks.llama_cpp FILE smollm2 --quick       # one window; writes nothing

This gives a scale for the KL divergences of other tables: how much changes if the same weights run
in the most common program? llama.cpp rounds activations to 8 bits, transformers dequantises the
weights. FILE is a text (docs/pretrained.md says how the published record's was made). Of 16 windows
of 256 tokens the second halves are scored. llama.cpp comes from the package xllamacpp, which pip
installs into a temporary folder, and runs in a separate process. Writes
results/benchmarks/llama_cpp.json and .md.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.record import finish, header, markdown, options, setting
from value_aware_attention.hugging_face.saved import gguf_file, installed
from value_aware_attention.measurement.task import kl_from_exact
from value_aware_attention.named_models import named_models
from value_aware_attention.probe import loaded, window_task
from value_aware_attention.records.estimate import mean

LENGTH, WINDOWS = 256, 16
PACKAGE = "xllamacpp==2026.10.11549"
IN_LLAMA_CPP = """
import ctypes, sys
from pathlib import Path
import numpy as np

library, weights, tokens_file, logits_file, first = sys.argv[1:]
llama = ctypes.CDLL(library)

class Params(ctypes.Structure):
    # Larger than the parameters of any release: the library reads and writes what it knows of it.
    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]

class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p), ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]

def function(name, result, *arguments):
    found = getattr(llama, name)
    found.restype, found.argtypes = result, arguments
    return found

pointer, i32 = ctypes.c_void_p, ctypes.c_int32
quiet = ctypes.CFUNCTYPE(None, i32, ctypes.c_char_p, pointer)(lambda *_: None)
function("llama_log_set", None, type(quiet), pointer)(quiet, None)
function("llama_backend_init", None)()
model = function("llama_model_load_from_file", pointer, ctypes.c_char_p, Params)(
    weights.encode(), function("llama_model_default_params", Params)()
)
vocabulary = function("llama_vocab_n_tokens", i32, pointer)(
    function("llama_model_get_vocab", pointer, pointer)(model)
)
tokens = np.load(tokens_file)
results = []
for window in tokens:
    context = function("llama_init_from_model", pointer, pointer, Params)(
        model, function("llama_context_default_params", Params)()
    )
    function("llama_set_n_threads", None, pointer, i32, i32)(context, 1, 1)
    batch = function("llama_batch_init", Batch, i32, i32, i32)(len(window), 0, 1)
    batch.n_tokens = len(window)
    for place, token in enumerate(window):
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = int(token), place, 1
        batch.seq_id[place][0], batch.logits[place] = 0, 1
    assert function("llama_decode", i32, pointer, Batch)(context, batch) == 0
    row = function("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), pointer, i32)
    places = range(int(first), len(window) - 1)
    results.append([np.ctypeslib.as_array(row(context, n), (vocabulary,)).copy() for n in places])
    function("llama_free", None, pointer)(context)
np.save(logits_file, np.array(results))
"""


def read_by_llama_cpp(weights: Path, tokens: torch.Tensor, folder: Path) -> torch.Tensor:
    """Returns llama.cpp's logits (windows, scored positions, vocabulary) of windows of tokens."""
    (library,) = (folder / "packages").glob("xllamacpp/*.so")
    given, logits = folder / "tokens.npy", folder / "logits.npy"
    np.save(given, tokens.numpy())
    command = [sys.executable, "-c", IN_LLAMA_CPP, library, weights, given, logits, LENGTH // 2]
    subprocess.run([*map(str, command)], check=True)
    return torch.from_numpy(np.load(logits))


def measured(name: str, text: str, windows: int, folder: Path) -> dict[str, Any]:
    """Compares the predictions of both programs, window by window."""
    weights = gguf_file(installed(name))
    assert weights is not None
    model, tokenizer = loaded(name)
    task, read = window_task(
        model, tokenizer, text, windows=windows, length=LENGTH, seed=0, context=LENGTH // 2
    )
    divergences, agreements = [], []
    for number in range(len(read)):
        tokens, labels = task.texts[number].take([0])
        with torch.inference_mode():
            exact = task.read(model, tokens, labels >= 0).float()
        other = read_by_llama_cpp(weights, tokens, folder)[0, :, : exact.shape[1]]
        divergences.append(kl_from_exact(other, exact).mean().item())
        agreements.append((other.argmax(-1) == exact.argmax(-1)).double().mean().item())
    kl = mean(np.array(divergences))
    interval = [] if kl.low is None or kl.high is None else [kl.low, kl.high]
    return {
        "model": named_models()[name]["model"], "windows": len(read), "kl": kl.value,
        "kl_interval": interval, "same likeliest token": float(np.mean(agreements)),
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", choices=[*named_models()])
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    record = header("llama_cpp") | {
        "text": arguments.text.stem, "package": PACKAGE, "models": {}
    }  # fmt: skip
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--target", str(folder / "packages"), PACKAGE], check=True)
        for name in arguments.models:
            windows = 1 if arguments.quick else WINDOWS
            record["models"][name] = measured(name, text, windows, folder)
    finish("llama_cpp", record, page(record), keep=not arguments.quick)


def page(record: dict[str, Any]) -> str:
    """Renders a row for each model."""
    rows = [
        [of["model"], f"{of['kl']:.4f}", " to ".join(f"{end:.4f}" for end in of["kl_interval"]),
         f"{of['same likeliest token']:.1%}"]
        for of in record["models"].values()
    ]  # fmt: skip
    head = ["model", "KL", "95% interval over windows", "same likeliest token"]
    return (
        "# One file in two programs\n\n"
        f"KL(transformers || llama.cpp) in nats a scored token, {WINDOWS} windows of {LENGTH} "
        f"tokens of {record['text']}, second halves; llama.cpp from {record['package']}. "
        f"{setting(record)}\n\n{markdown(head, rows)}\n"
    )


if __name__ == "__main__":
    main()
