"""Positions past RoBERTa's table, and checkpoints that plain transformers reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, RobertaForMaskedLM

from tests.refusals import assert_refused
from value_aware_attention.models import BlockPositions, build_roberta, save_folded, warm_start

SIZE = {"vocabulary_size": 60, "layers": 2, "width": 16, "heads": 2, "feedforward": 32}
BERT = {
    "vocab_size": 60, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 10,
}  # fmt: skip


def roberta(length: int, block: int) -> RobertaForMaskedLM:
    torch.manual_seed(0)
    return build_roberta(**SIZE, length=length, block=block, dropout=0.0).eval()


def tokens(length: int, padding: int = 0) -> Tensor:
    drawn = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(1))
    drawn[0, length - padding :] = 1
    return drawn


def positions_of(model: RobertaForMaskedLM) -> BlockPositions:
    positions = model.roberta.embeddings.position_embeddings
    assert isinstance(positions, BlockPositions)
    return positions


def test_position_i_is_the_sum_of_its_two_parts() -> None:
    table = torch.randn(2 + 8, 4)
    positions = BlockPositions(table, reserved=2, block=8, length=20)
    assert positions.blocks.shape == (3, 4)
    positions.blocks.data.normal_()
    sums = [table[2 + i % 8] + positions.blocks[i // 8] for i in range(20)]
    expected = torch.stack([*table[:2], *sums])  # reserved: no position at all
    torch.testing.assert_close(positions(torch.arange(22)[None])[0], expected)


def test_both_parts_learn() -> None:
    model = roberta(length=24, block=8)
    model(tokens(24)).logits.square().mean().backward()
    positions = positions_of(model)
    for gradient in (positions.blocks.grad, positions.within.grad[2:]):
        assert (gradient != 0).any(dim=1).all()


@pytest.mark.parametrize("length", [4, 8])
def test_up_to_one_block_the_model_is_a_plain_one(length: int) -> None:
    embeddings = roberta(length=length, block=8).roberta.embeddings
    assert type(embeddings.position_embeddings) is torch.nn.Embedding
    assert embeddings.position_embeddings.weight.shape == (2 + length, 16)


def test_a_folded_model_gives_the_same_logits_in_plain_transformers(tmp_path: Path) -> None:
    model = roberta(length=20, block=8)
    positions_of(model).blocks.data.normal_()
    save_folded(model, tmp_path)
    plain = RobertaForMaskedLM.from_pretrained(tmp_path)
    assert type(plain.roberta.embeddings.position_embeddings) is torch.nn.Embedding
    assert plain.config.max_position_embeddings == 22
    padded = tokens(20, padding=3)
    logits, expected = (each(padded, attention_mask=padded != 1).logits for each in (plain, model))
    torch.testing.assert_close(logits, expected)
    positions_of(model)  # saving left the model itself alone


def test_warm_start_keeps_the_first_block_and_repeats_it(tmp_path: Path) -> None:
    short = roberta(length=8, block=8)
    save_folded(short, tmp_path)
    again, long = (
        warm_start(tmp_path, vocabulary_size=60, length=length, block=8, dropout=0.25).eval()
        for length in (8, 20)
    )
    assert again.config.hidden_dropout_prob == again.config.attention_probs_dropout_prob == 0.25
    for model in (again, long):
        torch.testing.assert_close(model(tokens(8)).logits, short(tokens(8)).logits)
    table = short.roberta.embeddings.position_embeddings.weight
    assert torch.equal(positions_of(long).within, table)
    assert not positions_of(long).blocks.any()
    assert long(tokens(20)).logits.shape == (2, 20, 60)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocabulary_size": 61}, "trained with 60 tokens, the vocabulary has 61$"),
        ({"block": 9}, "has 8 positions, 9 are needed$"),
        *(
            ({name: 2 * size}, rf"has .*{name} {size}.*; .*{name} {2 * size}.* are asked for: is ")
            for name, size in SIZE.items()
            if name != "vocabulary_size"
        ),
    ],
)
def test_a_checkpoint_of_other_sizes_is_refused(
    tmp_path: Path, changed: dict, message: str
) -> None:
    save_folded(roberta(length=8, block=8), tmp_path)
    arguments = {**SIZE, "length": 20, "block": 8, "dropout": 0.0}
    assert warm_start(tmp_path, **arguments).config.hidden_size == SIZE["width"]
    assert_refused(message, warm_start, tmp_path, **arguments | changed)
    odd, line = {"heads": 3, "length": 8}, "width is 16; it must be divisible by heads = 3"
    assert_refused(line, build_roberta, **arguments | odd)


def test_a_bert_becomes_a_roberta_of_equal_hidden_states(tmp_path: Path) -> None:
    bert = BertModel(BertConfig(**BERT)).eval()
    bert.save_pretrained(tmp_path)
    short, long = (
        warm_start(tmp_path, vocabulary_size=60, length=length, block=8, dropout=0.0).eval()
        for length in (8, 20)
    )
    ids = torch.randint(1, 60, (2, 8))  # 0 is padding
    mask = torch.ones_like(ids)
    mask[1, 5:] = ids[1, 5:] = 0
    expected = bert(ids, attention_mask=mask).last_hidden_state[mask == 1]
    for model in (short, long):
        hidden = model.roberta(ids, attention_mask=mask).last_hidden_state[mask == 1]
        torch.testing.assert_close(hidden, expected)
    assert short.lm_head.decoder.weight is short.roberta.embeddings.word_embeddings.weight
    save_folded(long, tmp_path / "long")  # and the long one starts from the saved short one
    again = warm_start(tmp_path / "long", vocabulary_size=60, length=20, block=20, dropout=0.0)
    torch.testing.assert_close(again.eval()(ids).logits, long(ids).logits)


def test_only_a_folder_of_a_roberta_is_a_start(tmp_path: Path) -> None:
    GPT2Config(vocab_size=60).save_pretrained(tmp_path)
    for start, error, line in (
        (tmp_path, ValueError, "is a gpt2, neither a roberta nor a bert$"),
        ("package:torch/nothing", FileNotFoundError, "^package:torch/nothing: no such package, or"),
        (tmp_path / "nothing", FileNotFoundError, "/nothing: no such folder$"),
    ):
        arguments = {"vocabulary_size": 60, "length": 20, "block": 8, "dropout": 0.0}
        assert_refused(line, warm_start, start, error=error, **arguments)


def test_the_paper_size_has_robertas_125_million_parameters() -> None:
    with torch.device("meta"):
        model = build_roberta(
            vocabulary_size=50_265,
            layers=12,
            width=768,
            heads=12,
            feedforward=3072,
            length=4096,
            block=512,
            dropout=0.0,
        )
    # roberta-base with its masked-LM head, and eight rows of Q
    assert sum(p.numel() for p in model.parameters()) == 124_697_433 + 8 * 768


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_start_from_an_incomplete_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    """A head that the checkpoint never had is drawn, a missing weight of a head or layer is not."""
    whole = BertForMaskedLM(BertConfig(**BERT)) if kind == "bert" else roberta(10, 10)
    whole.save_pretrained(tmp_path)
    file, start = tmp_path / "model.safetensors", {"length": 8, "block": 8, "dropout": 0.0}
    state = load_file(file)

    def without(part: str) -> None:
        left = {name: weight for name, weight in state.items() if part not in name}
        assert len(left) < len(state)
        save_file(left, file, metadata={"format": "pt"})

    without("cls." if kind == "bert" else "lm_head")
    assert warm_start(tmp_path, **SIZE, **start).config.num_hidden_layers == 2
    parts = ["embeddings.LayerNorm.bias", "layer.1.attention.self.query.weight"]
    for part in parts + ["lm_head.layer_norm.weight"] * (kind == "roberta"):
        without(part)
        line = f"lacks weights of its config: .*{part}: give a whole one"
        assert_refused(line, warm_start, tmp_path, **SIZE, **start)
