"""Masked models with an attention of their own, or mixing: in training, in a folder, and back."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FNetConfig, PreTrainedConfig, RobertaForMaskedLM
from transformers.models.fnet.modeling_fnet import FNetFourierTransform

from tests.refusals import assert_refused
from tests.training.tiny import LearnedScale, masked_batch, masked_module
from value_aware_attention.approximations import Exact, SlidingWindow
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.kernels import Elu, Exponential
from value_aware_attention.models import (
    FourierMixing,
    LinearMixing,
    RandomMixing,
    TrainedAttention,
    attend_with,
    build_roberta,
    load_masked,
    save_masked,
)
from value_aware_attention.models.mixing import Mixing, MixingSublayer
from value_aware_study.training.modules import MaskedTraining
from value_aware_study.training.plan import one_step

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
    learned, fixed = LinearMixing(90, 60, 3), RandomMixing(90, 60, 3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not list(fixed.parameters()) and set(fixed.state_dict()) == {"positions", "hidden"}
    assert torch.equal(RandomMixing(90, 60, 3).positions, fixed.positions)
    assert not torch.equal(RandomMixing(90, 60, 4).positions, fixed.positions)
    deviations = [x.std().item() for x in (*learned.parameters(), *fixed.buffers())]
    assert deviations == pytest.approx([0.02, 0.02, 90**-0.5, 60**-0.5], rel=0.05)


@pytest.mark.parametrize("arguments", [(0, 4, 0), (4, 0, 0), (4, 4, -1)])
def test_sizes_and_seeds_are_checked(arguments: tuple[int, int, int]) -> None:
    assert_refused(r"^(length|width|seed) is .*must be an integer >= ", RandomMixing, *arguments)


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
        if not name.startswith(tuple(f"{mixing}." for mixing in mixed)):
            assert torch.equal(value, expected.pop(name))
    assert {name.split("attention.")[1] for name in expected} == replaced


def padding_moves_nothing(model: RobertaForMaskedLM) -> None:
    """Checks that tokens hidden by the mask move no other's logits, and do without the mask."""
    tokens = torch.randint(5, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    visible = torch.arange(12) < torch.tensor([[8], [12]])
    other = tokens.where(visible, tokens.roll(1, dims=1))
    before, after = (
        model(input_ids=x, attention_mask=visible.long()).logits[visible] for x in (tokens, other)
    )
    torch.testing.assert_close(after, before)
    moved = model(input_ids=other).logits - model(input_ids=tokens).logits
    assert moved[visible].abs().max() > 1e-3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_stands_in_padding_moves_nothing(
    model: RobertaForMaskedLM, implementation: str
) -> None:
    model.set_attn_implementation(implementation)
    padding_moves_nothing(model)
    tokens = torch.arange(5, 17)[None]
    whole = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    assert torch.equal(whole, model(input_ids=tokens).logits)


def test_a_causal_model_has_no_place_for_it() -> None:
    layer = {"kernel": Exponential(), "length": 12, "head_dim": 8}
    for attention in MIXINGS.values():
        line, check = f"^{attention.name} lets every position see all", attention.check_trainable
        assert_refused(line, check, **layer, is_causal=True)
        check(**layer, is_causal=False)


PACKAGE = "value_aware_attention.approximations"
LAYER = {"kernel": Exponential(), "length": 24, "head_dim": 8}


def attention(name: str, arguments: dict) -> TrainedAttention:
    return TrainedAttention(f"{PACKAGE}.{name}", arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "changed", "line"),
    [
        ("SampledKeys", {"r": 4, "seed": 0}, {}, "^SampledKeys gives no gradients to queries or k"),
        (
            "LSH",
            {"r": 8, "rounds": 2, "seed": 0},
            {"is_causal": True},
            "^LSH does not support is_c",
        ),
        (
            "OrthogonalRandomFeatures",
            {"features": 16, "seed": 0},
            {"is_causal": True, "kernel": Elu()},
            r"got the kernel Elu\(\); it approximates Exponential",
        ),
    ],
)
def test_what_cannot_be_trained_with_is_refused_before_training(
    name: str, arguments: dict, changed: dict, line: str
) -> None:
    check = attention(name, arguments).check_trainable
    assert_refused(line, check, **LAYER | {"is_causal": False} | changed)


