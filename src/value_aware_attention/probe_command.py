"""The probe as a command of its own: value-aware-probe MODEL --text FILE."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from value_aware_attention.searches import SEARCHES

EPILOG = """
examples:
  value-aware-probe sentence-transformers/all-MiniLM-L6-v2 --text notes.txt
  value-aware-probe ./my-llama --text notes.txt --search fast --json llama.json
  value-aware-probe llama.json other.json          two models side by side, nothing is measured

Texts are .txt, .md, .jsonl (field "text") and .tokens files, plain or .gz.
Keys chosen by weight and value-aware keys look at exact attention: they say what a method could
reach. Only safetensors are read, and no code of a model's folder is run.
"""


DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    """Reads the command line, measures or reads every model, and prints tables.

    Ends with one line where a model or text does not fit.
    """
    arguments = parser().parse_args()
    from value_aware_attention.probe_run import run  # it imports torch, which --help does without

    try:
        run(arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def parser() -> ArgumentParser:
    """Describes the options."""
    made = ArgumentParser(
        prog="value-aware-probe",
        description="How many keys does each layer and head of a model need on a text?",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "models", nargs="+", metavar="MODEL",
        help="a folder, a name on the Hugging Face hub, or a record (.json) of an earlier probe",
    )  # fmt: skip
    made.add_argument("--text", metavar="FILE", help="texts in UTF-8: a file, a folder or a glob")
    made.add_argument("--tokenizer", metavar="FOLDER", help="where the model's own has none")
    made.add_argument("--windows", type=int, default=8, help="of the text, evenly spaced (8)")
    made.add_argument("--length", type=int, help="tokens of a window (512, or all positions)")
    made.add_argument("--rows", type=int, default=32, help="queries of a head and window (32)")
    made.add_argument("--search", choices=SEARCHES, default="default", help="of value-aware keys")
    made.add_argument("--sizes", type=int, nargs="+", help="numbers of keys (1, 2, 4, ...)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--dtype", choices=DTYPES, help="of the weights (the checkpoint's own)")
    made.add_argument("--no-control", action="store_true", help="leave out random weights")
    made.add_argument("--caches", action="store_true", help="also methods that compress a cache")
    made.add_argument("--estimate", action="store_true", help="print time and memory, and stop")
    made.add_argument("--cache", metavar="FOLDER", help="keeps numbers: a stopped probe goes on")
    made.add_argument("--json", metavar="FILE", help="write the record of the one model there")
    return made
