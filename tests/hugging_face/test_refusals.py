"""Models and options that no approximation can honour are refused by name on entry."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from tests.hugging_face.models import Recorder, batch, logits, sharp
from tests.refusals import assert_refused
from value_aware_attention import caches
from value_aware_attention.approximations import (
    LSH,
    Exact,
    Linformer,
    Nystrom,
    OptimalValueOblivious,
)
from value_aware_attention.hugging_face import attention_layers, replace_attention
from value_aware_attention.hugging_face.layers import cross_attention_layers
from value_aware_attention.kernels import Elu

pytestmark = pytest.mark.filterwarnings("ignore")


def enter(model: nn.Module, method: nn.Module | None = None, **options: object) -> None:
    """Enters the context and leaves it without a forward pass."""
    with replace_attention(model, method or Exact(), **options):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("deberta-v2", "DebertaV2ForMaskedLM has no attention that"),
        ("gemma2", r"Gemma2ForCausalLM caps its attention scores \(logit soft-capping\)"),
        ("gpt_oss", "GptOssForCausalLM has attention sinks"),
        ("t5", "T5ForConditionalGeneration (adds a position bias|has no attention that)"),
    ],
)
def test_models_are_refused_at_entry_and_left_as_they_were(kind: str, named: str) -> None:
    model, known = sharp(kind), set(AttentionInterface._global_mapping)
    assert_refused(named, enter, model)
    assert model.config._attn_implementation == "eager"
    assert set(AttentionInterface._global_mapping) == known


def test_what_is_not_a_transformers_model_is_refused() -> None:
    assert_refused("model is a Linear; it must be a transformers", enter, nn.Linear(2, 2))


@pytest.mark.parametrize("method", (LSH(4, 1, 0), Linformer(4, 0), Nystrom(4)))
def test_methods_that_would_leak_are_refused_for_causal_models(method: nn.Module) -> None:
    named = rf"{type(method).__name__} does not support causal .*LlamaForCausalLM is causal"
    assert_refused(named, enter, sharp("llama"), method)
    enter(sharp("llama"), method, layers=[])
    assert logits(sharp("bert"), batch(), method).isfinite().all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": [5]}, r"layers are \[5\]; the model has layers 0 to 3, not 5"),
        ({"layers": [0, -1]}, r"layers are \[-1, 0\]; the model has layers 0 to 3, not -1"),
        ({"heads": [4]}, r"heads are \[4\]; the model has heads 0 to 3, not 4"),
        ({"heads": [-1, 2]}, r"heads are \[-1, 2\]; .* 0 to 3, not -1"),
        ({"layers": 1}, "layers is 1; it must be a list of integers"),
        ({"layers": [True]}, r"layers is \[True\]; it must be a list of integers"),
        ({"layers": "01"}, "layers is '01'; it must be a list of integers"),
        ({"heads": 2}, "heads is 2; it must be a list of integers"),
        ({"heads": [0.0]}, r"heads is \[0.0\]; it must be a list of integers"),
        ({"kernel": Elu}, r"kernel is the class Elu; it must be a kernel such as kernels"),
        ({"kernel": "elu"}, r"kernel is 'elu'; it must be a kernel such as kernels"),
    ],
)
def test_layers_and_heads_that_do_not_exist(options: dict, named: str) -> None:
    for kind in ("roberta", "llama"):
        assert_refused(named, enter, sharp(kind), **options)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (
            OptimalValueOblivious,
            r"approximation is the class OptimalValueOblivious; it must be an instance, "
            r"OptimalValueOblivious\(\.\.\.\), or a function from a layer's number to one",
        ),
        (
            caches.ValueAware(8),
            r"approximation is the cache method ValueAware; it must be an approximation, such as "
            r"caches.AfterPrefix\(ValueAware\(\.\.\.\), prefix=\.\.\.\)",
        ),
        ("exact", r"approximation is 'exact'; it must be a module, such as Exact\(\)"),
        ([Exact()], r"approximation is of type list; it must be a module, such as Exact\(\)"),
        (lambda layer: None, r"approximation\(0\) is None; it must be a module, such as Exact"),
        (lambda layer: Exact, r"approximation\(0\) is the class Exact; it must be an instance"),
        (lambda layer: caches.Recent(8), r"approximation\(0\) is the cache method Recent; it "),
    ],
)
def test_what_cannot_stand_for_attention_is_refused_on_entry(method: object, named: str) -> None:
    model = sharp("llama")
    for layers in (None, [0]):
        assert_refused(f"^{named}", enter, model, method, layers=layers)
    assert model.config._attn_implementation == "eager"


def test_attention_weights_cannot_be_asked_for() -> None:
    model, inputs = sharp("bert"), batch()
    with replace_attention(model, Exact()):
        for part in (model, model.bert):
            assert_refused(
                "output_attentions cannot be honoured", part, **inputs, output_attentions=True
            )
        with pytest.raises(ValueError, match="output_attentions"):
            model.config.output_attentions = True
    assert model(**inputs, output_attentions=True).attentions[0].shape == (3, 4, 12, 12)
    model.config.output_attentions = True
    assert_refused(r"config\.output_attentions = False", enter, model)


def test_attention_dropout_is_refused_in_training_only() -> None:
    model = sharp("gpt2").train()
    for layer in attention_layers(model):
        layer.attn_dropout.p = 0.5
    with replace_attention(model, Exact()), pytest.raises(ValueError, match=r"0\.5; .*model\.eval"):
        model(**batch())
    with replace_attention(model.eval(), Exact()):
        logits(model, batch())


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"softcap": 5.0}, "the model passes logit soft-capping"),
        ({"s_aux": torch.zeros(4)}, "the model passes attention sinks"),
        ({"position_bias": torch.zeros(1)}, "the model passes a position bias"),
        ({"head_mask": torch.ones(4)}, "the model passes a head_mask"),
        ({"temperature": 2.0}, "passes temperature, which is not known here"),
        ({"scale_of_heads": torch.ones(4)}, "passes scale_of_heads, which is not known here"),
        ({"hidden_pairs": torch.ones(2, 2) > 0}, "passes hidden_pairs, which is not known here"),
        ({"position_ids": torch.arange(12), "sliding_window": 4, "softcap": None}, None),
    ],
)
def test_whatever_reaches_the_attention_and_would_change_it(
    option: dict, named: str | None
) -> None:
    model = sharp("llama")
    layer = attention_layers(model)[0]
    forward = type(layer).forward
    layer.forward = lambda *inputs, **options: forward(layer, *inputs, **(options | option))
    with replace_attention(model, Exact()):
        if named is None:
            assert logits(model, batch()).isfinite().all()
            return
        assert_refused(named, logits, model, batch())


def attending_to_another(kind: str) -> tuple[PreTrainedModel, Callable[[], torch.Tensor]]:
    """Builds a model with cross-attention, and a function that computes its logits."""
    model, other = sharp(kind), torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(0))
    inputs = batch("none")
    if kind == "bart":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :7]
        return model, lambda: model(**inputs).logits
    config = model.config
    config.add_cross_attention = config.is_decoder = True
    with torch.random.fork_rng():
        model = type(model)(config).eval()
        model.set_attn_implementation("eager")
    return model, lambda: model(**inputs, encoder_hidden_states=other).logits


@pytest.mark.parametrize("kind", ("bart", "bert", "gpt2"))
@torch.no_grad()
def test_attention_to_another_sequence_stays_exact(kind: str) -> None:
    model, outputs = attending_to_another(kind)
    crossing, expected = cross_attention_layers(model), outputs()
    assert crossing and not set(crossing) & set(attention_layers(model))
    recorder = Recorder()
    with replace_attention(model, recorder):
        torch.testing.assert_close(outputs(), expected, atol=1e-4, rtol=1e-4)
    assert len(recorder.calls) == len(attention_layers(model))
    assert all(call["query"].shape == call["key"].shape for call in recorder.calls)
