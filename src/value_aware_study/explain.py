"""The token explorer of one sentence, as a separate page: value-aware explain."""

from argparse import ArgumentParser
from pathlib import Path


def main(arguments: list[str] | None = None, prog: str | None = None) -> None:
    """Reads the command line, writes the page and prints its name.

    Raises ValueError and OSError, before a model is loaded, if the page cannot be written.
    """
    made = ArgumentParser(
        prog=prog,
        description="Which keys does each head of a model keep for each token of a sentence? "
        "Writes one HTML file that opens without a network.",
    )
    made.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a GGUF file, package:NAME/PATH or a name on the Hugging Face hub",
    )
    made.add_argument(
        "sentence", metavar="SENTENCE", help="in quotes, of at most 48 tokens, with special ones"
    )
    made.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("explained.html"),
        help="the page (explained.html)",
    )  # fmt: skip
    options = made.parse_args(arguments)
    explain(options.model, " ".join(options.sentence.split()), options.output)
    print(options.output)


def explain(model: str, sentence: str, output: Path) -> None:
    """Writes the page of a sentence. Raises ValueError if it cannot show the whole sentence."""
    from value_aware_attention.files import new_file
    from value_aware_attention.hugging_face.layers import positions
    from value_aware_attention.hugging_face.saved import short_name
    from value_aware_attention.probe import loaded
    from value_aware_study.evaluation.explorer import MOST_TOKENS, ends_of, exploration
    from value_aware_study.report import exhibit, page
    from value_aware_study.report.exhibits.model import explorer

    if not sentence:
        raise ValueError("the sentence is empty")
    if not output.parent.is_dir() or (
        output.exists()
        and not (output.is_file() and page.OURS in output.read_text("utf-8", errors="replace"))
    ):
        raise ValueError(
            f"--output is {output}; give a new file or an earlier page, in a folder that is there"
        )
    with new_file(output) as partial:
        name = short_name(model)
        network, tokenizer = loaded(model)
        most = min(MOST_TOKENS, positions(network) or MOST_TOKENS) - sum(
            map(len, ends_of(network, tokenizer))
        )
        tokens = len(tokenizer(sentence, add_special_tokens=False, verbose=False)["input_ids"])
        if not 1 <= tokens <= most:
            raise ValueError(
                f"the text has {tokens} tokens; the page and the model take 1 to {most}, beside "
                f"those that the tokenizer puts around a text"
            )
        explored = exploration(name, network, tokenizer, [sentence], whole=True)
        shown = [*filter(None, [explorer(explored, {name: name})])]
        written = exhibit.Page(
            f"{name}, token by token",
            "All choices look at exact attention: what a method could reach, not what it costs.",
            [exhibit.Section("sentence", f"“{sentence}”", "", shown)],
        )
        partial.write_text(page.html(written), "utf-8")
