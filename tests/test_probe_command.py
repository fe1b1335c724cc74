"""The commands: probe without the report's packages, explain; with one line for an error."""

import gzip
import json
import re
import subprocess
import sys
import zlib
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from probed import LENGTH, model, tokenizer, words

from tests.models.gguf_files import llama, write_gguf
from tests.refusals import assert_refused
from value_aware_attention.measurement import Record
from value_aware_attention.measurement.measure import measure_own
from value_aware_attention.measurement.task import Task, Text
from value_aware_attention.probe import __main__ as command
from value_aware_attention.probe import measuring
from value_aware_attention.records.headline import headline
from value_aware_attention.records.terminal import side_by_side, tables
from value_aware_study.explain import explain
from value_aware_study.report.page import OURS

pytestmark = pytest.mark.filterwarnings("ignore")
FEW = ["--windows", "2", "--rows", "4", "--search", "fast", "--sizes", "1", "4", "--no-control"]
STUDY = ("altair", "datasets", "dvc", "hydra", "omegaconf", "pandas", "wandb", "value_aware_study")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("probe_command")
    for name in ("bert", "gpt2"):
        model(name).save_pretrained(made / name)
        tokenizer().save_pretrained(made / name)
    model("bert").save_pretrained(made / "bare")
    (made / "text.txt").write_text(words(200))
    (made / "short.txt").write_text("w1 w2")
    (made / "zero.txt").write_text("w1", "utf-16-le")
    (made / "wide.json").write_text("{}", "utf-16")
    text = Text.of_tokens(torch.arange(3, 3 + LENGTH)[None])
    unlayered = measure_own(Task(model("gpt2"), [text], "perplexity"), name="own")
    (made / "own.json").write_text(unlayered.to_json())
    return made


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["value-aware probe", *map(str, arguments)])
    command.main()


def value_aware(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["value-aware", *map(str, arguments)])
    command.value_aware()


