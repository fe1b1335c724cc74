"""A silent hub, a missing folder and pickled or damaged weights are each refused in one line."""

import pickle
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from tests.apps import refusal
from tests.refusals import assert_refused
from value_aware_attention.hugging_face import saved
from value_aware_attention.models import build_roberta, load_masked, warm_start
from value_aware_study.data.tokenization import PretrainedTokenizer
from value_aware_study.training.fit import CheckpointFiles

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serves a hub that takes connections and never answers, and yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        yield endpoint


@pytest.mark.slow
def test_a_silent_hub_is_known_within_ten_seconds(silent: str) -> None:
    start = time.monotonic()
    assert not saved.hub_answers()
    assert time.monotonic() - start < 10


def test_so_is_one_whose_name_nobody_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver whose packets are dropped tries for longer than any timeout of HTTP."""
    ended = Event()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.example.org")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: ended.wait(60))
    monkeypatch.setattr(saved, "SECONDS_TO_ANSWER", 0.5)
    start = time.monotonic()
    assert not saved.hub_answers()
    assert time.monotonic() - start < 5
    ended.set()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("probe model={text}/.. tokenizer=some/tokenizer text={text}", "some/tokenizer"),
        ("train_masked length=short length.warm_start=some/roberta", "some/roberta"),
        ("corpus corpus=wikitext103", "wikitext"),
    ],
)
def test_every_app_names_what_a_silent_hub_was_asked_for(
    tmp_path: Path, silent: str, command: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "SECONDS_TO_ANSWER", 0.5)
    (tmp_path / "text.txt").write_text("some words")
    line = refusal(command.format(text=tmp_path / "text.txt"), tmp_path)
    assert name in line and "not answer" in line and "folder" in line


def test_a_missing_folder_of_a_tokenizer_is_named_as_one() -> None:
    assert_refused(
        r"^\./nowhere: no such folder$",
        PretrainedTokenizer(path="./nowhere").build,
        [],
        error=FileNotFoundError,
    )


START = {"vocabulary_size": 60, "length": 8, "block": 8, "dropout": 0.0}


@pytest.fixture
def saved_roberta(tmp_path: Path) -> Path:
    model = build_roberta(**START, layers=1, width=16, heads=2, feedforward=16)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_weights_that_are_a_pickle_are_never_read(
    saved_roberta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = saved_roberta / "model.safetensors"
    torch.save(load_file(weights), saved_roberta / "pytorch_model.bin")
    weights.unlink()
    monkeypatch.setattr(torch, "load", lambda *given, **options: pytest.fail("a pickle was read"))
    line = "weights at .* cannot be loaded: .*safetensors"
    assert_refused(line, warm_start, saved_roberta, error=OSError, **START)
    assert_refused("safetensors", load_masked, saved_roberta, error=OSError)


def test_weights_that_are_cut_off_are_named(saved_roberta: Path) -> None:
    weights = saved_roberta / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    line = f"weights at {saved_roberta} cannot be loaded"
    assert_refused(line, warm_start, saved_roberta, error=OSError, **START)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was run",))


def test_a_checkpoint_that_would_run_code_is_refused_in_one_line(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path)
    torch.save({"state": Hostile()}, files.last, pickle_module=pickle)
    assert_refused(
        r"last\.ckpt is no checkpoint of this program", files.load_checkpoint, files.last
    )


def test_a_file_that_is_there_is_not_said_to_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "damaged.gguf"
    file.touch()
    assert saved.why_not(file, OSError("it is no model\nat all")) == "it is no model"
