"""Extends RoBERTa beyond its position table (A.1, after Gupta & Berant 2020, GMAT)."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import (
    AutoConfig,
    BertConfig,
    BertModel,
    PreTrainedConfig,
    RobertaConfig,
    RobertaForMaskedLM,
)

from value_aware_attention.hugging_face.saved import (
    check_weights,
    installed,
    only_local,
    why_not,
    without_report,
)

POSITIONS = "roberta.embeddings.position_embeddings"
POSITION_TABLE = "embeddings.position_embeddings.weight"
TYPES = "embeddings.token_type_embeddings.weight"
HEAD = "lm_head.dense.weight"
ROBERTA_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feedforward": "intermediate_size",
}


class BlockPositions(nn.Module):
    """Embeds position i = block q + r as R[r] + Q[q]: "POSq" in Table 4.

    It replaces RoBERTa's table and has the same rows: first `reserved` rows (the last one for
    padding), then position 0. R is initialised to the first `reserved + block` rows of `table` and
    Q to zero, so initially all blocks equal the first.
    """

    def __init__(
        self, table: Float[Tensor, "rows width"], *, reserved: int, block: int, length: int
    ) -> None:
        super().__init__()
        self.reserved, self.length = reserved, length
        self.within = nn.Parameter(table[: reserved + block].detach().clone())  # R
        self.blocks = nn.Parameter(table.new_zeros(-(-length // block), table.shape[1]))  # Q

    def table(self) -> Float[Tensor, "rows width"]:
        """Returns R + Q as an ordinary table of `reserved + length` rows with the same values."""
        reserved, within = self.within.tensor_split([self.reserved])
        return torch.cat([reserved, (self.blocks[:, None] + within).flatten(0, 1)[: self.length]])

    def forward(self, position_ids: Int[Tensor, "batch N"]) -> Float[Tensor, "batch N width"]:
        return embedding(position_ids, self.table(), padding_idx=self.reserved - 1)


def build_roberta(
    *,
    vocabulary_size: int,
    layers: int,
    width: int,
    heads: int,
    feedforward: int,
    length: int,
    block: int,
    dropout: float,
    bos_token: int = 0,
    pad_token: int = 1,
    eos_token: int = 2,
) -> RobertaForMaskedLM:
    """Builds a RoBERTa with random weights for sequences of `length` tokens.

    If length > block, positions are `BlockPositions`; otherwise the model is a plain RoBERTa.
    """
    if width % heads:
        raise ValueError(f"width is {width}; it must be divisible by heads = {heads}")
    config = RobertaConfig(
        vocab_size=vocabulary_size,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=feedforward,
        max_position_embeddings=pad_token + 1 + min(length, block),
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        bos_token_id=bos_token,
        pad_token_id=pad_token,
        eos_token_id=eos_token,
    )
    return _lengthen(RobertaForMaskedLM(config), length, block)


def warm_start(
    checkpoint: str | Path,
    *,
    vocabulary_size: int,
    length: int,
    block: int,
    dropout: float,
    **sizes: int,
) -> RobertaForMaskedLM:
    """Loads a trained RoBERTa (a folder, or a name on the Hugging Face hub) for `length` tokens.

    With length <= block the checkpoint is unchanged; otherwise R is its table and Q is zero. A BERT
    becomes a RoBERTa with equal hidden states and a new head before its tied embeddings. `sizes`
    are the required sizes of the checkpoint, named as in `build_roberta`. Raises ValueError for a
    model of another type, size or vocabulary or with fewer than min(length, block) positions,
    FileNotFoundError for a folder without a model, OSError for a folder without complete
    safetensors.
    """
    config = read_config(checkpoint)
    if config.vocab_size != vocabulary_size:
        raise ValueError(
            f"{checkpoint} was trained with {config.vocab_size} tokens, "
            f"the vocabulary has {vocabulary_size}"
        )
    of_config = {name: getattr(config, ROBERTA_SIZES[name]) for name in sizes}
    if of_config != sizes:
        has, asked = (", ".join(f"{n} {size}" for n, size in x.items()) for x in (of_config, sizes))
        raise ValueError(f"{checkpoint} has {has}; {asked} are asked for: is it of another scale?")
    vars(config).pop("trained_attention", None)  # the checkpoint's, not the new model's
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    return _lengthen(_read_weights(installed(checkpoint), config), length, block)


def save_folded(model: RobertaForMaskedLM, folder: Path, *, without: Collection[str] = ()) -> None:
    """Writes a model with the same logits for `RobertaForMaskedLM.from_pretrained(folder)`.

    R[r] + Q[q] become the rows of an ordinary position table. `without` names weights to leave out
    because plain transformers does not know them.
    """
    state = {name: value for name, value in model.state_dict().items() if name not in without}
    positions = model.roberta.embeddings.position_embeddings
    if isinstance(positions, BlockPositions):
        for name in positions.state_dict():
            del state[f"{POSITIONS}.{name}"]
        state[f"{POSITIONS}.weight"] = positions.table().detach()
    model.save_pretrained(folder, state_dict=state)


def read_config(checkpoint: str | Path) -> RobertaConfig:
    """Reads the config of a trained RoBERTa, or of the RoBERTa that a trained BERT becomes.

    Raises FileNotFoundError if there is none, ValueError for a model of another type.
    """
    config = _saved_config(installed(checkpoint))
    if isinstance(config, BertConfig):
        rows = config.max_position_embeddings + (config.pad_token_id or 0) + 1
        return RobertaConfig.from_dict(
            config.to_dict()
            | {"max_position_embeddings": rows, "type_vocab_size": 1, "model_type": "roberta"}
        )
    if not isinstance(config, RobertaConfig):
        raise ValueError(f"{checkpoint} is a {config.model_type}, neither a roberta nor a bert")
    return config


def _saved_config(checkpoint: str | Path) -> PreTrainedConfig:
    offline = only_local(checkpoint)
    try:
        return AutoConfig.from_pretrained(checkpoint, local_files_only=offline)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no trained RoBERTa at {checkpoint}: {why_not(checkpoint, error)}"
        ) from None


def _read_weights(checkpoint: str | Path, config: RobertaConfig) -> RobertaForMaskedLM:
    """Loads a checkpoint's weights; ValueError for missing weights, which would be drawn at random.

    The head may be missing entirely.
    """
    is_bert = isinstance(_saved_config(checkpoint), BertConfig)
    build: Any = BertModel if is_bert else RobertaForMaskedLM
    options: dict[str, Any] = {} if is_bert else {"config": config}
    try:
        with without_report():
            model, report = build.from_pretrained(
                checkpoint, use_safetensors=True, local_files_only=only_local(checkpoint),
                output_loading_info=True, **options,
            )  # fmt: skip
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the weights at {checkpoint} cannot be loaded: {why_not(checkpoint, error)}"
        ) from None
    drawn = ("lm_head", "pooler") if is_bert or HEAD in report["missing_keys"] else ()
    report["unexpected_keys"] = []  # weights of another attention are dropped
    check_weights(checkpoint, model, report, drawn=drawn)
    return _with_trunk(model, config) if is_bert else model


def _with_trunk(bert: BertModel, config: RobertaConfig) -> RobertaForMaskedLM:
    """Builds a RoBERTa of `config` with the layers and embeddings of a BERT.

    RoBERTa counts positions from its padding id + 1, so the table gets rows before them. Its only
    token type is the first of BERT's.
    """
    model = RobertaForMaskedLM(config)
    trunk = model.roberta.state_dict()
    state = {name: weights for name, weights in bert.state_dict().items() if name in trunk}
    state[TYPES] = state[TYPES][: config.type_vocab_size]
    state[POSITION_TABLE] = torch.cat(
        [trunk[POSITION_TABLE][: -len(state[POSITION_TABLE])], state[POSITION_TABLE]]
    )
    model.roberta.load_state_dict(state)
    return model


def _lengthen(model: RobertaForMaskedLM, length: int, block: int) -> RobertaForMaskedLM:
    embeddings = model.roberta.embeddings
    reserved = embeddings.padding_idx + 1
    positions = model.config.max_position_embeddings - reserved
    if positions < min(length, block):
        raise ValueError(f"the model has {positions} positions, {min(length, block)} are needed")
    if length <= block:
        return model
    embeddings.position_embeddings = BlockPositions(  # type: ignore[assignment]
        embeddings.position_embeddings.weight, reserved=reserved, block=block, length=length
    )
    rows = reserved + length
    model.config.max_position_embeddings = rows
    embeddings.position_ids = nn.Buffer(torch.arange(rows)[None], persistent=False)
    embeddings.token_type_ids = nn.Buffer(torch.zeros(1, rows, dtype=torch.long), persistent=False)
    return model
