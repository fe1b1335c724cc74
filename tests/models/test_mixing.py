"""Mixing without attention equals FNet's sublayer, and ignores padding."""

import pytest
import torch
from torch import Tensor
from transformers import FNetConfig, RobertaForMaskedLM
from transformers.models.fnet.modeling_fnet import FNetFourierTransform

from tests.refusals import assert_refused
from value_aware_attention.kernels import Exponential
from value_aware_attention.models import (
    FourierMixing,
    LinearMixing,
    RandomMixing,
    TrainedAttention,
    attend_with,
    build_roberta,
)
from value_aware_attention.models.mixing import Mixing, MixingSublayer

MODULE = "value_aware_attention.models.mixing"
SIZE = {"length": 12, "width": 16, "seed": 0}
MIXINGS = {
    "FourierMixing": TrainedAttention(f"{MODULE}.FourierMixing", {}),
    "LinearMixing": TrainedAttention(f"{MODULE}.LinearMixing", SIZE),
    "RandomMixing": TrainedAttention(f"{MODULE}.RandomMixing", SIZE),
}


def hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain() -> RobertaForMaskedLM:
    torch.manual_seed(0)
    return build_roberta(
        vocabulary_size=60, layers=2, width=16, heads=2, feedforward=32,
        length=12, block=12, dropout=0.0,
    ).eval()  # fmt: skip


@pytest.fixture(params=MIXINGS)
def model(request: pytest.FixtureRequest) -> RobertaForMaskedLM:
    model = attend_with(plain(), MIXINGS[request.param])
    for layer in model.roberta.encoder.layer:
        for weights in layer.attention.mixing.parameters():
            weights.data *= 20  # as it starts, linear mixing adds next to nothing
    return model


def test_the_sublayer_is_that_of_transformers_fnet() -> None:
    torch.manual_seed(0)
    theirs = FNetFourierTransform(FNetConfig(hidden_size=16)).double().eval()
    norm = theirs.output.LayerNorm
    norm.weight.data.normal_(), norm.bias.data.normal_()
    x = hidden(2, 7, 16)
    ours, nothing = MixingSublayer(FourierMixing(), norm)(x)
    torch.testing.assert_close(ours, theirs(x)[0])
    assert nothing is None


@pytest.mark.parametrize("kind", [LinearMixing, RandomMixing])
def test_matrix_mixing_multiplies_both_sides(kind: type[LinearMixing]) -> None:
    mixing, x = kind(5, 4, seed=0).double(), hidden(2, 3, 4)
    expected = torch.zeros_like(x)
    for n in range(3):  # a sequence shorter than the matrix uses its first rows and columns
        for i in range(3):
            expected[:, n] += mixing.positions[n, i] * (x[:, i] @ mixing.hidden)
    torch.testing.assert_close(mixing(x), expected)
    assert_refused(r"of 6 x 4; it mixes at most 5 positions, of width 4$", mixing, hidden(1, 6, 4))
    assert_refused("of 3 x 8; it mixes", mixing, hidden(1, 3, 8))


def test_matrices_are_drawn_from_the_seed_at_the_scale_of_fnets_code() -> None:
    state = torch.random.get_rng_state()
    learned, fixed, other = (
        LinearMixing(90, 60, 3),
        RandomMixing(90, 60, 3),
        RandomMixing(90, 60, 4),
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(RandomMixing(90, 60, 3).positions, fixed.positions)
    assert not torch.equal(other.positions, fixed.positions)
    assert learned.positions.std().item() == pytest.approx(0.02, rel=0.05)
    assert learned.hidden.std().item() == pytest.approx(0.02, rel=0.05)
    assert fixed.positions.std().item() == pytest.approx(90**-0.5, rel=0.05)
    assert fixed.hidden.std().item() == pytest.approx(60**-0.5, rel=0.05)


@pytest.mark.parametrize("arguments", [(0, 4, 0), (4, 0, 0), (4, 4, -1)])
def test_sizes_and_seeds_are_checked(arguments: tuple[int, int, int]) -> None:
    assert_refused(r"^(length|width|seed) is .*must be an integer >= ", RandomMixing, *arguments)


def test_only_linear_mixing_learns() -> None:
    assert not list(RandomMixing(4, 4, 0).parameters())
    assert set(RandomMixing(4, 4, 0).state_dict()) == {"positions", "hidden"}
    mixing = LinearMixing(4, 4, 0)
    mixing(torch.randn(1, 4, 4)).square().sum().backward()
    assert all(p.grad is not None and (p.grad != 0).all() for p in mixing.parameters())


def test_half_precision_is_transformed_in_fp32() -> None:
    x = hidden(2, 128, 64).bfloat16()
    ours = FourierMixing()(x)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, FourierMixing()(x.double()).bfloat16(), rtol=1e-2, atol=1e-2)


def test_everything_but_the_attention_is_kept(model: RobertaForMaskedLM) -> None:
    mixed = {n for n, m in model.named_modules() if isinstance(m, Mixing)}
    assert len(mixed) == 2
    parts = ("self.query", "self.key", "self.value", "output.dense")
    replaced = {f"{place}.{kind}" for place in parts for kind in ("weight", "bias")}
    expected = plain().state_dict()
    for name, value in model.state_dict().items():
        if not any(name.startswith(f"{mixing}.") for mixing in mixed):
            assert torch.equal(value, expected.pop(name))
    assert {name.split("attention.")[1] for name in expected} == replaced


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_stands_in_padding_moves_nothing(
    model: RobertaForMaskedLM, implementation: str
) -> None:
    model.set_attn_implementation(implementation)
    tokens = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, 8:] = 0
    other = tokens.where(mask.bool(), tokens.roll(1, dims=1))
    visible = mask.bool()
    before = model(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(
        model(input_ids=other, attention_mask=mask).logits[visible], before[visible]
    )
    moved = (model(input_ids=other).logits - model(input_ids=tokens).logits)[0, :8]
    assert moved.abs().max() > 1e-3  # without the mask they do
    whole = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    assert torch.equal(whole, model(input_ids=tokens).logits)


def test_a_causal_model_has_no_place_for_it() -> None:
    for attention in MIXINGS.values():
        assert_refused(
            f"^{attention.name} lets every position see all",
            attention.check_trainable,
            kernel=Exponential(),
            length=12,
            head_dim=8,
            is_causal=True,
        )
        attention.check_trainable(kernel=Exponential(), length=12, head_dim=8, is_causal=False)
