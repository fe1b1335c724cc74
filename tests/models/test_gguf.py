"""A GGUF file is loaded as the model that was written, part by part, or refused in one line."""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.models.gguf_files import CONFIGS, SIZES, drawn, llama, write_gguf
from tests.refusals import assert_refused
from value_aware_attention import caches, hugging_face, probe
from value_aware_attention.hugging_face.saved import installed
from value_aware_attention.measurement.windows import adds_bos, text_windows, windows_task
from value_aware_attention.models.checkpoints import checkpoint_files, load_model, load_tokenizer
from value_aware_attention.models.gguf_files import bits_a_weight, described
from value_aware_study.evaluation.pretrained import packaged_model

pytestmark = pytest.mark.filterwarnings("ignore")


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
    file = tmp_path / "a.gguf"
    write_gguf(llama(), file, keys={"general.license": "mit"}, quantised=True)
    assert ": name tiny, licence mit; " in described(file)
    sizes = {name: weight.numel() for name, weight in llama().named_parameters()}
    bits = sum((8.5 if "proj" in name else 32) * sizes[name] for name in sizes)
    # Q8_0: 32 bytes and 2 of a scale
    assert bits_a_weight(file) == pytest.approx(bits / sum(sizes.values()))
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


TOKENS = torch.randint(3, 30, (1, 40), generator=torch.Generator().manual_seed(0))
FULL = "full_attention"
ATTENTION = {"attn_q", "attn_k", "attn_v", "attn_output"}
MLP = {"ffn_gate", "ffn_up", "ffn_down"}
PARAMETERS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
HARMLESS = {
    "general.file_type": 0, "general.tags": ["a", "b"], "quantize.imatrix.file": "it",
    "{}.vocab_size": 31, "{}.rope.scaling.finetuned": True, "{}.expert_count": 0,
    "{}.attention.causal": True, "tokenizer.ggml.add_bos_token": False, "split.count": 1,
}  # fmt: skip
POISON = {
    "attention.scale": 0.3, "logit_scale": 2.0, "embedding_scale": 2.0, "residual_scale": 0.5,
    "expert_count": 4, "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 4.0,
    "attention.causal": False, "attention.value_length": 4, "attention.shared_kv_layers": 1,
    "rope.scaling.type": "dynamic", "rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.alpha": 2.0,
    "rope.scaling.yarn_attn_factor": 1.5, "rope.dimension_sections": [2, 2, 0, 0],
    "attention.temperature_scale": 0.1, "use_parallel_residual": True, "nextn_predict_layers": 1,
}  # fmt: skip
STRANGE = {
    "blk.0.attn_sinks.weight": (4,), "blk.1.ffn_gate_inp.weight": (4, 32), "cls.weight": (2, 32),
    "blk.0.attn_rot_embd": (4,), "blk.0.attn_norm_2.weight": (32,),
    "blk.0.layer_output_norm.weight": (32,), "output.bias": (31,), "blk.9.attn_q.weight": (32, 32),
    "token_embd_norm.weight": (32,), "blk.0.attn_q.weight.lora_a": (2, 32), "rope_freqs": (4,),
}  # fmt: skip


