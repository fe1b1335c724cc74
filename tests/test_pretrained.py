"""The app measures a pretrained encoder: a tiny one in a package made here."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel, BertTokenizerFast

from pipelines.app import composed
from tests.apps import ROOT, refusal, run_app
from value_aware_attention.measurement import Record
from value_aware_study.evaluation.pretrained import weights_of

# Warnings of libraries that tests of our own code cannot mend.
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [
    "the",
    "key",
    "of",
    "a",
    "query",
    "and",
    "its",
    "value",
    "are",
    "weighed",
    "by",
    "attention",
]
LENGTH = 12


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs a package with a tiny encoder, which must be found without an import."""
    folder = tmp_path / "site/tiny_encoder"
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 17}
    model = BertModel(BertConfig(**size, intermediate_size=16, max_position_embeddings=LENGTH))
    for weight in model.parameters():
        weight.data *= 8 if weight.ndim > 1 else 1  # random attention would be uniform
    model.save_pretrained(folder / "model")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder / "model")
    (folder / "__init__.py").write_text("raise ImportError('it is found, not imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, start in enumerate(("a query", "too short", "the value", "its key", "of a key")):
        words = [start] if number == 1 else [start, *(3 * WORDS)]
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


def command(texts: Path, *more: str) -> str:
    corpus = f"{{_target_:value_aware_study.data.text.TextFiles,path:{texts}}}"
    options = [
        "pretrained.weights=package:tiny_encoder/model", "~pretrained.texts.networkx",
        f"+pretrained.texts.local={corpus}", "~pretrained.texts.pandas",
        "probe.windows=3", f"probe.length={LENGTH}", "probe.rows=4", "pretrained.model=tiny",
        "pretrained.description=made_up",
    ]  # fmt: skip
    return " ".join(["probe", "pretrained=minilm", *options, *more])


@pytest.mark.slow
def test_the_app_writes_a_record_and_its_figures(
    package: Path, texts: Path, tmp_path: Path
) -> None:
    target = "{_target_:value_aware_attention.kernels."
    kernels = f"probe.kernels=[{target}Polynomial,degree:2}},{target}Elu}}]"
    run_app(command(texts, "probe.between=true", "probe.skewness_gap=true", kernels), tmp_path)
    folder = tmp_path / "outputs/smoke/records/probe/tiny"
    text = (folder / "record.json").read_text()
    record = Record.from_json(text)
    assert {"model_output_error.png", "index.html"} <= {path.name for path in folder.iterdir()}
    assert str(tmp_path) not in text
    assert (record.model, record.metric, record.text.description) == ("tiny", "cosine", "made_up")
    assert [(a.kernel, a.post_hoc) for a in record.attention] == [
        ("exponential", False), ("polynomial", True), ("elu", True),
    ]  # fmt: skip
    for attention in record.attention:
        curves = attention.output_error
        assert (curves.layers, curves.heads, curves.head_dim, curves.units) == (2, 2, 8, 3)
        assert curves.keys == LENGTH and curves.rows == 4 * 2 * 3 and len(curves.methods) == 10
        assert (attention.skewness_gap is not None) == (attention.kernel == "exponential")
    degrees = [cell.degree for cell in record.attention[0].skewness_gap.cells]
    assert degrees == 2 * [None, 0, 2, 4, 6]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("pretrained.weights=package:no_such/a", "no such package, or no such path in it"),
        ("pretrained.weights=./elsewhere", "./elsewhere: no such folder"),
        ("probe.length=13", "the model has 12 positions"),
        ("probe.search=quick", "fast, default, best"),
        ("model=tiny", "probe.model is tiny, pretrained minilm; give one of them"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    package: Path, texts: Path, tmp_path: Path, change: str, named: str
) -> None:
    assert named in refusal(command(texts, change), tmp_path)
    assert not (tmp_path / "outputs/smoke/records/probe").exists()


def test_the_encoder_that_is_committed_about_is_the_one_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has six layers of twelve heads."""
    monkeypatch.chdir(ROOT)
    cfg = composed("probe", ["pretrained=minilm"]).pretrained
    model = AutoModel.from_pretrained(weights_of(cfg), local_files_only=True).eval()
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (6, 12)
