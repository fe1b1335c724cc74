"""Checks of a masked training before it starts: its attention, first weights and held-out text."""

from pathlib import Path

from value_aware_attention.hugging_face.saved import check_files
from value_aware_attention.kernels import Exponential
from value_aware_attention.measurement.masking import IGNORED
from value_aware_attention.models.long_roberta import read_config
from value_aware_attention.models.masked_lm import masked_kernel
from value_aware_attention.models.trained_attention import TrainedAttention
from value_aware_study.data.batches import FrozenMaskedBatches


def check_attention(
    attention: TrainedAttention | None, warm_start: str | None, *, length: int, head_dim: int
) -> None:
    """Raises ValueError for an attention that cannot be trained at this size from `warm_start`.

    A model that was trained with a mixing has no attention to start from.
    """
    if attention is not None:
        kernel = masked_kernel(attention) or Exponential()
        attention.check_trainable(kernel=kernel, length=length, head_dim=head_dim, is_causal=False)
    if warm_start is None:
        return
    if Path(warm_start).is_dir():
        check_files(Path(warm_start), "train the model again")
    start = TrainedAttention.of(read_config(warm_start))
    if start and start.is_mixing and not (attention and attention.is_mixing):
        raise ValueError(f"{warm_start} was trained with {start}: it has no attention")


def check_masked(held_out: FrozenMaskedBatches) -> None:
    """Raises ValueError for held-out text on which nothing would be predicted."""
    batches = (held_out[index] for index in range(len(held_out)))
    if len(held_out) and not any((batch["labels"] != IGNORED).any() for batch in batches):
        raise ValueError(
            f"no masked token in {held_out.count} held-out sequences; masked.fraction is "
            f"{held_out.sequences.fraction:g}, raise it"
        )