def test_every_layer_has_a_module_and_a_seed_of_its_own() -> None:
    lsh = attention("LSH", {"r": 8, "rounds": 2, "seed": 3})
    assert str(lsh) == "LSH(r=8, rounds=2, seed=3)"
    assert [lsh(layer).seed for layer in (0, 1, 5)] == [3000, 3001, 3005]
    first, again, second = (LEARNED(layer) for layer in (0, 0, 1))
    assert isinstance(first, LearnedScale) and first is not again
    assert not torch.equal(first.scale, second.scale)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        *(
            (target, {}, "is neither an approximation of attention nor a mixing$")
            for target in ("os.system", "torch.nn.Linear", "SlidingWindow", "no.such.At", "", "a.")
        ),
        (f"{PACKAGE}.SlidingWindow", {"width": 4}, r"^SlidingWindow\(width=4\): missing .* 'r'"),
        (
            f"{PACKAGE}.SlidingWindow",
            {"r": 4, "width": 4},
            r"^SlidingWindow\(r=4, width=4\): .*unexpected .*'width'",
        ),
    ],
)
def test_what_is_no_method_or_no_argument_of_one_is_refused(
    target: str, arguments: dict, message: str
) -> None:
    assert_refused(message, TrainedAttention(target, arguments), 0)


def described(value: object) -> PreTrainedConfig:
    return PreTrainedConfig(trained_attention=value)


def test_a_checkpoint_runs_no_code_but_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_module.py").write_text(
        "from pathlib import Path\n"
        "from value_aware_attention.approximations import Exact\n"
        f"Path({str(tmp_path / 'executed')!r}).touch()\n"
        "class Method(Exact): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign = described({"target": "foreign_module.Method", "arguments": {}})
    assert_refused(
        r"asks for foreign_module\.Method, and only methods of", TrainedAttention.of, foreign
    )
    assert "foreign_module" not in sys.modules and not (tmp_path / "executed").exists()


@pytest.mark.parametrize("value", ["", [], {}, {"target": 1, "arguments": {}}])
def test_a_damaged_description_is_named(value: object) -> None:
    line = "^trained_attention is .* in the model's config"
    assert_refused(line, TrainedAttention.of, described(value))
    assert TrainedAttention.of(PreTrainedConfig()) is TrainedAttention.of(described(None)) is None


LEARNED = TrainedAttention("tests.training.tiny.LearnedScale", {"head_dim": 8, "seed": 0})
ATTENTIONS = {
    "learned": LEARNED,
    "window": TrainedAttention("value_aware_attention.approximations.SlidingWindow", {"r": 3}),
    **MIXINGS,
}


class OnlyElu(LearnedScale):
    kernels = (Elu,)


SHARPENED = ("query.weight", "key.weight", "value.weight", "attention.output.dense.weight")


def trained(
    attention: TrainedAttention | None, steps: int = 3, dtype: torch.dtype = torch.float32
) -> MaskedTraining:
    """Trains a tiny module for a few steps, with weights so large that attention is sharp."""
    module = masked_module(dropout=0.0)
    if attention:
        attend_with(module.model, attention)
    module.model.to(dtype)
    for name, weight in module.model.named_parameters():
        if name.endswith(SHARPENED):
            weight.data *= 20
    optimizer = module.configure_optimizers()["optimizer"]
    for step in range(steps):
        optimizer.zero_grad()
        module.loss(masked_batch(step)).backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
    return module


def logits(model: RobertaForMaskedLM) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=masked_batch(7)["input_ids"]).logits


