"""Every part of a GGUF file is used as another reading of it says, or refused by its name."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.models.gguf_files import CONFIGS, SIZES, drawn, write_gguf
from tests.refusals import assert_refused
from value_aware_attention.models.checkpoints import load_model

pytestmark = pytest.mark.filterwarnings("ignore")
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
