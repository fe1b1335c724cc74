"""The adapter is eager attention under every mask, and with a cache; what it refuses is named."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from itertools import permutations

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    PreTrainedModel,
)

from tests.hugging_face.models import (
    DECODERS,
    ENCODERS,
    PADDINGS,
    Recorder,
    batch,
    logits,
    sharp,
)
from tests.refusals import assert_refused
from value_aware_attention import caches
from value_aware_attention.approximations import (
    LSH,
    Exact,
    Linformer,
    Nystrom,
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
)
from value_aware_attention.hugging_face import attention_layers, replace_attention, set_attention
from value_aware_attention.hugging_face.layers import cross_attention_layers
from value_aware_attention.kernels import Elu, Exponential

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture(params=(*ENCODERS, *DECODERS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return sharp(request.param)


@pytest.fixture(params=("roberta", "llama"))
def either(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Builds an encoder and a decoder, for tests that need no other architecture."""
    return sharp(request.param)


def test_exact_equals_eager_and_one_key_does_not(model: PreTrainedModel) -> None:
    for padding in PADDINGS:
        inputs = batch(padding)
        expected = logits(model, inputs)
        torch.testing.assert_close(logits(model, inputs, Exact()), expected, **CLOSE)
        assert (logits(model, inputs, OptimalValueOblivious(1)) - expected).abs().max() > 0.1


@pytest.mark.parametrize("kind", ("modernbert", "mistral", "modernbert-decoder"))
def test_windows_of_a_models_own_are_kept(kind: str) -> None:
    """Windows of 4 tokens hide part of a text of 12."""
    model = sharp(kind)
    inputs = batch(length=12)
    wide = logits(model, inputs)
    for name in ("sliding_window", "local_attention"):
        if hasattr(model.config, name):
            setattr(model.config, name, 4)
    for module in model.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 4
    expected = logits(model, inputs)
    assert (expected - wide).abs().max() > 0.1
    torch.testing.assert_close(logits(model, inputs, Exact()), expected, **CLOSE)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision_stays_as_close_as_eager(
    either: PreTrainedModel, dtype: torch.dtype
) -> None:
    inputs = batch()
    expected = logits(either, inputs)
    either.to(dtype)
    eager = logits(either, inputs)
    found = logits(either, inputs, Exact())
    assert found.dtype == dtype
    errors = [(x.float() - expected).abs().max() / expected.abs().max() for x in (found, eager)]
    assert errors[0] < 2 * errors[1] + 1e-3
    with replace_attention(either, OptimalValueAware(2)):  # solves, and so needs fp32 inside
        assert logits(either, inputs).isfinite().all()


def registered() -> list[set[str]]:
    """Lists the names of attentions and of masks that transformers has."""
    return [set(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)]


def test_it_restores_after_an_exception(either: PreTrainedModel) -> None:
    inputs, names = batch(), registered()
    expected = logits(either, inputs)
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        replace_attention(either, OptimalValueOblivious(1)),
    ):
        raise RuntimeError("on purpose")
    assert torch.equal(logits(either, inputs), expected)
    assert either.config._attn_implementation == "eager" and registered() == names
    assert not any(module._forward_pre_hooks for module in either.modules())


def test_contexts_may_be_left_in_any_order(either: PreTrainedModel) -> None:
    """The innermost context that is still open computes, as with generators or notebook cells."""
    inputs, names = batch(), registered()
    alone = [logits(either, inputs, OptimalValueOblivious(r)) for r in (1, 2, 4)]
    exact = logits(either, inputs)
    for order in permutations(range(3)):
        contexts = [replace_attention(either, OptimalValueOblivious(r)) for r in (1, 2, 4)]
        for context in contexts:
            context.__enter__()
        for place, number in enumerate(order):
            assert torch.equal(logits(either, inputs), alone[max(order[place:])])
            contexts[number].__exit__(None, None, None)
        assert torch.equal(logits(either, inputs), exact)
        assert either.config._attn_implementation == "eager" and registered() == names


def test_a_second_thread_is_refused_until_the_first_has_left() -> None:
    model, inputs = sharp("llama"), batch()
    copy, other = deepcopy(model), sharp("roberta")

    def used(model: PreTrainedModel) -> torch.Tensor:
        return logits(model, inputs, OptimalValueOblivious(1))

    expected = used(model), used(other)
    refusal = "^another thread has the attention of this Llama[a-zA-Z]+ replaced: make a copy"
    with ThreadPoolExecutor(1) as thread, replace_attention(model, OptimalValueOblivious(2)):
        inside = logits(model, inputs)
        for shared in (model, model.model):
            assert_refused(refusal, thread.submit(used, shared).result)
        assert torch.equal(thread.submit(used, copy).result(), expected[0])
        assert torch.equal(thread.submit(used, other).result(), expected[1])
        assert torch.equal(logits(model, inputs), inside)
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(used, model).result(), expected[0])