def window(r: int) -> TrainedAttention:
    return TrainedAttention("value_aware_attention.approximations.SlidingWindow", {"r": r})


def test_training_with_a_window_over_everything_is_training_with_exact_attention() -> None:
    exact, wide, narrow = (
        logits(trained(attention, dtype=torch.float64).model)
        for attention in (None, window(12), window(2))
    )
    torch.testing.assert_close(wide, exact)
    assert (narrow - exact).abs().max() > 1e-2


def test_what_layers_own_is_trained_and_layers_do_not_share() -> None:
    start = [LEARNED(layer).scale for layer in range(2)]
    module = trained(LEARNED)
    layers = [layer.attention.self.approximation for layer in module.model.roberta.encoder.layer]
    for layer, before in zip(layers, start, strict=True):
        assert (layer.scale != before).all()
    assert not torch.equal(layers[0].scale, layers[1].scale)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_saved_model_comes_back(tmp_path: Path, name: str) -> None:
    model = trained(ATTENTIONS[name]).model
    save_masked(model, tmp_path)
    again = load_masked(tmp_path)
    assert not again.training
    torch.testing.assert_close(logits(again), logits(model))
    files = {"config.json", "model.safetensors", "attention.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == files
    if name == "learned":
        padding_moves_nothing(again)


def test_the_folder_is_one_that_plain_transformers_reads(tmp_path: Path) -> None:
    model = trained(LEARNED).model
    save_masked(model, tmp_path)
    plain, info = RobertaForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.config._attn_implementation != model.config._attn_implementation
    assert (logits(plain) - logits(model)).abs().max() > 1e-3  # with exact attention, though
    methods = [layer.attention.self.approximation for layer in model.roberta.encoder.layer]
    with replace_attention(plain, lambda layer: methods[layer]):
        torch.testing.assert_close(logits(plain), logits(model))


def test_exact_attention_leaves_no_trace(tmp_path: Path) -> None:
    save_masked(trained(None).model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert torch.equal(
        logits(load_masked(tmp_path)), logits(RobertaForMaskedLM.from_pretrained(tmp_path))
    )


def test_weights_of_another_method_are_refused(tmp_path: Path) -> None:
    model = trained(LEARNED).model
    save_masked(model, tmp_path)
    weights = load_file(tmp_path / "attention.safetensors")
    weights.popitem()
    save_file(weights, tmp_path / "attention.safetensors")
    for attention, named in (
        (asdict(LEARNED), "not those of LearnedScale"),
        (asdict(window(3)), r"not those of SlidingWindow\(r=3\): .*approximation.scale"),
        (None, "names no attention: train the model again"),
    ):
        model.config.trained_attention = attention
        model.config.save_pretrained(tmp_path)
        assert_refused(named, load_masked, tmp_path)


def test_replaced_attention_goes_before_a_models_own_and_it_returns() -> None:
    model = trained(window(2)).model
    windowed = logits(model)
    with replace_attention(model, Exact()):
        assert (logits(model) - windowed).abs().max() > 1e-2
    with replace_attention(model, SlidingWindow(2)):
        torch.testing.assert_close(logits(model), windowed)
    assert torch.equal(logits(model), windowed)


def test_a_method_of_another_kernel_computes_that_one() -> None:
    only = TrainedAttention(f"{__name__}.OnlyElu", {"head_dim": 8, "seed": 0})
    model = trained(None, steps=0).model
    with replace_attention(model, only, kernel=Elu()):
        expected = logits(model)
    torch.testing.assert_close(logits(attend_with(model, only)), expected)


def test_attention_dropout_is_refused_by_name() -> None:
    module, line = masked_module(dropout=0.1), r"attention dropout is 0\.1; .*or train without it$"
    assert_refused(line, attend_with, module.model, window(3))
    attend_with(module.model, MIXINGS["FourierMixing"])  # nothing is dropped from a mixing
    assert one_step(module, masked_batch(0))["loss"] > 0
