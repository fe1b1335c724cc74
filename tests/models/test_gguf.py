"""A GGUF file is loaded as the model that was written, or refused in one line."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.gguf_files import drawn, llama, write_gguf
from tests.refusals import assert_refused
from value_aware_attention import caches, hugging_face, probe
from value_aware_attention.models.checkpoints import checkpoint_files

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.randint(3, 30, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(llama(), tmp_path / "tiny.F32.gguf")


@pytest.mark.parametrize("given", ["file", "folder"])
def test_it_is_the_model_that_was_written(file: Path, given: str, tmp_path: Path) -> None:
    name = str(file if given == "file" else file.parent)
    model, tokens = probe.loaded(name)
    assert torch.equal(model(TOKENS).logits, llama()(TOKENS).logits)
    assert model.dtype == torch.float32 and not model.training
    assert tokens.decode([3, 4]) == "ab" and checkpoint_files(name) == [file]
    model.save_pretrained(tmp_path / "saved")
    again = hugging_face.load_model(str(tmp_path / "saved"))
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_other_quantisations_are_dequantised(tmp_path: Path) -> None:
    file = str(write_gguf(llama(), tmp_path / "tiny.Q8_0.gguf", quantised=True))
    exact, ours = llama()(TOKENS).logits, hugging_face.load_model(file)(TOKENS).logits
    assert 0 < (ours - exact).abs().mean() < 0.1 * exact.abs().mean()
    assert hugging_face.load_model(file, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_what_is_no_model_is_named(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for content in (b"", b"GGUF", whole[:200], whole[: len(whole) // 2], b"\0" * 500):
        file.write_bytes(content)
        named = re.escape(str(file))
        assert_refused(named, hugging_face.load_model, str(file), error=(OSError, ValueError))
    missing, line = tmp_path / "missing.gguf", r"missing\.gguf: no such file"
    assert_refused(line, hugging_face.load_model, str(missing), error=FileNotFoundError)
    (tmp_path / "second.gguf").write_bytes(b"")
    assert_refused("has 2 GGUF files: give one, such as", hugging_face.load_tokenizer, tmp_path)


ROTATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "factors": ("llama", {}, {"rope_freqs.weight": np.linspace(1, 3, 4)}),
    "linear": ("qwen3", {"qwen3.rope.scaling.factor": 3.0}, {}),
    "yarn": ("qwen2", {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 3.0}, {}),
    "local": ("gemma3", {"gemma3.rope.freq_base_swa": 99.0}, {}),
    "short and long": (
        "phi3", {"phi3.rope.scaling.original_context_length": 16},
        {"rope_factors_short.weight": np.ones(4), "rope_factors_long.weight": np.arange(1, 5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROTATIONS)
def test_scaled_rotations_are_saved_and_turn_queries(kind: str, tmp_path: Path) -> None:
    architecture, keys, tensors = ROTATIONS[kind]
    file = write_gguf(drawn(architecture), tmp_path / "a.gguf", keys=keys, tensors=tensors)
    model = hugging_face.load_model(str(file))
    model.save_pretrained(tmp_path / "saved")
    again = hugging_face.load_model(str(tmp_path / "saved"))
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    other = drawn(architecture)(TOKENS).logits
    assert (model(TOKENS).logits - other).abs().max() > 1e-3 * other.abs().max()
    if kind == "factors":
        turned = drawn(architecture)
        turned.model.rotary_emb.inv_freq /= torch.tensor(tensors["rope_freqs.weight"])
        torch.testing.assert_close(after_compression(model), after_compression(turned))


def after_compression(model: Any) -> torch.Tensor:
    """Generates behind a compressed cache, whose queries were turned to later positions."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with hugging_face.compressed_cache(model, caches.LeaveOneOut, keep=1 / 4, observed="continued"):
        return torch.stack(model.generate(TOKENS, max_new_tokens=3, **options).logits)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_queries_by_its_width(
    architecture: str, layers: int, tmp_path: Path
) -> None:
    """No key tells it: llama.cpp, too, knows these models by the number of their layers."""
    sizes = {"num_hidden_layers": layers, "head_dim": 16, "sliding_window": 512}
    expected = drawn(architecture, **sizes, query_pre_attn_scalar=8)
    model = hugging_face.load_model(str(write_gguf(expected, tmp_path / "a.gguf")))
    assert model.config.query_pre_attn_scalar == 8
    torch.testing.assert_close(model(TOKENS).logits, expected(TOKENS).logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_tensors_that_are_missing_are_named(architecture: str, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write_gguf(drawn(architecture), file, without=r"blk\.1\.(attn_norm|ffn_down)\.weight")
    layers = "transformer.h" if architecture == "gpt2" else "model.layers"
    assert_refused(
        rf"lacks weights of its config: {layers}\.1\.\S+, {layers}\.1\.\S+: give a whole one",
        hugging_face.load_model,
        str(file),
    )


@pytest.mark.parametrize(
    ("keys", "without", "line"),
    [
        ({"general.architecture": "falcon"}, "", "the architecture falcon is not read .*only lla"),
        ({"llama.attention.head_count_kv": [2, 4]}, "", r"head_count_kv = \[2, 4\]"),
        ({"llama.attention.head_count": [4, 4]}, "", "no single llama.attention.head_count"),
        ({"llama.embedding_length": 64}, "", "weights of other sizes than its config"),
        ({}, "llama.attention.layer_norm_rms_epsilon", "no single llama.attention.layer_norm_rms"),
        ({"split.count": 3}, "", r"is one of 3 parts: join a-00001-of-00003\.gguf, a-00002-of-0"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(
    keys: dict[str, Any], without: str, line: str, tmp_path: Path
) -> None:
    file = tmp_path / "a-00001-of-00003.gguf"
    write_gguf(llama(), file, keys=keys, without=without or "nothing")
    assert_refused(line, hugging_face.load_model, str(file))


def test_a_file_is_described_by_its_keys_and_tensors(tmp_path: Path) -> None:
    from value_aware_attention.models.gguf_files import bits_a_weight, described

    file = tmp_path / "a.gguf"
    write_gguf(llama(), file, keys={"general.license": "mit"}, quantised=True)
    assert ": name tiny, licence mit; " in described(file)
    sizes = {name: weight.numel() for name, weight in llama().named_parameters()}
    bits = sum((8.5 if "proj" in name else 32) * sizes[name] for name in sizes)
    expected = bits / sum(sizes.values())  # Q8_0: 32 bytes and 2 of a scale
    assert bits_a_weight(file) == pytest.approx(expected)
    write_gguf(llama(), file, without="general.name")
    line = "name not stated, licence not stated; 32.00 bits a weight"
    assert described(file).endswith(line) and "\n" not in described(file)
    assert bits_a_weight(tmp_path) is not None and bits_a_weight("organisation/tiny") is None


def test_a_folder_has_a_model_beside_other_parts(file: Path) -> None:
    folder, content = file.parent, file.read_bytes()
    file.rename(folder / "MODEL.GGUF")
    for other in ("mmproj-f16.gguf", "tiny-mmproj.gguf", "tiny-00002-of-00003.gguf"):
        (folder / other).write_bytes(content)
    for name in (folder / "MODEL.GGUF", folder):
        assert hugging_face.load_model(str(name)).config.model_type == "llama"
        assert checkpoint_files(str(name)) == [folder / "MODEL.GGUF"]
    (folder / "tiny-00001-of-00003.gguf").write_bytes(content)
    assert_refused("has 2 GGUF files: give one", hugging_face.load_model, str(folder))


def test_a_damaged_count_does_not_read_without_an_end(file: Path) -> None:
    before, key, after = file.read_bytes().partition(b"tokenizer.ggml.token_type")
    file.write_bytes(before + key + after[:8] + (2**60).to_bytes(8, "little") + after[16:])
    for load in (hugging_face.load_model, hugging_face.load_tokenizer):
        assert_refused(r"tiny\.F32\.gguf is damaged \(", load, str(file))


def test_without_its_package_a_file_is_refused_in_a_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gguf", "value_aware_attention.models.gguf_files"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_refused("cannot be loaded: .*gguf", hugging_face.load_model, str(file))
