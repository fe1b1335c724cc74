"""Cache methods in Hugging Face models: groups, projections, rotations, and the second pass."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, RobertaConfig, RobertaForCausalLM

from docs.architectures import quiet, tiny
from tests.caches.methods import METHODS, Spy
from tests.caches.slow import spaced
from tests.hugging_face.models import Recorder, batch, logits, sharp
from tests.refusals import assert_refused
from value_aware_attention import caches
from value_aware_attention.approximations import Exact
from value_aware_attention.call import Layer
from value_aware_attention.hugging_face import attention_layers, replace_attention, set_attention
from value_aware_attention.hugging_face.recording import recording
from value_aware_attention.hugging_face.sharing import grouped
from value_aware_attention.hugging_face.traits import Traits, traits_of

pytestmark = pytest.mark.filterwarnings("ignore")
PREFIX, R = 9, 6
CLOSE = {"atol": 2e-4, "rtol": 2e-4}
OBSERVED = ("last", "causal", "noncausal", "continued", "repeat", "hindsight")


@pytest.fixture(params=("llama", "gpt2"))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Builds models of four query heads, with two key-value heads and with four."""
    return sharp(request.param)


def after(method: caches.CacheMethod, **options: object) -> caches.AfterPrefix:
    return caches.AfterPrefix(
        method, **{"prefix": PREFIX, "rows": 6, "sinks": 1, "recent": 2} | options
    )


def enter(model: PreTrainedModel, method: object) -> None:
    with replace_attention(model, method):
        pass


def recorded(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[dict]:
    """Records the call of each layer, with keys and values repeated for every query head."""
    recorder = Recorder()
    logits(model, inputs, recorder)
    return recorder.calls


@pytest.mark.parametrize("observed", OBSERVED)
def test_every_method_runs_and_restores(model: PreTrainedModel, observed: str) -> None:
    inputs = batch("left", rows=2)
    before = logits(model, inputs)
    some = ("expected_attention", "critical_values", "value_aware_refitted")
    is_llama = model.config.model_type == "llama"
    for name in METHODS if is_llama and observed == "noncausal" else some:
        found = logits(model, inputs, after(METHODS[name](R), observed=observed), layers=[1])
        assert found.isfinite().all() and not torch.allclose(found, before, **CLOSE)
    assert torch.equal(logits(model, inputs), before)
    assert not any(x._forward_pre_hooks or x._forward_hooks for x in model.modules())


def test_keeping_the_whole_prefix_is_the_model(model: PreTrainedModel) -> None:
    for padding in ("none", "left", "right"):
        inputs = batch(padding)
        before = logits(model, inputs)
        torch.testing.assert_close(
            logits(model, inputs, after(caches.Recent(PREFIX))), before, **CLOSE
        )


@pytest.mark.parametrize(
    "observed",
    ["noncausal", *(pytest.param(one, marks=pytest.mark.slow) for one in ("last", "hindsight"))],
)
def test_an_encoder_keeps_one_set_for_all_queries(observed: str) -> None:
    model, inputs = sharp("bert"), batch()
    before = logits(model, inputs)
    for build in METHODS.values():
        spy = Spy(build(R))
        found = logits(model, inputs, after(spy, prefix=None, observed=observed), layers=[1])
        assert found.isfinite().all() and not torch.allclose(found, before, **CLOSE)
        assert {kept.indices.flatten(1, -2).shape[1:] for kept in spy.kept} == {(4, R)}
        assert sum(len(kept.indices) for kept in spy.kept) == 3
    torch.testing.assert_close(
        logits(model, inputs, after(caches.Recent(12), prefix=None)), before, **CLOSE
    )
    refused = after(caches.Recent(R), prefix=None)
    assert_refused("^AfterPrefix does not support causal attention ", enter, sharp("gpt2"), refused)


def test_heads_of_a_group_keep_the_same_keys() -> None:
    """The first layer's output is that of the method on two groups of two heads."""
    model, inputs = sharp("llama"), batch("left")
    call, spy = recorded(model, inputs)[0], Spy(caches.ObservedAttention(R))
    method, outputs = after(spy, observed="causal"), []
    hook = attention_layers(model)[0].o_proj.register_forward_pre_hook(
        lambda module, given: outputs.append(given[0])
    )
    logits(model, inputs, method)
    hook.remove()
    assert spy.kept[0].indices.shape[1:] == (2, R) and spy.seen[0].query.shape[1:3] == (2, 2)
    grouped = method(
        call["query"].unflatten(1, (2, 2)), call["key"][:, ::2, None], call["value"][:, ::2, None],
        kernel=call["kernel"], attn_mask=call["attn_mask"][:, None], is_causal=True,
    )  # fmt: skip
    heads = outputs[-1].unflatten(-1, (2, 2, -1)).movedim(1, 3)
    torch.testing.assert_close(heads, grouped, **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "opt", "phi"])