def test_what_a_thread_left_open_when_it_ended_is_no_obstacle() -> None:
    model, inputs = sharp("llama"), batch()
    own, open_context = logits(model, inputs), replace_attention(model, OptimalValueOblivious(1))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(open_context.__enter__).result()
    torch.testing.assert_close(logits(model, inputs, Exact()), own, **CLOSE)
    open_context.__exit__(None, None, None)
    assert torch.equal(logits(model, inputs), own)


def test_nothing_keeps_a_model_or_a_method_alive() -> None:
    model, method = sharp("roberta"), OptimalValueOblivious(1)
    logits(model, batch(), method)
    gone = [weakref.ref(x) for x in (model, method)]
    del model, method
    gc.collect()
    assert [x() for x in gone] == [None, None]


def test_every_config_of_a_composite_model_gets_back_its_own() -> None:
    """Only a private attribute of transformers tells the names that are put back."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}
    parts = BertConfig(**small), BertConfig(**small, is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*parts)).eval()
    model.set_attn_implementation({"": "eager", "encoder": "eager", "decoder": "sdpa"})
    configs = [model.config, model.encoder.config, model.decoder.config]

    def names() -> list[str]:
        return [config._attn_implementation for config in configs]

    inputs = batch("none") | {"decoder_input_ids": torch.arange(5, 12).expand(3, 7)}
    with torch.no_grad():
        expected = model(**inputs).logits
        with replace_attention(model, Exact()):
            assert len({*names()}) == 1
            torch.testing.assert_close(model(**inputs).logits, expected, **CLOSE)
    assert names() == ["eager", "eager", "sdpa"]
    with ExitStack() as part:
        with replace_attention(model, Exact()):
            part.enter_context(replace_attention(model.encoder, Exact()))
        assert names()[::2] == ["eager", "sdpa"] and names()[1] != "eager"
    assert names() == ["eager", "eager", "sdpa"]


def test_layers_can_be_chosen_and_are_counted_in_the_order_of_their_calls(
    model: PreTrainedModel,
) -> None:
    inputs, order, one_key = batch(), [], OptimalValueOblivious(1)

    def numbered(layer: int) -> nn.Module:
        method = Exact()
        method.register_forward_hook(lambda *call: order.append(layer))
        return method

    expected, calls = logits(model, inputs), list(range(model.config.num_hidden_layers))
    if model.config.model_type == "albert":  # one module, called once for each of its layers
        calls = [0 for _ in calls]
    torch.testing.assert_close(logits(model, inputs, numbered), expected, **CLOSE)
    assert order == calls
    order.clear()
    logits(model, inputs, numbered, layers=[calls[-1]])
    assert set(order) == {calls[-1]}
    torch.testing.assert_close(logits(model, inputs, one_key, layers=[]), expected, **CLOSE)
    assert (logits(model, inputs, one_key, layers=[0]) - expected).abs().max() > 1e-2


def test_a_chosen_head_gets_the_method_and_the_others_the_exact_output() -> None:
    class Counting(nn.Module):
        def forward(self, query, key, value, **options):
            return torch.full_like(query, 7.0 * query.shape[1])

    model, outputs = sharp("llama"), []
    layer = attention_layers(model)[0]
    layer.o_proj.register_forward_pre_hook(lambda module, inputs: outputs.append(inputs[0]))
    logits(model, batch(), Counting(), layers=[0], heads=[2])
    logits(model, batch(), Exact())
    replaced, exact = (output.unflatten(-1, (4, -1)) for output in outputs)
    assert (replaced[..., 2, :] == 7).all()  # of one head
    assert torch.equal(replaced[..., [0, 1, 3], :], exact[..., [0, 1, 3], :])


def test_the_kernel_has_the_models_own_scaling_unless_another_is_given() -> None:
    model, inputs, recorder = sharp("gpt2"), batch(), Recorder()
    for layer in attention_layers(model):
        layer.scaling = 0.123
    expected = logits(model, inputs)
    torch.testing.assert_close(logits(model, inputs, recorder), expected, **CLOSE)
    assert {call["kernel"] for call in recorder.calls} == {Exponential(0.123)}
    assert (logits(model, inputs, recorder, kernel=Elu()) - expected).abs().max() > 0.1
    assert recorder.calls[-1]["kernel"] == Elu()


@pytest.mark.parametrize(
    ("kind", "padding"), [("llama", "none"), ("llama", "right"), ("bert", "none"), ("bert", "left")]
)
def test_causal_masks_arrive_as_is_causal_and_padding_alone(kind: str, padding: str) -> None:
    """Methods without a mask for every pair can then take a padded text."""
    inputs, recorder = batch(padding), Recorder()
    logits(sharp(kind), inputs, recorder, layers=[0])
    mask = None if padding == "none" else inputs["attention_mask"].bool()[:, None, None]
    assert recorder.calls[0]["is_causal"] == (kind == "llama")
    torch.testing.assert_close(recorder.calls[0]["attn_mask"], mask)


def test_a_decoder_that_its_config_makes_bidirectional_is_one() -> None:
    model, inputs = sharp("llama"), batch()
    model.config.is_causal = False
    expected = logits(model, inputs)
    assert (expected - logits(sharp("llama"), inputs)).abs().max() > 0.1
    torch.testing.assert_close(logits(model, inputs, Exact()), expected, **CLOSE)
    assert logits(model, inputs, LSH(12, 1, 0)).isfinite().all()


def test_gradients_of_exact_are_those_of_eager_and_kept_keys_have_some(
    either: PreTrainedModel,
) -> None:
    names = ("query.weight", "key.weight", "value.weight", "q_proj.weight", "k_proj.weight")
    weights = [weight for name, weight in either.named_parameters() if name.endswith(names)]

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(either(**batch("none")).logits.square().mean(), weights)

    expected = gradients()
    with replace_attention(either, Exact()):
        torch.testing.assert_close(gradients(), expected, atol=1e-3, rtol=1e-3)
    with replace_attention(either, OptimalValueOblivious(3)):
        assert all(x.isfinite().all() and (x != 0).any() for x in gradients())


def test_set_attention_takes_masks_and_refuses_as_replace_attention_does() -> None:
    model, inputs = sharp("llama"), batch("left")
    expected = logits(model, inputs)
    for given, named in (
        (Exact(), "approximation is of type Exact; it must be a function from"),
        (lambda layer: None, r"approximation\(0\) is None; it must be a module"),
        (lambda layer: LSH(4, 1, layer), "LSH does not support causal .*LlamaForCausalLM is"),
    ):
        assert_refused(named, set_attention, model, given)
    assert torch.equal(logits(model, inputs), expected)
    set_attention(model, lambda layer: Exact())
    torch.testing.assert_close(logits(model, inputs), expected, **CLOSE)
    assert_refused("output_attentions", model, **inputs, output_attentions=True)


def enter(model: nn.Module, method: nn.Module | None = None, **options: object) -> None:
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
    model, names = sharp(kind), registered()
    assert_refused(named, enter, model)
    assert model.config._attn_implementation == "eager" and registered() == names


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
        ({"heads": [-1, 2]}, r"heads are \[-1, 2\]; the model has heads 0 to 3, not -1"),
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
    assert_refused(named, enter, sharp("llama"), **options)


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
    model, options = sharp("bert"), batch() | {"output_attentions": True}
    with replace_attention(model, Exact()):
        for part in (model, model.bert):
            assert_refused("output_attentions cannot be honoured", part, **options)
        assert_refused("output_attentions", setattr, model.config, "output_attentions", True)
    assert model(**options).attentions[0].shape == (3, 4, 12, 12)
    model.config.output_attentions = True
    assert_refused(r"config\.output_attentions = False", enter, model)


def test_attention_dropout_is_refused_in_training_only() -> None:
    model = sharp("gpt2").train()
    for layer in attention_layers(model):
        layer.attn_dropout.p = 0.5
    with replace_attention(model, Exact()), pytest.raises(ValueError, match=r"0\.5; .*model\.eval"):
        model(**batch())
    enter(model.eval())


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"softcap": 5.0}, "the model passes logit soft-capping"),
        ({"s_aux": torch.zeros(4)}, "the model passes attention sinks"),
        ({"position_bias": torch.zeros(1)}, "the model passes a position bias"),
        ({"head_mask": torch.ones(4)}, "the model passes a head_mask"),
        ({"temperature": 2.0}, "passes temperature, which is not known here"),
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
        else:
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


WITH_A_CACHE = {
    "exact": Exact(),
    "one key": OptimalValueOblivious(1),
    "window": SlidingWindow(3),
}
NEW = 4


def generated(model: PreTrainedModel, inputs: dict, **options: object) -> torch.Tensor:
    config = GenerationConfig(
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return torch.stack(model.generate(**inputs, generation_config=config, **options).logits)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("method", WITH_A_CACHE)
def test_a_cache_changes_nothing(kind: str, method: str) -> None:
    model, inputs = sharp(kind), batch("left", length=8)
    with replace_attention(model, WITH_A_CACHE[method]):
        whole = generated(model, inputs, use_cache=False)
        cached = generated(model, inputs, use_cache=True)
    torch.testing.assert_close(cached, whole, atol=1e-3, rtol=1e-3)
    if method == "exact":
        torch.testing.assert_close(whole, generated(model, inputs), atol=1e-3, rtol=1e-3)
