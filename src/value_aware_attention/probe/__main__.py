"""The console command value-aware, and its probe: value-aware probe MODEL --text FILE."""

from argparse import REMAINDER, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path

from value_aware_attention import named_models
from value_aware_attention.files import reading, write_text
from value_aware_attention.probe import demo
from value_aware_attention.records.record import Record
from value_aware_attention.records.terminal import side_by_side
from value_aware_attention.searches import SEARCHES
from value_aware_attention.texts import read_texts

EPILOG = """
examples:
  %(prog)s smollm2 --text notes.txt       by name: smollm2, minilm; gemma3, qwen once fetched
  %(prog)s sentence-transformers/all-MiniLM-L6-v2 --text notes.txt
  %(prog)s ./model.Q4_K_M.gguf --text notes.txt
  %(prog)s ./my-llama --text notes.txt --search fast --json llama.json
  %(prog)s llama.json other.json          two models side by side, nothing is measured

Texts are .txt, .md, .jsonl (field "text") and .tokens files, plain or .gz.
Keys chosen by weight and value-aware keys look at exact attention: they say what a method could
reach. Weights are read from safetensors and GGUF files, and no code of a model's folder is run.
`value-aware models` fetches the models with names and says where they are.
"""


COMMANDS = "value_aware.commands"
"""Entry points through which an installed package adds commands"""


def value_aware() -> None:
    """Runs `value-aware probe` or another package's command; reports an error in one line."""
    commands = {
        "probe": lambda: main,
        "models": lambda: named_models.main,
        "demo": lambda: demo.main,
        **{entry.name: entry.load for entry in entry_points(group=COMMANDS)},
    }
    made = ArgumentParser(
        prog="value-aware",
        description="Attention approximations judged by the attention output, on your model.",
        epilog="value-aware COMMAND --help has the options of each",
    )
    made.add_argument(
        "command", metavar="COMMAND",
        help="demo: five ways to keep 4 keys, in seconds; probe: how many keys the heads of a "
        "model need on a text; models: fetches models that have names here; explain: which keys "
        "heads keep for each token of a sentence, as a page",
    )  # fmt: skip
    made.add_argument("options", nargs=REMAINDER, metavar="...", help="options of the command")
    given = made.parse_args()
    if given.command not in commands:
        made.error(
            f"{given.command} is no command; did you mean "
            f"{' or '.join(get_close_matches(given.command, commands, n=1) or commands)}?"
        )
    try:
        commands[given.command]()(given.options, f"value-aware {given.command}")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        hint = (
            "; in a checkout: pip install -e '.[study]'"
            if isinstance(error, ModuleNotFoundError)
            else ""
        )
        raise SystemExit(f"error: {error}{hint}") from None


def renamed() -> None:
    """Names the command that replaced value-aware-probe."""
    raise SystemExit("error: value-aware-probe was removed in 1.1: value-aware probe")