def test_the_output_projection_is_found(kind: str) -> None:
    """Projected with what methods are shown, heads are the module's output up to its bias."""
    model, inputs = sharp(kind), batch("none", rows=1)
    spy, outputs = Spy(caches.CriticalValues(caches.KeyNorm(R))), []
    handle = attention_layers(model)[0].register_forward_hook(
        lambda *call: outputs.append(call[-1][0])
    )
    first = recorded(model, inputs)[0]
    handle.remove()
    logits(model, inputs, after(spy))
    heads = Exact()(*(first[name] for name in ("query", "key", "value")), is_causal=True,
                    kernel=first["kernel"])  # fmt: skip
    projection = spy.seen[0].projection.reshape(4, first["value"].shape[-1], -1)
    bias = outputs[-1] - torch.einsum("bhnv,hve->bne", heads, projection)
    torch.testing.assert_close(bias, bias[:, :1].expand_as(bias), **CLOSE)


@pytest.mark.parametrize(
    ("kind", "turned", "projects"),
    [
        *((kind, "tttt", True) for kind in ("llama", "qwen3", "mistral", "gpt_neox", "phi")),
        ("gpt2", "----", True),
        ("bert", "----", False),  # its projection is elsewhere
        ("gemma3_text", "tttt", True),  # one set of frequencies for each type of layer
        ("gemma4_text", "tttt", True),
        ("olmo3", "tttt", True),
        ("smollm3", "ttt-", True),  # "-": queries of this layer are not turned
        ("cohere2", "ttt-", True),
        ("hunyuan_v1_dense", "rrrr", True),  # refused: they are normalised after they are turned
        ("bitnet", "tttt", False),  # heads are normalised before they are projected
        ("modernbert-decoder", "tttt", True),
    ],
)
def test_each_layer_of_a_model_has_traits_of_its_own(
    kind: str, turned: str, projects: bool, generator: torch.Generator
) -> None:
    """Queries turned by 5 are those that the model computes at positions 5 later."""
    with quiet():
        model = tiny(kind)
    for name, weight in model.named_parameters():
        if "norm" in name and weight.ndim == 1:  # as trained
            weight.data.uniform_(0.2, 2.0, generator=generator)
    tokens, places = torch.arange(3, 11)[None], torch.arange(8)[None]
    readings = []
    for shift in (0, 5):
        shifted = {} if turned == "-" * 4 else {"position_ids": places + shift}
        with recording(model) as calls, torch.no_grad():
            model(input_ids=tokens, use_cache=False, **shifted)
        readings.append([call.query for call in calls])
    written = ""
    for traits, here, later in zip(traits_of(model).values(), *readings, strict=True):
        assert traits.projects == projects
        if traits.rotary is None:
            written += "-"
            torch.testing.assert_close(here, later, **CLOSE)
            continue
        try:
            found = traits.rotary(here, torch.full((8,), 5))
        except ValueError:
            written += "r"
        else:
            written += "t"
            torch.testing.assert_close(found, later, **CLOSE)
            assert not torch.allclose(here, later, **CLOSE)
            back = traits.rotary(found, torch.full((8,), -5))
            torch.testing.assert_close(back, here, **CLOSE)
    assert written == turned


def test_a_call_that_fails_leaves_nothing_for_a_call_of_a_part_of_the_model() -> None:
    model, inputs = sharp("llama"), batch("none")
    fails = Mock(side_effect=[None, MemoryError])  # after the first reading
    with replace_attention(model, after(caches.ObservedAttention(R), observed="repeat")):
        handle = model.lm_head.register_forward_pre_hook(fails)
        assert_refused("", model, error=MemoryError, **inputs)
        handle.remove()
        assert_refused("observed is 'repeat': its queries are recorded", model.model, **inputs)


