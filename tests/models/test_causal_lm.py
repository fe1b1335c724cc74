"""The causal LM against fairseq's architecture, and the swapping and saving of its parts."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from value_aware_attention.approximations import Exact, SlidingWindow
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial
from value_aware_attention.models import CausalLanguageModel, TrainedAttention
from value_aware_attention.models.causal_lm import sinusoidal_positions


def tiny(kernel: Kernel | None = None, **changes: int) -> CausalLanguageModel:
    torch.manual_seed(0)
    size = {"vocabulary_size": 50, "layers": 3, "width": 16, "heads": 2, "feedforward": 32}
    model = CausalLanguageModel(**{**size, **changes}, kernel=kernel or Exponential(), dropout=0.0)
    return model.eval()


def tokens(length: int = 12) -> Tensor:
    return torch.randint(50, (2, length), generator=torch.Generator().manual_seed(1))


def torch_decoder(model: CausalLanguageModel) -> nn.TransformerEncoder:
    """The same network from torch's own layers, with the weights of `model`."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    decoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16), enable_nested_tensor=False)
    for theirs, ours in zip(decoder.layers, model.layers, strict=True):
        attention = ours.attention
        theirs.self_attn.in_proj_weight.data = attention.query_key_value.weight.data
        theirs.self_attn.in_proj_bias.data = attention.query_key_value.bias.data
        theirs.self_attn.out_proj.load_state_dict(attention.output.state_dict())
        theirs.norm1.load_state_dict(ours.attention_norm.state_dict())
        theirs.norm2.load_state_dict(ours.feedforward_norm.state_dict())
        theirs.linear1.load_state_dict(ours.feedforward[0].state_dict())
        theirs.linear2.load_state_dict(ours.feedforward[2].state_dict())
    decoder.norm.load_state_dict(model.final_norm.state_dict())
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
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-4, atol=1e-5)


def test_positions_are_sines_then_cosines() -> None:
    positions = sinusoidal_positions(9, 8)
    for n, i in [(0, 0), (3, 1), (8, 3)]:
        angle = n * 10000 ** (-i / 3)
        assert positions[n, i] == pytest.approx(math.sin(angle), abs=1e-6)
        assert positions[n, 4 + i] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("kernel", [Exponential(), Polynomial(), Elu()])
def test_no_position_sees_the_future(kernel: Kernel) -> None:
    model, one, other = tiny(kernel), tokens(), tokens()
    other[:, 7:] = (other[:, 7:] + 1) % 50
    before, after = model(one), model(other)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-2)


def test_kernels_give_different_models() -> None:
    outputs = [tiny(kernel)(tokens()) for kernel in (Exponential(), Polynomial(), Elu())]
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    assert not torch.allclose(outputs[1], outputs[2], atol=1e-3)


