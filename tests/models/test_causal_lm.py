"""The causal LM equals torch's layers; its attention is replaced, trained and saved."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.hugging_face.models import Recorder
from tests.refusals import assert_refused
from tests.training.tiny import LearnedScale
from value_aware_attention.approximations import SlidingWindow
from value_aware_attention.hugging_face import own_kernel, replace_attention
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial
from value_aware_attention.models import CausalLanguageModel, TrainedAttention
from value_aware_attention.models.causal_lm import sinusoidal_positions


def tiny(kernel: Kernel | None = None, **changes: Any) -> CausalLanguageModel:
    torch.manual_seed(0)
    size = {"vocabulary_size": 50, "layers": 3, "width": 16, "heads": 2, "feedforward": 32}
    model = CausalLanguageModel(**{**size, **changes}, kernel=kernel or Exponential(), dropout=0.0)
    return model.eval()


def tokens(length: int = 12) -> Tensor:
    return torch.randint(50, (2, length), generator=torch.Generator().manual_seed(1))


def logits(model: CausalLanguageModel, read: Tensor | None = None) -> Tensor:
    return model(tokens() if read is None else read).logits


def torch_decoder(model: CausalLanguageModel) -> nn.TransformerEncoder:
    """Builds the network from torch's own layers, with the weights of `model`."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    decoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16), enable_nested_tensor=False)
    names = {
        "attention.query_key_value.": "self_attn.in_proj_",
        "attention.output": "self_attn.out_proj",
        "attention_norm": "norm1", "feedforward_norm": "norm2", "feedforward.0": "linear1",
        "feedforward.2": "linear2", "final_norm": "norm",
    }  # fmt: skip
    weights = model.state_dict()
    for ours, theirs in names.items():
        weights = {name.replace(ours, theirs): weight for name, weight in weights.items()}
    decoder.load_state_dict({name: weights[name] for name in decoder.state_dict()})
    return decoder.eval()


def test_the_paper_size_has_156_million_parameters() -> None:
    with torch.device("meta"):
        model = CausalLanguageModel(
            vocabulary_size=267_744,
            layers=6,
            width=512,
            heads=8,
            feedforward=2048,
            kernel=Exponential(),
            dropout=0.1,
        )
    assert sum(p.numel() for p in model.parameters()) == 156_000_256


def test_equals_torchs_own_transformer() -> None:
    model = tiny()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # biases and norms away from 0 and 1
    table = model.embedding.weight
    embedded = table[tokens()] * 4.0 + sinusoidal_positions(12, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    expected = torch_decoder(model)(embedded, mask=mask) @ table.T
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_positions_are_sines_then_cosines() -> None:
    positions = sinusoidal_positions(9, 8)
    for n, i in [(0, 0), (3, 1), (8, 3)]:
        angle = n * 10000 ** (-i / 3)
        assert positions[n, i] == pytest.approx(math.sin(angle), abs=1e-6)
        assert positions[n, 4 + i] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("kernel", [Exponential(), Polynomial(), Elu()])
def test_initial_loss_is_near_uniform_and_gradients_are_finite(kernel: Kernel) -> None:
    model = tiny(kernel).train()
    predicted = logits(model)[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(predicted, tokens()[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    assert loss.item() == pytest.approx(math.log(50), abs=1.0)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_a_replaced_attention_is_called_with_the_models_kernel_and_gone_afterwards() -> None:
    model, made = tiny(Elu()), [Recorder() for _ in range(3)]
    exact = logits(model)
    with replace_attention(model, lambda layer: made[layer]):
        assert torch.equal(logits(model), exact)
    for (call,) in (recorder.calls for recorder in made):
        assert call["query"].shape == (2, 2, 12, 8) and call["kernel"] == Elu()
        assert call["attn_mask"] is None and call["is_causal"]
    with replace_attention(model, SlidingWindow(1)):
        assert not torch.allclose(logits(model), exact, atol=1e-3)
    assert own_kernel(model) == Elu() and torch.equal(logits(model), exact)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_that_is_not_padding(side: str) -> None:
    model, read = tiny(), tokens()
    mask = torch.ones_like(read)
    mask[0, slice(0, 3) if side == "left" else slice(9, 12)] = 0
    other = torch.where(mask.bool(), read, (read + 1) % 50)
    first, second = (model(t, attention_mask=mask).logits[mask.bool()] for t in (read, other))
    torch.testing.assert_close(first, second)
    assert side == "right" or not torch.allclose(first, logits(model)[mask.bool()], atol=1e-3)


@pytest.mark.parametrize("kernel", [Exponential(), Exponential(0.5), Polynomial(4), Elu()])
def test_a_saved_model_comes_back(tmp_path: Path, kernel: Kernel) -> None:
    model = tiny(kernel)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    for auto in (CausalLanguageModel, AutoModelForCausalLM):
        again = auto.from_pretrained(tmp_path)
        assert type(again) is CausalLanguageModel and not again.training
        assert own_kernel(again) == kernel
        assert torch.equal(logits(again), logits(model))
        sizes = again.config  # under the names of transformers
        assert (sizes.vocab_size, sizes.num_hidden_layers, sizes.hidden_size) == (50, 3, 16)
        assert (sizes.num_attention_heads, sizes.intermediate_size) == (2, 32)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "does not describe a CausalLanguageModel"),
        (
            {"vocabulary_size": 50, "kernel": {"name": "Elu", "arguments": {}}},
            "train the model again",
        ),
        ({"model_type": "gpt2"}, "does not describe a CausalLanguageModel"),
    ],
)
def test_a_folder_of_another_model_is_refused(
    tmp_path: Path, config: dict[str, object], named: str
) -> None:
    tiny().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(rf"^{tmp_path}.*{named}", CausalLanguageModel.from_pretrained, tmp_path)


def test_an_unknown_kernel_is_refused(tmp_path: Path) -> None:
    model = tiny()
    model.config.kernel = {"name": "os", "arguments": {}}
    model.save_pretrained(tmp_path)
    assert_refused("kernel 'os' is not one of", AutoModelForCausalLM.from_pretrained, tmp_path)


def test_weights_that_are_not_there_are_neither_made_up_nor_unpickled(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["layers.1.attention.output.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    line = "lacks weights of Linear: train the model again"
    assert_refused(line, CausalLanguageModel.from_pretrained, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")  # a pickle, which is not read
    load = AutoModelForCausalLM.from_pretrained
    assert_refused(r"model\.safetensors", load, tmp_path, error=OSError)


def test_a_model_with_an_attention_of_its_own_comes_back(tmp_path: Path) -> None:
    learned = TrainedAttention(
        f"{LearnedScale.__module__}.LearnedScale", {"head_dim": 8, "seed": 0}
    )
    model = tiny(trained_attention=learned)
    names = [name for name, _ in model.named_parameters() if name.endswith("approximation.scale")]
    assert len({model.get_parameter(name).sum().item() for name in names}) == 3  # drawn apart
    for name in names:
        model.get_parameter(name).data.normal_()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert TrainedAttention.of(again.config) == learned
    assert torch.equal(logits(again), logits(model))


def test_width_must_fit_the_heads() -> None:
    assert_refused("width is 16; it must be even and divisible by heads = 3", tiny, heads=3)