class Draft:
    """A model to be drawn, what a file has beside and without, and how what is expected differs."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.name: str = draw(st.sampled_from(list(CONFIGS)))
        self.config: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.without: list[str] = []
        self.changes: list[Callable[[PreTrainedModel], object]] = []
        self.refused: list[str] = []

    def one(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def add(self, **keys: Any) -> None:
        self.keys |= {f"{self.name}.{key.replace('__', '.')}": keys[key] for key in keys}


def sizes(draft: Draft) -> None:
    """Heads of all sizes and numbers; a missing key stands for as many keys as queries."""
    heads = draft.one(1, 2, 4)
    head_dim = 8 if draft.name == "phi3" else draft.one(4, 8, 16)  # no other, says transformers
    draft.config |= {"head_dim": head_dim, "num_key_value_heads": heads}
    draft.config["tie_word_embeddings"] = draft.name.startswith("gemma") or draft.one(True, False)
    if heads == 4 and draft.one(True, False):
        draft.without.append(rf"{draft.name}\.attention\.head_count_kv")
    if head_dim == 8 and draft.one(True, False):
        draft.without.append(rf"{draft.name}\.attention\.(key|value)_length")


def biases(draft: Draft) -> None:
    """Biases of some projections, in all layers; transformers has all of them or none."""
    if draft.name not in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"):
        draft.config["use_bias"] = draft.one(True, False)
        return
    three = ATTENTION - {"attn_output"}
    parts = set(draft.one((), tuple(three), ATTENTION, ("attn_q",), ("attn_q", "attn_output")))
    parts = parts & three if draft.name == "qwen2" else parts | set(draft.one((), MLP, ("ffn_up",)))
    draft.config |= {"attention_bias": True, "mlp_bias": draft.name == "llama"}
    every = ATTENTION | MLP if draft.name == "llama" else ATTENTION
    every = three if draft.name == "qwen2" else every
    draft.without += [rf"blk\.\d+\.{part}\.bias" for part in every - parts]
    for part in parts - every:
        width = 64 if part in MLP else 32
        draft.tensors |= {f"blk.{i}.{part}.bias": np.ones(width) for i in range(2)}
    whole: list[set[str]] = [set(), ATTENTION]
    if draft.name == "llama":
        whole = [*whole, three, MLP, ATTENTION | MLP]
    if parts not in ([set(), three] if draft.name == "qwen2" else whole):
        draft.refused.append("bias")
    for part in every - parts:
        ending = f"{PARAMETERS[part]}.bias"
        draft.changes.append(lambda model, ending=ending: set_zero(model, ending))


def set_zero(model: PreTrainedModel, ending: str) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(ending):
            parameter.data.zero_()


def rotation(draft: Draft) -> None:
    """Bases, scaling of all kinds, and factors of frequencies, by llama.cpp's formulas."""
    theta, near = draft.one(10000.0, 500000.0, 100.0), draft.one(10000.0, 50.0)
    rope = {"rope_type": "default", "rope_theta": theta}
    draft.config["rope_parameters"] = rope
    if draft.name == "gemma3":
        local = {"rope_type": "default", "rope_theta": near}
        draft.config["rope_parameters"] = {FULL: rope, "sliding_attention": local}
        draft.add(**({} if near == 10000 else {"rope__freq_base_swa": near}))
    if theta == 10000 and draft.one(True, False):
        draft.without.append(rf"{draft.name}\.rope\.freq_base")
    turned = draft.config.get("head_dim", 8)
    if draft.name == "phi3" and draft.one(True, False):
        turned, rope["partial_rotary_factor"] = turned // 2, 0.5
    if "partial_rotary_factor" in rope or draft.one(True, False):
        draft.add(rope__dimension_count=turned)
    turns = theta ** -(np.arange(0, turned, 2) / turned)
    scaled = draft.one(unscaled, linear, by_factors, yarn)
    turns, scale = scaled(draft, turns, theta)
    if scaled is not yarn and draft.one(True, False, False):
        scale = 1.25
        draft.add(rope__scaling__attn_factor=scale)
    draft.changes.append(lambda model: set_rotation(model, turns, scale))


def unscaled(draft: Draft, turns: Any, theta: float) -> tuple[Any, float]:
    return turns, 1.0


def linear(draft: Draft, turns: Any, theta: float) -> tuple[Any, float]:
    kind, factor = draft.one("linear", "none", "longrope", None), draft.one(1.5, 4.0)
    draft.add(**({"rope__scaling__type": kind} if kind else {}))
    draft.add(**{draft.one("rope__scaling__factor", "rope__scale_linear"): factor})
    return turns if kind == "none" else turns / factor, 1.0


def by_factors(draft: Draft, turns: Any, theta: float) -> tuple[Any, float]:
    """Divides each frequency by a factor of its own; Gemma's windows would have others."""
    long, short = np.linspace(1, 3, len(turns)), np.linspace(1, 2, len(turns))
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    original = draft.one(None, 16, 40)
    if draft.one(True, False):
        tensors, short = {"rope_freqs.weight": long}, long
    draft.tensors |= tensors
    draft.add(**({"rope__scaling__original_context_length": original} if original else {}))
    if draft.name in ("gemma2", "gemma3"):
        draft.refused.append(next(iter(tensors)))
    return turns / (long if TOKENS.shape[1] > (original or 64) else short), 1.0


