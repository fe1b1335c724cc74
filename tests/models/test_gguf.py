"""A GGUF file is loaded as the model that was written, or refused in one line."""

from pathlib import Path

import pytest
import torch

from tests.models.gguf_files import llama, write_gguf
from tests.refusals import assert_refused
from value_aware_attention import approximations, hugging_face, probe
from value_aware_attention.models.checkpoints import checkpoint_files

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.randint(3, 30, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(llama(), tmp_path / "tiny.F32.gguf")


@pytest.mark.parametrize("given", ["file", "folder"])
def test_it_is_the_model_that_was_written(file: Path, given: str, tmp_path: Path) -> None:
    name = str(file if given == "file" else file.parent)
    model, expected = hugging_face.load_model(name), llama()
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    assert model.dtype == torch.float32 and not model.training
    assert hugging_face.load_tokenizer(name).decode([3, 4]) == "ab"
    assert checkpoint_files(name) == [file]
    model.save_pretrained(tmp_path / "saved")
    again = hugging_face.load_model(str(tmp_path / "saved"))
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_other_quantisations_are_dequantised(tmp_path: Path) -> None:
    file = write_gguf(llama(), tmp_path / "tiny.Q8_0.gguf", quantised=True)
    exact, ours = llama()(TOKENS).logits, hugging_face.load_model(str(file))(TOKENS).logits
    assert 0 < (ours - exact).abs().mean() < 0.1 * exact.abs().mean()
    assert hugging_face.load_model(str(file), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_it_is_probed_and_its_attention_replaced(file: Path) -> None:
    model, _ = probe.loaded(str(file))
    exact = model(TOKENS).logits
    with hugging_face.replace_attention(model, approximations.MeanValueSlot(30)):
        torch.testing.assert_close(model(TOKENS).logits, exact)


def test_what_is_no_model_is_named(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for content in (b"", b"GGUF", whole[:200], whole[: len(whole) // 2], b"\0" * 500):
        file.write_bytes(content)
        with pytest.raises((OSError, ValueError)) as refused:
            hugging_face.load_model(str(file))
        message = str(refused.value)
        assert str(file) in message and "\n" not in message, message
    missing = tmp_path / "missing.gguf"
    assert_refused(
        r"missing\.gguf: no such file",
        hugging_face.load_model,
        str(missing),
        error=FileNotFoundError,
    )
    (tmp_path / "second.gguf").write_bytes(b"")
    assert_refused(r"has 2 GGUF files: give one, such as", hugging_face.load_tokenizer, tmp_path)
