"""Masked models with an attention of their own: in training, in a folder, and back."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import RobertaForMaskedLM

from tests.models.test_mixing import MIXINGS
from tests.refusals import assert_refused
from tests.training.tiny import LearnedScale, masked_batch, masked_module
from value_aware_attention.approximations import Exact, SlidingWindow
from value_aware_attention.hugging_face import replace_attention
from value_aware_attention.kernels import Elu
from value_aware_attention.models import TrainedAttention, attend_with, load_masked, save_masked
from value_aware_study.training.modules import MaskedTraining
from value_aware_study.training.plan import one_step

LEARNED = TrainedAttention("tests.training.tiny.LearnedScale", {"head_dim": 8, "seed": 0})
ATTENTIONS = {
    "learned": LEARNED,
    "window": TrainedAttention("value_aware_attention.approximations.SlidingWindow", {"r": 3}),
    **MIXINGS,
}


class OnlyElu(LearnedScale):
    """Approximates attention with the Elu kernel alone."""

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
    in_optimizer = {
        id(p)
        for group in module.configure_optimizers()["optimizer"].param_groups
        for p in group["params"]
    }
    assert {id(layer.scale) for layer in layers} <= in_optimizer
    assert one_step(module, masked_batch(0))["loss"] > 0


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_saved_model_comes_back(tmp_path: Path, name: str) -> None:
    model = trained(ATTENTIONS[name]).model
    save_masked(model, tmp_path)
    again = load_masked(tmp_path)
    assert not again.training
    torch.testing.assert_close(logits(again), logits(model))
    files = {"config.json", "model.safetensors", "attention.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == files


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
    for attention, named in (
        (asdict(window(3)), r"not those of SlidingWindow\(r=3\): .*approximation.scale"),
        (None, "names no attention: train the model again"),
    ):
        model.config.trained_attention = attention
        model.config.save_pretrained(tmp_path)
        assert_refused(named, load_masked, tmp_path)
    model.config.trained_attention = asdict(LEARNED)
    model.config.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "attention.safetensors")
    weights.popitem()
    save_file(weights, tmp_path / "attention.safetensors")
    assert_refused(r"not those of LearnedScale", load_masked, tmp_path)


def test_replaced_attention_goes_before_a_models_own_and_it_returns() -> None:
    model = trained(window(2)).model
    windowed, exact = logits(model), logits(trained(None, steps=0).model)
    assert not torch.allclose(windowed, exact, atol=1e-2)
    with replace_attention(model, Exact()):
        assert (logits(model) - windowed).abs().max() > 1e-2
    with replace_attention(model, SlidingWindow(2)):
        torch.testing.assert_close(logits(model), windowed)
    assert torch.equal(logits(model), windowed)


def test_padding_is_hidden_from_a_models_own_attention() -> None:
    model = trained(LEARNED).model.eval()
    tokens = masked_batch(7)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, 8:] = 0
    visible, other = mask.bool(), tokens.where(mask.bool(), 9)
    first, second = (
        model(input_ids=t, attention_mask=mask).logits[visible] for t in (tokens, other)
    )
    torch.testing.assert_close(first, second)
    assert (model(input_ids=other).logits[visible] - first).abs().max() > 1e-3


def test_a_method_of_another_kernel_computes_that_one() -> None:
    only = TrainedAttention("tests.models.test_masked_lm.OnlyElu", {"head_dim": 8, "seed": 0})
    model = trained(None, steps=0).model
    methods = [only(layer) for layer in range(2)]
    with replace_attention(model, lambda layer: methods[layer], kernel=Elu()):
        expected = logits(model)
    torch.testing.assert_close(logits(attend_with(model, only)), expected)


def test_attention_dropout_is_refused_by_name() -> None:
    module = masked_module(dropout=0.1)
    assert_refused(
        r"attention dropout is 0\.1; .*or train without it$", attend_with, module.model, window(3)
    )
    attend_with(module.model, MIXINGS["FourierMixing"])  # nothing is dropped from a mixing
    assert one_step(module, masked_batch(0))["loss"] > 0