@pytest.mark.parametrize(
    "method",
    [
        after(caches.KeyNorm(R), observed="causal"),
        after(caches.KeyNorm(R), observed="noncausal"),
        after(caches.ExpectedAttention(R)),
    ],
)
def test_an_unknown_rotation_is_refused_where_it_is_used(method: caches.AfterPrefix) -> None:
    model = sharp("llama")
    rotary = model.model.rotary_emb
    rotary.rope_type = "longrope"  # as far as the adapter is told
    with replace_attention(model, method):
        rotary.rope_type = "default"
        if method.observed == "causal":
            assert logits(model, batch("none")).isfinite().all()
        else:
            line = "^LlamaForCausalLM rotates queries in a way that is not known here: "
            assert_refused(line, logits, model, batch("none"))


def test_positions_and_a_mask_that_are_given_are_those_of_the_second_pass() -> None:
    """Rotations are relative: positions that all begin later change nothing."""
    model, inputs = sharp("llama"), batch("left")
    method = after(caches.ObservedAttention(R), observed="repeat")
    later = {"position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0) + 7}
    with replace_attention(model, method), torch.no_grad():
        named = model(**inputs, use_cache=False).logits
        placed = model(inputs["input_ids"], inputs["attention_mask"], use_cache=False).logits
        shifted = logits(model, inputs | later)
    torch.testing.assert_close(placed, named)
    torch.testing.assert_close(shifted, named[inputs["attention_mask"].bool()], **CLOSE)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("pool", [None, "checked"])
def test_a_padded_prefix_is_read_once_more_as_it_is_alone(padding: str, pool: str | None) -> None:
    """At its own positions, given or not, and given for all texts at once."""
    model, inputs = sharp("llama"), batch(padding)
    whole = torch.arange(inputs["input_ids"].shape[1])[None]
    options = {"observed": "repeat" if pool is None else "continued", "pool": pool, "rows": 4}
    method = after(caches.ObservedAttention(R, aggregate="max"), **options)
    with replace_attention(model, method):
        found = [logits(model, inputs | given) for given in ({}, {"position_ids": whole})]
    torch.testing.assert_close(*found, **CLOSE)
    rows = found[0].split(inputs["attention_mask"].sum(dim=1).tolist())
    for row, (tokens, mask) in enumerate(zip(*inputs.values(), strict=True)):
        prefix, token_ids = int(mask[:PREFIX].sum()), tokens[None, mask.bool()]
        if R <= prefix < token_ids.shape[1]:
            alone = after(
                caches.ObservedAttention(R, aggregate="max"), **options | {"prefix": prefix}
            )
            with replace_attention(model, alone), torch.no_grad():
                expected = model(token_ids, use_cache=False).logits[0]
            torch.testing.assert_close(rows[row], expected, **CLOSE)
    refusal = "windows of MistralForCausalLM would reach over"
    assert_refused(refusal, logits, sharp("mistral"), inputs, method)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"observed": "repeat"}, "observed is 'repeat': its queries are recorded by hugging_face"),
        ({"pool": "model"}, "pool is 'model'; it needs a call of the whole model"),
    ],
)
def test_what_was_read_first_serves_one_call_alone(options: dict[str, str], expected: str) -> None:
    """Before a part of the model called by itself nothing is read."""
    model, inputs = sharp("llama"), batch("none")
    with replace_attention(model, after(caches.Recent(R), **options)):
        logits(model, inputs)
        assert_refused(f"^{expected}", model.model, **inputs)


def test_repeated_queries_are_those_of_the_prefix_read_twice(model: PreTrainedModel) -> None:
    inputs = batch("none")
    spy = Spy(caches.ObservedAttention(R, aggregate="max"))
    logits(model, inputs, after(spy, observed="repeat", rows=4))
    twice = {name: torch.cat([x[:, :PREFIX]] * 2, dim=1) for name, x in inputs.items()}
    rows = spaced(range(9), 4, seed=0)
    calls = recorded(model, twice)
    assert len(spy.seen) == len(calls) == len(attention_layers(model))
    for seen, call in zip(spy.seen, calls, strict=True):
        again = call["query"][:, :, [PREFIX + row for row in rows]]
        torch.testing.assert_close(seen.query.flatten(1, -3), again, **CLOSE)


