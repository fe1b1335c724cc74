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
    positions.blocks.data.normal_()
    embedded = positions(torch.arange(22)[None])[0]
    assert torch.equal(embedded[:2], table[:2])  # reserved: no position at all
    for i in range(20):
        expected = table[2 + i % 8] + positions.blocks[i // 8]
        torch.testing.assert_close(embedded[2 + i], expected)
    assert positions.blocks.shape == (3, 4)


def test_both_parts_learn() -> None:
    model = roberta(length=24, block=8)
    model(tokens(24)).logits.square().mean().backward()
    positions = positions_of(model)
    assert positions.blocks.grad is not None and (positions.blocks.grad != 0).any(dim=1).all()
    assert positions.within.grad is not None
    assert (positions.within.grad[2:] != 0).any(dim=1).all()


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
    padded, mask = tokens(20, padding=3), tokens(20, padding=3) != 1
    torch.testing.assert_close(
        plain(padded, attention_mask=mask).logits, model(padded, attention_mask=mask).logits
    )
    positions_of(model)  # saving left the model itself alone


def test_warm_start_keeps_the_first_block_and_repeats_it(tmp_path: Path) -> None:
    short = roberta(length=8, block=8)
    save_folded(short, tmp_path)
    long = warm_start(tmp_path, vocabulary_size=60, length=20, block=8, dropout=0.0).eval()
    torch.testing.assert_close(long(tokens(8)).logits, short(tokens(8)).logits)
    table = short.roberta.embeddings.position_embeddings.weight
    assert torch.equal(positions_of(long).within, table)
    assert not positions_of(long).blocks.any()
    assert long(tokens(20)).logits.shape == (2, 20, 60)


def test_warm_start_of_one_block_is_the_checkpoint(tmp_path: Path) -> None:
    short = roberta(length=8, block=8)
    save_folded(short, tmp_path)
    again = warm_start(tmp_path, vocabulary_size=60, length=8, block=8, dropout=0.25)
    assert (again.config.hidden_dropout_prob, again.config.attention_probs_dropout_prob) == (
        0.25,
        0.25,
    )
    torch.testing.assert_close(again.eval()(tokens(8)).logits, short(tokens(8)).logits)


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


def test_a_bert_becomes_a_roberta_of_equal_hidden_states(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=60, hidden_size=8, max_position_embeddings=10, **sizes)
    bert = BertModel(config).eval()
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
    embeddings = short.roberta.embeddings.word_embeddings.weight
    assert short.lm_head.decoder.weight is embeddings
    save_folded(long, tmp_path / "long")  # and the long one starts from the saved short one
    again = warm_start(tmp_path / "long", vocabulary_size=60, length=20, block=20, dropout=0.0)
    torch.testing.assert_close(again.eval()(ids).logits, long(ids).logits)


def test_only_a_folder_of_a_roberta_is_a_start(tmp_path: Path) -> None:
    arguments = {"vocabulary_size": 60, "length": 20, "block": 8, "dropout": 0.0}
    GPT2Config(vocab_size=60).save_pretrained(tmp_path)
    message = r"is a gpt2, neither a roberta nor a bert$"
    assert_refused(message, warm_start, tmp_path, **arguments)
    assert_refused(
        r"^package:torch/nothing: no such package, or no such path in it, is installed$",
        warm_start,
        "package:torch/nothing",
        error=FileNotFoundError,
        **arguments,
    )
    assert_refused(
        r"/nothing: no such folder$",
        warm_start,
        tmp_path / "nothing",
        error=FileNotFoundError,
        **arguments,
    )


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


def test_width_must_fit_the_heads() -> None:
    assert_refused(
        "width is 16; it must be divisible by heads = 3",
        build_roberta,
        **{**SIZE, "heads": 3},
        length=8,
        block=8,
        dropout=0.0,
    )


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_start_from_an_incomplete_checkpoint_is_refused(kind: str, tmp_path: Path) -> None:
    """A head that the checkpoint never had is drawn, a missing weight of a head or layer is not."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "vocab_size": 60, "max_position_embeddings": 12}
    whole = BertForMaskedLM(BertConfig(**sizes)) if kind == "bert" else roberta(10, 10)
    whole.save_pretrained(tmp_path)
    file, start = tmp_path / "model.safetensors", {"length": 8, "block": 8, "dropout": 0.0}
    state = load_file(file)

    def without(part: str) -> None:
        left = {name: weight for name, weight in state.items() if part not in name}
        assert len(left) < len(state)
        save_file(left, file, metadata={"format": "pt"})

    for part in ("cls." if kind == "bert" else "lm_head", "embeddings.LayerNorm.bias"):
        without(part)
        if part.startswith("embeddings"):
            line = "lacks weights of its config: .*LayerNorm.bias: give a whole one"
            assert_refused(line, warm_start, tmp_path, **SIZE, **start)
        else:
            assert warm_start(tmp_path, **SIZE, **start).config.num_hidden_layers == 2
    without("layer.1.attention.self.query.weight")
    assert_refused("lacks weights of its config", warm_start, tmp_path, **SIZE, **start)
    if kind == "roberta":
        without("lm_head.layer_norm.weight")
        assert_refused("lacks weights of its config", warm_start, tmp_path, **SIZE, **start)
