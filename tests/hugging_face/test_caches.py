"""Cache methods in Hugging Face models: groups, projections, rotations, and the second pass."""

from itertools import count

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
from value_aware_attention.caches import AfterPrefix, CacheMethod
from value_aware_attention.call import Layer
from value_aware_attention.hugging_face import attention_layers, replace_attention, set_attention
from value_aware_attention.hugging_face.recording import recording
from value_aware_attention.hugging_face.sharing import grouped
from value_aware_attention.hugging_face.traits import Traits, output_projection, traits_of

pytestmark = pytest.mark.filterwarnings("ignore")
PREFIX, R = 9, 6
CLOSE = {"atol": 2e-4, "rtol": 2e-4}
OBSERVED = ("last", "causal", "noncausal", "continued", "repeat", "hindsight")
ROTATED = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "phi")


@pytest.fixture(params=("llama", "gpt2"))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Builds models of four query heads, with two key-value heads and with four."""
    return sharp(request.param)


def after(method: CacheMethod, **options: object) -> AfterPrefix:
    return AfterPrefix(method, **{"prefix": PREFIX, "rows": 6, "sinks": 1, "recent": 2} | options)


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
    for name in METHODS if observed == "noncausal" else some:
        found = logits(model, inputs, after(METHODS[name](R), observed=observed))
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
        found = logits(model, inputs, after(spy, prefix=None, observed=observed))
        assert found.isfinite().all() and not torch.allclose(found, before, **CLOSE)
        assert {kept.indices.flatten(1, -2).shape[1:] for kept in spy.kept} == {(4, R)}
        assert sum(len(kept.indices) for kept in spy.kept) == 3 * len(attention_layers(model))
    torch.testing.assert_close(
        logits(model, inputs, after(caches.Recent(12), prefix=None)), before, **CLOSE
    )
    with (
        pytest.raises(ValueError, match=r"^AfterPrefix does not support causal attention [^\n]*$"),
        replace_attention(sharp("gpt2"), after(caches.Recent(R), prefix=None)),
    ):
        pass


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
    """Projected with it, the heads' outputs are the module's own output up to its bias."""
    model, inputs = sharp(kind), batch("none", rows=1)
    spy = Spy(caches.KeyNorm(12))
    caught: list[tuple[Tensor, Tensor]] = []
    layer = attention_layers(model)[0]
    handle = layer.register_forward_hook(lambda *given: caught.append(given[-1]))
    with replace_attention(model, after(spy, prefix=12, observed="last")), torch.no_grad():
        model(**inputs, use_cache=False)
    handle.remove()
    first = recorded(model, inputs)[0]
    keys = 2 if kind == "llama" else 4
    projection = output_projection(layer, (keys, 4 // keys), first["value"].shape[-1])
    heads = Exact()(*(first[name] for name in ("query", "key", "value")), is_causal=True,
                    kernel=first["kernel"])  # fmt: skip
    bias = caught[-1][0] - torch.einsum("bhnv,hve->bne", heads, projection.flatten(0, 1))
    torch.testing.assert_close(bias, bias[:, :1].expand_as(bias), **CLOSE)


def test_methods_are_shown_the_projection_of_their_group() -> None:
    model, spy = sharp("llama"), Spy(caches.CriticalValues(caches.KeyNorm(R)))
    logits(model, batch(rows=2), after(spy))
    weight = attention_layers(model)[0].o_proj.weight
    width = weight.shape[1] // 4
    for head in range(4):
        shown = spy.seen[0].projection[..., head // 2, head % 2, :, :]
        torch.testing.assert_close(shown.squeeze(0), weight[:, head * width : (head + 1) * width].T)


@pytest.mark.parametrize("kind", ROTATED)
def test_queries_are_turned_as_the_model_turns_them(kind: str) -> None:
    """Queries turned by 5 are those that the model computes at positions 5 later."""
    model, inputs = sharp(kind), batch("none", rows=2)
    rotary = traits_of(model)[attention_layers(model)[0]].rotary
    places = torch.arange(12)[None]
    (here, *_), (later, *_) = (
        recorded(model, inputs | {"position_ids": places + shift}) for shift in (0, 5)
    )
    turned = rotary(here["query"], torch.full((12,), 5))
    assert not torch.allclose(here["query"], later["query"], **CLOSE)
    torch.testing.assert_close(turned, later["query"], **CLOSE)
    back = rotary(turned, torch.full((12,), -5))
    torch.testing.assert_close(back, here["query"], **CLOSE)


@pytest.mark.parametrize(
    ("kind", "turned", "projects"),
    [
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
    kind: str, turned: str, projects: bool
) -> None:
    with quiet():
        model = tiny(kind)
    for name, weight in model.named_parameters():
        if "norm" in name and weight.ndim == 1:  # as trained
            weight.data.uniform_(0.5, 1.5)
    tokens, places = torch.arange(3, 11)[None], torch.arange(8)[None]
    readings = []
    for shift in (0, 5):
        with recording(model) as calls, torch.no_grad():
            model(input_ids=tokens, position_ids=places + shift, use_cache=False)
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
    assert written == turned


def test_a_call_that_fails_leaves_nothing_for_a_call_of_a_part_of_the_model() -> None:
    model, inputs, calls = sharp("llama"), batch("none"), count()

    def fails(*_: object) -> None:
        if next(calls):  # after the first reading
            raise MemoryError

    with replace_attention(model, after(caches.ObservedAttention(R), observed="repeat")):
        handle = model.lm_head.register_forward_pre_hook(fails)
        assert_refused("", model, error=MemoryError, **inputs)
        handle.remove()
        assert_refused("observed is 'repeat': its queries are recorded", model.model, **inputs)


def test_a_model_without_rotation_or_with_its_projection_elsewhere_has_none() -> None:
    assert {traits.rotary for traits in traits_of(sharp("gpt2")).values()} == {None}
    assert output_projection(attention_layers(sharp("bert"))[0], (4, 1), 8) is None


def test_an_unknown_rotation_is_refused_where_it_is_used() -> None:
    model, inputs = sharp("llama"), batch("none")
    known = after(caches.KeyNorm(R), observed="causal")
    turning = after(caches.KeyNorm(R), observed="noncausal"), after(caches.ExpectedAttention(R))
    for method in (known, *turning):
        model.model.rotary_emb.rope_type = "longrope"  # as far as the adapter is told
        with replace_attention(model, method):
            model.model.rotary_emb.rope_type = "default"
            if method is known:
                assert logits(model, inputs).isfinite().all()
                continue
            expected = r"^LlamaForCausalLM rotates queries in a way that is not known here: [^\n]*$"
            assert_refused(expected, logits, model, inputs)


def test_positions_that_are_given_are_those_of_the_second_pass() -> None:
    """Rotations are relative: positions that all begin later change nothing."""
    model, inputs = sharp("llama"), batch("none")
    method = after(caches.ObservedAttention(R), observed="repeat")
    with replace_attention(model, method):
        found, later = (
            logits(model, inputs | {"position_ids": torch.arange(12)[None] + shift})
            for shift in (0, 7)
        )
        torch.testing.assert_close(found, logits(model, inputs), **CLOSE)
    torch.testing.assert_close(later, found, **CLOSE)


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
    windowed = sharp("mistral")
    refusal = pytest.raises(ValueError, match="windows of MistralForCausalLM would reach over")
    with replace_attention(windowed, method), refusal:
        logits(windowed, inputs)


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
    with (
        replace_attention(model, after(caches.Recent(R), observed="repeat", prefix=positions)),
        pytest.raises(ValueError, match=expected),
    ):
        logits(model, inputs)


def test_a_mask_given_by_its_place_is_that_of_the_second_pass() -> None:
    model, inputs = sharp("llama"), batch("left")
    method = after(caches.ObservedAttention(R), observed="repeat")
    with replace_attention(model, method), torch.no_grad():
        named = model(**inputs, use_cache=False).logits
        placed = model(inputs["input_ids"], inputs["attention_mask"], use_cache=False).logits
    torch.testing.assert_close(placed, named)


def test_what_cannot_be_repeated_is_refused() -> None:
    model, inputs = sharp("gpt2"), batch("none")
    method = after(caches.Recent(R), observed="repeat")
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    with replace_attention(model, method):
        assert_refused(
            r"^a prefix is read once more; the model must", model, inputs_embeds=embedded
        )
        assert_refused(
            r"^prefix is 9; the text has shape \(3, 5\)$",
            model,
            input_ids=inputs["input_ids"][:, :5],
        )
    with (
        pytest.raises(ValueError, match=r"^prefixes are \['8', '9'\]; one prefix is repeated$"),
        replace_attention(
            model, lambda i: after(caches.Recent(R), observed="repeat", prefix=PREFIX - i % 2)
        ),
    ):
        pass


class Fails(nn.Module):
    """Raises an error when it is called."""

    def forward(self, *inputs: Tensor, **options: object) -> Tensor:
        raise RuntimeError("on purpose")


def test_an_exception_inside_the_second_pass_leaves_the_model_as_it_was() -> None:
    model, inputs = sharp("llama"), batch("none")
    before = logits(model, inputs)
    method = after(caches.Recent(R), observed="repeat")
    with replace_attention(model, method):
        handle = attention_layers(model)[1].register_forward_hook(Fails())
        with pytest.raises(RuntimeError, match="on purpose"):
            logits(model, inputs)
        handle.remove()
        found = logits(model, inputs)  # recorded anew
    assert torch.equal(logits(model, inputs, method), found)
    assert torch.equal(logits(model, inputs), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("observed", ["noncausal", "repeat"])
def test_layers_and_heads_that_are_not_named_stay_exact(
    model: PreTrainedModel, observed: str
) -> None:
    inputs, method = batch("left"), after(caches.ValueAware(R), observed=observed)

    def replaced(**part: object) -> Tensor:
        return logits(model, inputs, method, **part)

    exact, every, layer, heads = (
        replaced(**part) for part in ({"layers": []}, {}, {"layers": [0]}, {"heads": [0, 3]})
    )
    torch.testing.assert_close(exact, logits(model, inputs), **CLOSE)
    torch.testing.assert_close(replaced(heads=[]), exact, **CLOSE)
    everything = {"layers": range(len(attention_layers(model))), "heads": range(4)}
    torch.testing.assert_close(replaced(**everything), every, **CLOSE)
    for found in (layer, heads):
        assert not any(torch.allclose(found, other, **CLOSE) for other in (exact, every))


def test_generation_with_a_cache_is_refused_in_one_line(model: PreTrainedModel) -> None:
    inputs = batch("none", rows=1)
    expected = r"^AfterPrefix got 1 queries and \d+ keys; it needs a whole text, [^\n]*$"
    with (
        replace_attention(model, after(caches.Recent(R))),
        pytest.raises(ValueError, match=expected),
    ):
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    with replace_attention(model, after(caches.Recent(R))):
        found = model.generate(**inputs, max_new_tokens=3, do_sample=False, use_cache=False)
    assert found.shape[1] > 12


def test_it_is_not_trained_with() -> None:
    assert_refused(
        r"^AfterPrefix is not trained with; [^\n]*$",
        set_attention,
        sharp("gpt2"),
        lambda _: after(caches.Recent(R)),
    )


def test_heads_that_cannot_share_are_refused() -> None:
    for heads in ((5, 2, 2), (4, 2, 4)):
        call = [nn.Linear(4, 4), Traits(), Layer(), *(torch.zeros(1, n, 3, 4) for n in heads)]
        expected = "^the model has {} query, {} key and {} value heads; to share a set of keys"
        assert_refused(expected.format(*heads), grouped, *call, attn_mask=None)