@pytest.mark.parametrize(("kind", "prefix", "positions"), [("gpt2", 40, 64), ("roberta", 11, 18)])
def test_the_second_pass_ends_with_the_models_positions(
    kind: str, prefix: int, positions: int
) -> None:
    """A RoBERTa with padding token 1 reads, of its 20 positions, from the third on."""
    model, spy = sharp("gpt2"), Spy(caches.ObservedAttention(R))
    if kind == "roberta":
        config = RobertaConfig(
            vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=20, is_decoder=True, pad_token_id=1,
        )  # fmt: skip
        model = RobertaForCausalLM(config).eval()
    tokens = torch.arange(2, 2 + positions)[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    logits(model, inputs, after(spy, observed="repeat", prefix=prefix, rows=99))
    assert spy.seen[0].query.shape[-2] == positions - prefix
    expected = f"^prefix is {positions}; the model has {positions} positions, none to repeat it at$"
    whole = after(caches.Recent(R), observed="repeat", prefix=positions)
    assert_refused(expected, logits, model, inputs, whole)


def test_what_cannot_be_repeated_is_refused() -> None:
    model, tokens = sharp("gpt2"), batch("none")["input_ids"]
    embedded = model.get_input_embeddings()(tokens)
    with replace_attention(model, after(caches.Recent(R), observed="repeat")):
        line = r"^prefix is 9; the text has shape \(3, 5\)$"
        assert_refused("^a prefix is read once more; the model must", model, inputs_embeds=embedded)
        assert_refused(line, model, input_ids=tokens[:, :5])
    assert_refused(
        r"^prefixes are \['8', '9'\]; one prefix is repeated$",
        enter,
        model,
        lambda i: after(caches.Recent(R), observed="repeat", prefix=PREFIX - i % 2),
    )


def test_an_exception_inside_the_second_pass_leaves_the_model_as_it_was() -> None:
    model, inputs, method = (
        sharp("llama"),
        batch("none"),
        after(caches.Recent(R), observed="repeat"),
    )
    before, fails = logits(model, inputs), Mock(side_effect=RuntimeError("on purpose"))
    with replace_attention(model, method):
        handle = attention_layers(model)[1].register_forward_hook(fails)
        assert_refused("on purpose", logits, model, inputs, error=RuntimeError)
        handle.remove()
        again = logits(model, inputs)  # recorded anew
    assert torch.equal(logits(model, inputs, method), again)
    assert torch.equal(logits(model, inputs), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("observed", ["noncausal", "repeat"])
def test_layers_and_heads_that_are_not_named_stay_exact(
    model: PreTrainedModel, observed: str
) -> None:
    inputs, method = batch("left"), after(caches.LeaveOneOut(R), observed=observed)

    def replaced(**part: object) -> Tensor:
        return logits(model, inputs, method, **part)

    exact, whole = logits(model, inputs), replaced()
    for nothing in ({"layers": []}, {"heads": []}):
        torch.testing.assert_close(replaced(**nothing), exact, **CLOSE)
    torch.testing.assert_close(replaced(layers=range(4), heads=range(4)), whole, **CLOSE)
    for part in ({"layers": [0]}, {"heads": [0, 3]}):
        for other in (exact, whole):
            assert not torch.allclose(replaced(**part), other, **CLOSE)


def test_generation_with_a_cache_is_refused_in_one_line(model: PreTrainedModel) -> None:
    options = batch("none", rows=1) | {"max_new_tokens": 3, "do_sample": False}
    expected = r"^AfterPrefix got 1 queries and \d+ keys; it needs a whole text, "
    with replace_attention(model, after(caches.Recent(R))):
        assert_refused(expected, model.generate, **options)
        assert model.generate(**options, use_cache=False).shape[1] > 12


def test_it_is_not_trained_with() -> None:
    assert_refused(
        "^AfterPrefix is not trained with; ",
        set_attention,
        sharp("gpt2"),
        lambda _: after(caches.Recent(R)),
    )


def test_heads_that_cannot_share_are_refused() -> None:
    for heads in ((5, 2, 2), (4, 2, 4)):
        call = [nn.Linear(4, 4), Traits(), Layer(), *(torch.zeros(1, n, 3, 4) for n in heads)]
        expected = "^the model has {} query, {} key and {} value heads; to share a set of keys"
        assert_refused(expected.format(*heads), grouped, *call, attn_mask=None)