def yarn(draft: Draft, turns: Any, theta: float) -> tuple[Any, float]:
    """Returns the frequencies and the scale of attention of ggml_rope_yarn."""
    if draft.name == "phi3":  # transformers has none
        draft.refused.append("phi3.rope.scaling.type = yarn")
    factor = draft.one(1.5, 4.0)
    original, fast, slow = draft.one(None, 16, 50), draft.one(None, 8.0), draft.one(None, 2.0)
    share, times = draft.one(None, 0.5), draft.one(None, 1.5)
    options = {
        "original_context_length": original, "yarn_beta_fast": fast, "yarn_beta_slow": slow,
        "yarn_log_multiplier": share, "attn_factor": times, "factor": factor, "type": "yarn",
    }  # fmt: skip
    draft.add(**{f"rope__scaling__{k}": v for k, v in options.items() if v is not None})
    size = 2 * len(turns)
    low, high = (
        size * math.log((original or 64) / (beta * 2 * math.pi)) / (2 * math.log(theta))
        for beta in (fast or 32.0, slow or 1.0)
    )
    low, high = max(0, math.floor(low)), min(size - 1, math.ceil(high))
    ramp = np.clip((np.arange(size // 2) - low) / max(0.001, high - low), 0, 1)
    grown = 1 + 0.1 * math.log(factor)
    scale = (times or 1.0) * grown / (1 + 0.1 * (share or 0.0) * math.log(factor))
    return turns * (1 - ramp) + turns / factor * ramp, scale


def set_rotation(model: PreTrainedModel, turns: Any, scale: float) -> None:
    rotary: Any = model.get_submodule("model.rotary_emb")
    start = f"{FULL}_" if model.config.model_type == "gemma3_text" else ""
    if hasattr(rotary, f"{start}inv_freq"):  # of Gemma 3, a layer that sees all tokens
        getattr(rotary, f"{start}inv_freq").copy_(torch.tensor(turns))
        setattr(rotary, f"{start}attention_scaling", scale)


def windows(draft: Draft) -> None:
    """Windows where the architecture has them, by Gemma's patterns, and caps of scores."""
    own = draft.name in ("gemma2", "gemma3", "phi3", "starcoder2")
    window = draft.one(None, 0, 5) if own else draft.one(None, 0, 0, 5)
    is_gemma = draft.name in ("gemma2", "gemma3")
    period = draft.one(None, 1, 3, [True, False, False, True]) if is_gemma else None
    draft.config |= {"num_hidden_layers": 4, "sliding_window": window or None}
    if window is not None and not (own and window):
        draft.add(attention__sliding_window=window)
    if window and not own:
        draft.refused.append(f"{draft.name}.attention.sliding_window = 5")
    if is_gemma:
        default = {"gemma2": 2, "gemma3": 6}[draft.name]
        near = period if isinstance(period, list) else [
            i % (period or default) < (period or default) - 1 for i in range(4)
        ]  # fmt: skip
        if draft.name == "gemma2" and window is None:
            draft.config["sliding_window"] = 4096
        if not draft.config["sliding_window"]:
            near, draft.config["sliding_window"] = [False] * 4, 64
            draft.without.append(rf"{draft.name}\.attention\.sliding_window")
        draft.config["layer_types"] = ["sliding_attention" if local else FULL for local in near]
        caps = draft.one(None, 3.0), draft.one(None, 2.0)
        names = ("final_logit_softcapping", "attn_logit_softcapping")
        draft.config |= dict(zip(names, caps, strict=True))
        if draft.name == "gemma2":  # llama.cpp caps it anyway
            draft.config |= {n: c or d for n, c, d in zip(names, caps, (30.0, 50.0), strict=True)}
    if period is not None:
        draft.add(attention__sliding_window_pattern=period)


def harmless(draft: Draft) -> None:
    keys = draft.draw(st.sets(st.sampled_from(list(HARMLESS)), max_size=5))
    draft.keys |= {key.format(draft.name): HARMLESS[key] for key in keys}


def poison(draft: Draft) -> None:
    """A key or tensor that has no place, or one that is missing."""
    match draft.one("key", "tensor", "no tensor", "no key", "architecture"):
        case "key":
            key = draft.one(*POISON)
            draft.keys[f"{draft.name}.{key}"] = POISON[key]
            draft.refused.append(f"{draft.name}.{key}")
        case "tensor":
            name = draft.one(*STRANGE)
            draft.tensors[name] = np.ones(STRANGE[name])
            draft.refused.append(name)
        case "no tensor":
            name = draft.one("output_norm.weight", "token_embd.weight", "blk.1.attn_norm.weight")
            draft.without.append(re.escape(name))
            draft.refused.append("weight")
        case "no key":
            key = draft.one("embedding_length", "block_count", "attention.head_count")
            draft.without.append(re.escape(f"{draft.name}.{key}"))
            draft.refused.append(f"it has no single {draft.name}.{key}")


@st.composite
def drafts(draw: Any) -> Draft:
    draft = Draft(draw)
    for part in (sizes, biases, windows, rotation, harmless):
        if (draft.name != "gpt2" or part is harmless) and draw(st.booleans()):
            part(draft)
    if draw(st.integers(0, 3)) == 0:
        poison(draft)
    return draft


@settings(max_examples=60)
@given(draft=drafts())
def test_a_file_is_read_as_it_is_or_refused(
    draft: Draft, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = drawn(draft.name, **draft.config)
    file = tmp_path_factory.mktemp("gguf") / "a.gguf"
    write_gguf(
        expected, file, keys=draft.keys, tensors=draft.tensors,
        without="|".join(draft.without) or "nothing",
    )  # fmt: skip
    for change in draft.changes:
        change(expected)
    if draft.refused:
        named = "|".join(map(re.escape, draft.refused))
        assert_refused(rf"(?=.*{re.escape(str(file))}).*({named})", load_model, str(file))
        return
    model = load_model(str(file))
    logits = expected(TOKENS).logits
    torch.testing.assert_close(
        model(TOKENS).logits, logits, rtol=0, atol=2e-5 * logits.abs().max().item()
    )
    assert SIZES["vocab_size"] == model.config.vocab_size


ROOT = Path(__file__).parents[2]


def file_of(name: str) -> Path:
    try:
        return Path(installed(name))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_the_dequantised_folder_has_the_same_weights(tmp_path: Path) -> None:
    file_of("smollm2")
    model = load_model("smollm2")
    for _ in range(2):  # the second finds the folder that the first wrote
        folder = packaged_model({"weights": "smollm2"}, tmp_path)
        weights = load_model(folder).state_dict()
        assert all(torch.equal(weights[key], x) for key, x in model.state_dict().items())
    text = (ROOT / "docs/licences.py").read_text()
    assert load_tokenizer(folder)(text).input_ids == load_tokenizer("smollm2")(text).input_ids


@pytest.mark.slow
def test_gemma_needs_its_bos() -> None:
    """Windows begin with it by themselves; without it the perplexity is about twice as high."""
    file_of("gemma3")
    model, tokenizer = load_model("gemma3"), load_tokenizer("gemma3")
    text, perplexities = (ROOT / "docs/statistics.md").read_text(), []
    assert adds_bos(tokenizer)
    for add in (True, False):
        tokenizer.add_bos_token = add
        windows = text_windows(text, tokenizer, length=128, windows=4, closed=False)
        assert windows.begins_with_bos == add
        assert (windows.tokens == tokenizer.bos_token_id).sum() == 4 * add
        task = windows_task(model, tokenizer, windows)
        assert all((t.labels != tokenizer.bos_token_id).all() for t in task.texts)
        perplexities.append(np.exp(np.mean([task.run(None, part).mean() for part in range(4)])))
    print(f"perplexity {perplexities[0]:.1f} with BOS, {perplexities[1]:.1f} without")
    assert perplexities[1] > 1.5 * perplexities[0]
