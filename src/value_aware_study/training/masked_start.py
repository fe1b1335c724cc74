"""Checks of a masked training before it starts: its attention and its first weights."""

from pathlib import Path

from value_aware_attention.hugging_face.saved import check_files, installed
from value_aware_attention.kernels import Exponential
from value_aware_attention.models.long_roberta import read_config
from value_aware_attention.models.masked_lm import masked_kernel
from value_aware_attention.models.trained_attention import TrainedAttention


def check_attention(
    attention: TrainedAttention | None, warm_start: str | None, *, length: int, head_dim: int
) -> None:
    """Raises ValueError for an attention that cannot be trained at this size from `warm_start`.

    A model trained with a mixing has no attention to start from.
    """
    if attention is not None:
        kernel = masked_kernel(attention) or Exponential()
        attention.check_trainable(kernel=kernel, length=length, head_dim=head_dim, is_causal=False)
    if warm_start is None:
        return
    if (folder := Path(installed(warm_start))).is_dir():
        check_files(folder, "train the model again")
    start = TrainedAttention.of(read_config(warm_start))
    if start and start.is_mixing and not (attention and attention.is_mixing):
        raise ValueError(f"{warm_start} was trained with {start}: it has no attention")