@pytest.mark.parametrize("kernel", [Exponential(), Polynomial(), Elu()])
def test_initial_loss_is_near_uniform_and_gradients_are_finite(kernel: Kernel) -> None:
    model = tiny(kernel, vocabulary_size=50).train()
    loss = nn.functional.cross_entropy(
        model(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()
    )
    loss.backward()
    assert loss.item() == pytest.approx(math.log(50), abs=1.0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)


def test_replaced_attention_and_its_restoration() -> None:
    model = tiny()
    exact, methods = model(tokens()), [layer.attention.method for layer in model.layers]
    with model.replaced_attention(SlidingWindow(2)) as same:
        assert same is model
        windowed = model(tokens())
        with model.replaced_attention(Exact()):
            torch.testing.assert_close(model(tokens()), exact)
        torch.testing.assert_close(model(tokens()), windowed)
    assert not torch.allclose(windowed, exact, atol=1e-3)
    assert [layer.attention.method for layer in model.layers] == methods
    assert torch.equal(model(tokens()), exact)


class Recorder(nn.Module):
    def __init__(self, layer: int, calls: list[object]) -> None:
        super().__init__()
        self.layer, self.calls = layer, calls

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        self.calls.append((self.layer, tuple(query.shape), options))
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def test_a_callable_gives_every_layer_its_own_module() -> None:
    model, calls = tiny(), []
    exact = model(tokens())
    with model.replaced_attention(lambda layer: Recorder(layer, calls)):
        torch.testing.assert_close(model(tokens()), exact)
    options = {"kernel": Exponential(), "is_causal": True}
    assert calls == [(layer, (2, 2, 12, 8), options) for layer in range(3)]


def test_attention_is_restored_after_an_exception() -> None:
    model = tiny()
    methods = [layer.attention.method for layer in model.layers]
    with pytest.raises(KeyError), model.replaced_attention(SlidingWindow(2)):
        raise KeyError
    with pytest.raises(IndexError), model.replaced_attention([SlidingWindow(2)].__getitem__):
        pass
    assert [layer.attention.method for layer in model.layers] == methods


@pytest.mark.parametrize("kernel", [Exponential(), Exponential(0.5), Polynomial(4), Elu()])
def test_a_saved_model_comes_back(tmp_path: Path, kernel: Kernel) -> None:
    model = tiny(kernel)
    model.save(tmp_path / "model")
    again = CausalLanguageModel.load(tmp_path / "model", kernel=kernel, vocabulary_size=50)
    assert again.kernel == kernel
    assert not again.training
    assert torch.equal(again(tokens()), model(tokens()))
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


def test_loading_another_model_than_asked_for(tmp_path: Path) -> None:
    tiny(Polynomial(2)).save(tmp_path)
    with pytest.raises(ValueError, match=r"kernel Polynomial\(degree=2\), not Elu\(\)$"):
        CausalLanguageModel.load(tmp_path, kernel=Elu())
    with pytest.raises(ValueError, match=r"50 tokens, the vocabulary has 51$"):
        CausalLanguageModel.load(tmp_path, vocabulary_size=51)
    with pytest.raises(FileNotFoundError, match="train the model first"):
        CausalLanguageModel.load(tmp_path / "nothing")


def trained(attention: TrainedAttention | None, kernel: Kernel, steps: int = 4) -> Tensor:
    """Logits after a few steps of plain gradient descent on sharpened attention."""
    model = tiny(kernel)
    if attention:
        model.attend_with(attention)
    model.double()
    for layer in model.layers:
        layer.attention.query_key_value.weight.data *= 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
    return model(tokens()).detach()


@pytest.mark.parametrize("kernel", [Exponential(), Polynomial(), Elu()])
def test_training_with_a_window_over_everything_is_training_with_exact(kernel: Kernel) -> None:
    name = "value_aware_attention.approximations.SlidingWindow"
    exact, start = trained(None, kernel), trained(None, kernel, steps=0)
    assert (exact - start).abs().max() > 0.1
    wide = trained(TrainedAttention(name, {"r": 12}), kernel)
    torch.testing.assert_close(wide, exact)
    assert (trained(TrainedAttention(name, {"r": 2}), kernel) - exact).abs().max() > 0.05


def test_a_model_with_an_attention_of_its_own_comes_back(tmp_path: Path) -> None:
    learned = TrainedAttention("tests.training.tiny.LearnedScale", {"head_dim": 8, "seed": 0})
    model = tiny().attend_with(learned)
    factors = [layer.attention.method.scale for layer in model.layers]
    assert len({id(p) for p in model.parameters()} & {id(p) for p in factors}) == 3
    assert len({p.sum().item() for p in factors}) == 3
    for p in factors:
        p.data.normal_()
    model.save(tmp_path)
    again = CausalLanguageModel.load(tmp_path)
    assert again.attention == learned
    assert torch.equal(again(tokens()), model(tokens()))
    assert all(not p.is_meta for p in again.parameters())
    again.save(tmp_path / "again")  # what was loaded knows its attention
    assert TrainedAttention.load(tmp_path / "again") == learned


@pytest.mark.parametrize("config", [{}, {"kernel": {"name": "os", "arguments": {}}}])
def test_loading_a_foreign_config(tmp_path: Path, config: dict[str, object]) -> None:
    tiny().save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not describe|is not one of"):
        CausalLanguageModel.load(tmp_path)


def test_width_must_fit_the_heads() -> None:
    with pytest.raises(ValueError, match="width is 16; it must be even and divisible by heads = 3"):
        tiny(heads=3)