def main(arguments: list[str] | None = None, prog: str = "value-aware probe") -> None:
    """Reads the command line, measures or reads every model, and prints tables.

    Reports an unfit model or text in one line and exits.
    """
    try:
        run(parser(prog).parse_args(arguments))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def parser(prog: str) -> ArgumentParser:
    """Describes the options."""
    made = ArgumentParser(
        prog=prog,
        description="How many keys does each layer and head of a model need on a text?",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "models", nargs="+", metavar="MODEL",
        help="a folder, a GGUF file, a name (smollm2, minilm, gemma3, qwen), package:NAME/PATH in "
        "an installed package, a name on the Hugging Face hub, or a probe's record (.json)",
    )  # fmt: skip
    made.add_argument("--text", metavar="FILE", help="texts in UTF-8: a file, a folder or a glob")
    made.add_argument("--tokenizer", metavar="FOLDER", help="if the model's folder has none")
    made.add_argument(
        "--windows", type=int, default=8, help="number of windows, evenly spaced in the text (8)"
    )
    made.add_argument("--length", type=int, help="tokens of a window (512, or all positions)")
    made.add_argument("--rows", type=int, default=32, help="queries of a head and window (32)")
    made.add_argument("--search", choices=SEARCHES, default="default", help="effort of searching")
    made.add_argument("--sizes", type=int, nargs="+", help="numbers of keys (1, 2, 4, ...)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="type of the weights (the checkpoint's own)",
    )  # fmt: skip
    made.add_argument("--no-control", action="store_true", help="leave out random weights")
    made.add_argument("--caches", action="store_true", help="also measure cache methods")
    made.add_argument(
        "--cache", metavar="FOLDER", help="intermediate results, to resume a stopped probe"
    )
    made.add_argument("--json", metavar="FILE", help="write the record of the model here")
    return made


def run(options: Namespace) -> None:
    """Prints the report of each model, and for several models a table of all.

    Raises ValueError for arguments that do not fit together, before a model is loaded.
    """
    models = [name for name in options.models if not is_record(name)]
    if models and not options.text:
        raise ValueError(f"--text is missing; {models[0]} is measured on the text of a file")
    if options.json is not None:
        file, names = Path(options.json), len(options.models)
        if (len(models), names) != (1, 1):
            raise ValueError(
                f"--json keeps the record of one model that is measured, not {len(models)} of "
                f"{names}"
            )
        if file.is_dir() or not file.parent.is_dir():
            raise ValueError(f"--json is {file}; give a file in a folder that is there")
    # before any model, because it is fast
    records = {name: earlier(name) for name in options.models if is_record(name)}
    texts = texts_of(options) if models else []
    for name in models:
        records[name] = probe_model(name, texts, options)
    if len(options.models) > 1 or not models:
        print("", *side_by_side([records[name] for name in options.models]), sep="\n")


def is_record(name: str) -> bool:
    """Returns whether this is an earlier probe's record; a model's folder may end alike."""
    return name.endswith(".json") and not Path(name).is_dir()


def earlier(file: str) -> Record:
    """Reads the record of an earlier probe. Raises ValueError for a file without one."""
    with reading(Path(file), "probe the model again"):
        record = Record.from_json(Path(file).read_text("utf-8"), file)
    if not (record.attention and record.attention[0].output_error.keys_needed):
        raise ValueError(f"{file} has no measured layers; give the record of a probe")
    return record


def texts_of(options: Namespace) -> list[str]:
    """Creates the cache folder and reads the texts. Raises ValueError if either fails."""
    try:
        Path(options.cache or ".").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--cache is {options.cache}; give a folder that can be made ({error.strerror})"
        ) from None
    try:
        return list(read_texts(options.text, show=print))
    except (OSError, ValueError) as error:
        raise ValueError(f"--text is {options.text}; {error}") from None


def probe_model(name: str, texts: list[str], options: Namespace) -> Record:
    """Measures a model and prints its report."""
    from value_aware_attention.hugging_face.saved import gguf_file, installed, short_name
    from value_aware_attention.probe.loading import loaded  # import torch
    from value_aware_attention.probe.measuring import probe  # import torch

    model, tokenizer = loaded(name, tokenizer=options.tokenizer, dtype=options.dtype)
    short = short_name(name)
    print(short)
    report = probe(
        model, tokenizer, texts, windows=options.windows, length=options.length,
        rows=options.rows, search=options.search, sizes=options.sizes, seed=options.seed,
        name=short, cache=options.cache, control=not options.no_control, caches=options.caches,
        show=print,
    )  # fmt: skip
    if file := gguf_file(installed(name)):
        from value_aware_attention.models.gguf_files import bits_a_weight, described

        print(f"\n{described(file)}")
        report = replace(report, record=replace(report.record, bits_a_weight=bits_a_weight(file)))
    print(f"\n{report.headline}")
    if options.json:
        write_text(options.json, report.record.to_json())
    return report.record


if __name__ == "__main__":
    main()