def test_it_prints_the_report_and_writes_the_record(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    records = []
    for name, more in (("bert", ["--caches"]), ("gpt2", [])):
        file = tmp_path / f"{name}.json"
        options = ["--text", folder / "text.txt", "--length", LENGTH, "--json", file]
        run(monkeypatch, folder / name, *options, *FEW, *more)
        records.append(Record.from_json(file.read_text()))
        printed = capsys.readouterr().out
        compressed = "a cache that keeps r of 16 keys for all later queries: 1 - cosine"
        caches = {line.split("  ")[0] for line in printed.splitlines()}
        named = {"SnapKV", "DropKV", "value-aware", "value-aware, refitted"}
        assert (compressed in printed) == (named <= caches) == bool(more)
        assert "\n".join(tables(records[-1])) in printed and headline(records[-1]) in printed
        assert printed.startswith(f"{name}\n") and records[-1].model == name
    run(monkeypatch, *(tmp_path / f"{record.model}.json" for record in records))
    printed = capsys.readouterr().out
    assert printed.strip("\n") == "\n".join(side_by_side(records))
    run(monkeypatch, tmp_path / "bert.json")
    assert capsys.readouterr().out.strip("\n") == "\n".join(side_by_side(records[:1]))
    for cell in records[1].budgets:
        if (cell.approximation, cell.parameters["each"]) == ("optimal_v_oblivious", "own"):
            row = f"perplexity with these, {cell.parameters['share']:.0%}"
            [line] = (line for line in printed.splitlines() if line.startswith(row))
            assert f"{cell.value:,.2f}" in line
    assert "not alike: metric is cosine and perplexity" in printed
    named = [replace(record, model=f"{'a' * 40}-{record.model}") for record in records]
    header, *rows = side_by_side(named)
    assert header.split() == [record.model for record in named]
    assert len({len(row) for row in (header, *rows[:-2])}) == 1
    [row] = (line for line in printed.splitlines() if line.startswith("layers, heads, head size"))
    assert row.split()[-6:] == ["2,", "2,", "8", "2,", "2,", "8"]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_explain_writes_one_page_of_the_whole_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file, sentence = tmp_path / "page.html", " ".join(["W1. w2", *words(10).split(), "other."])
    for _ in range(2):  # the page of an earlier run is replaced
        value_aware(monkeypatch, "explain", folder / name, sentence, "--output", file)
    assert capsys.readouterr().out == f"{file}\n" * 2
    page = file.read_text()
    assert OURS in page and page.count(f"“{sentence}”") >= 2 and "PNG" not in page
    (data,) = re.findall(r'id="explorer-data">([^<]*)<', page)
    content = json.loads(zlib.decompress(b64decode(data)))["exploration"]
    (shown,) = json.loads(content)["models"]
    ends = ["<s>", "</s>"] if name == "bert" else ["<s>"]
    assert shown["name"] == name and len(shown["tokens"]) == len(sentence.split()) + len(ends)
    assert "".join(shown["tokens"]).split() == [*ends[:1], *sentence.split(), *ends[1:]]
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a model of 48 positions, whose tokenizer drops what takes no room."""
    from tokenizers import normalizers
    from transformers import BertConfig, BertForMaskedLM

    folder, tokens = tmp_path_factory.mktemp("masked"), tokenizer()
    tokens.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokens.save_pretrained(folder)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(BertConfig(**sizes, vocab_size=len(tokens))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "sentence",
    [
        "w1 <mask> w2.",
        "w1 </s> w2 <s> .",
        f"W1 {words(40)}. W2 w3.",  # the first sentence could be a passage alone
        "w1. w2! w3? w4",
        words(46),
    ],
)
def test_explain_shows_any_text_whole(masked: Path, tmp_path: Path, sentence: str) -> None:
    page = tmp_path / "page.html"
    explain(str(masked), sentence, page)
    (data,) = re.findall(r'id="explorer-data">([^<]*)<', page.read_text())
    (shown,) = json.loads(json.loads(zlib.decompress(b64decode(data)))["exploration"])["models"]
    written = "".join("".join(shown["tokens"]).split())
    assert written == "".join(f"<s>{sentence}</s>".split())


@pytest.mark.parametrize(("sentence", "count"), [("\u200b", 0), (words(47), 47)])
def test_explain_tells_the_tokens_of_a_text_that_is_none_or_too_long(
    masked: Path, tmp_path: Path, sentence: str, count: int
) -> None:
    line = f"^the text has {count} tokens; .* take 1 to 46, beside"
    assert_refused(line, explain, str(masked), sentence, tmp_path / "page.html")


def test_explain_shows_a_character_of_several_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = {x: n for n, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_bytes = Tokenizer(models.BPE(letters, []))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=by_bytes).save_pretrained(tmp_path / "bytes")
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=1, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "bytes")
    page = tmp_path / "page.html"
    value_aware(monkeypatch, "explain", tmp_path / "bytes", "A key 😀.", "--output", page)
    assert "“A key 😀.”" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("/no/such/model w1", "/no/such/model: no such folder"),
        ("{bert} _", "the sentence is empty"),
        ("{bert} w1 --output {mine.html}", "mine.html; give a new file or an earlier page"),
        ("{bert} w1 --output {bert}", "bert; give a new file or an earlier page"),
        ("{bert} w1 --output {none/a.html}", "a.html; give a new file or an earlier page"),
        ("{bert} " + "w1_" * 15, "the text has 15 tokens; the page and the model take 1 to 14, "),
        ("{gpt2} " + "w1_" * 32, "the text has 32 tokens; the page and the model take 1 to 31, "),
        ("{bare} w1", "has no tokenizer"),
    ],
)
def test_explain_refuses_in_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, line: str
) -> None:
    (folder / "mine.html").write_text("mine")
    words = [folder / word[1:-1] if word.startswith("{") else word for word in arguments.split()]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        value_aware(monkeypatch, "explain", words[0], str(words[1]).replace("_", " "), *words[2:])
    message = str(stopped.value.code)
    assert message.startswith("error: ") and line in message and "\n" not in message
    assert not list(tmp_path.iterdir()) and (folder / "mine.html").read_text() == "mine"


def test_explain_names_what_a_wheel_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "value_aware_study.explain", None)
    with pytest.raises(SystemExit, match=r"error: .*in a checkout: pip install -e '\.\[study\]'"):
        value_aware(monkeypatch, "explain", "model", "w1")


def test_probe_is_one_of_the_commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="error: --text is missing; "):
        value_aware(monkeypatch, "probe", folder / "bert")
    with pytest.raises(SystemExit):
        value_aware(monkeypatch, "probe", "--help")
    assert "  value-aware probe ./my-llama --text" in capsys.readouterr().out


def test_a_file_of_llama_cpp_is_named_and_its_bos_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    text.write_text("the thing that they thought of then " * 20)
    lines = (": name tiny, licence not stated; 32.00 bits", "every window begins with BOS: a key")
    for bos in (True, False):
        write_gguf(llama(), file, keys={"tokenizer.ggml.add_bos_token": bos})
        options = ["--text", text, "--length", LENGTH, "--json", tmp_path / "record.json"]
        run(monkeypatch, file, *options, *FEW)
        printed = capsys.readouterr().out
        assert [line in printed for line in lines] == [True, bos]
        content = json.loads((tmp_path / "record.json").read_text())
        assert ("begins_with_bos" in content["text"]) == bos and content["bits_a_weight"] == 32


def test_half_precision_is_read_as_another_dtype(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model("bert").half().save_pretrained(tmp_path / "half")
    tokenizer().save_pretrained(tmp_path / "half")
    arguments = [tmp_path / "half", "--text", folder / "text.txt", "--length", LENGTH, *FEW]
    with pytest.raises(SystemExit, match="the model is float16 on a CPU"):
        run(monkeypatch, *arguments)
    run(monkeypatch, *arguments, "--dtype", "float32")
    assert "On half (BertModel) at 16 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("{bert}", "--text is missing; "),
        ("{bert} {gpt2} --text {text.txt} --json a.json", "--json keeps the record of one model"),
        ("{no.json} --json a.json", "--json keeps the record of one model that is measured"),
        ("{bert} --text {no.txt}", "no.txt; "),
        ("{bert} --text {bert/model.safetensors}", "model.safetensors: unknown suffix, allowed"),
        ("{bert} --text {zero.txt}", "zero.txt is binary, not text"),
        ("{bert} --text {bert}", "left out: .json (3), .safetensors (1)"),
        ("{bert} --text {text.txt} --cache {text.txt}", "--cache is "),
        ("{bert} --text {text.txt} --cache /proc/x", "--cache is /proc/x; give a folder that"),
        ("{bert} --text {short.txt} --length 16", "the text has 2 tokens, a window of 16 needs 14"),
        (
            "{bare} --text {text.txt}",
            "has no tokenizer: give a folder that has one (option tokenizer)",
        ),
        ("{bert} --text {text.txt} --length 99", "length is 99; the model has 16 positions"),
        ("{no.json}", "No such file or directory"),
        ("{bert/config.json}", "schema version"),
        ("{bert} --text {text.txt} --length 0", "length is 0; it must be"),
        ("{bert} --text {text.txt} --rows 0", "rows is 0; it must be"),
        ("{bert} --text {text.txt} --caches --sizes 999", "sizes has 999"),
        ("{bert} --text {text.txt} --json {bert}", "give a file in a folder that is there"),
        ("{bert} --text {text.txt} --json {none/a.json}", "give a file in a folder that is there"),
        ("{bert} {no.json} --text {text.txt}", "No such file or directory"),
        ("{bert} {wide.json} --text {text.txt}", "wide.json is damaged"),
        ("{own.json}", "own.json has no measured layers; give the record of a probe"),
        ("/no/such/model --text {text.txt}", "/no/such/model: no such folder"),
    ],
)
def test_an_error_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, line: str
) -> None:
    words = [folder / word[1:-1] if word.startswith("{") else word for word in arguments.split()]
    for name in ("measure", "measure_caches"):
        monkeypatch.setattr(measuring, name, lambda *_, **__: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *words)
    message = str(stopped.value.code)
    assert message.startswith("error: ") and line in message and "\n" not in message


def test_it_reads_texts_as_the_apps_do(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.jsonl").write_text('{"text": "w1"}\n{"text": "w2"}\n')
    with gzip.open(texts / "b.tokens.gz", "wt") as file:
        file.write("w3 w4\r\n")
    (texts / "c.pdf").write_text("w5")
    options = command.parser("").parse_args(["bert", "--text", str(texts)])
    assert command.texts_of(options) == ["w1", "w2", "w3 w4"]
    assert capsys.readouterr().out == f"{texts}: text files read: 2; left out: .pdf (1)\n"


def test_help_and_mistyped_options_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from value_aware_attention.probe.__main__ import value_aware\n"
        "try: value_aware()\nfinally: assert not {'torch', 'altair'} & {*sys.modules}"
    )
    given = {"probe model --help": 0, "probe m --serch=fast": 2, "probe m --search=fats": 2}
    for options, status in (given | {"--help": 0, "explain --help": 0, "explain m": 2}).items():
        done = subprocess.run(
            [sys.executable, "-c", code, *options.split()], capture_output=True, text=True
        )
        assert done.returncode == status, done.stderr


@pytest.mark.slow
def test_it_needs_none_of_the_packages_of_the_study(folder: Path) -> None:
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in STUDY)
    run_it = "runpy.run_module('value_aware_attention.probe', run_name='__main__')"
    code = f"import sys, runpy; {hidden}; {run_it}"
    options = [str(folder / "bert"), "--text", str(folder / "text.txt"), "--length", "16", *FEW]
    done = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bert\nkeys needed")
