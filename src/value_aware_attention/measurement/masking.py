"""Masks tokens like BERT (Devlin et al. 2019, section 3.1), as in A.1."""

from collections.abc import Sequence

import torch
from torch import Tensor

IGNORED = -100  # the label that torch.nn.functional.cross_entropy ignores


def mask_tokens(
    tokens: Tensor,
    *,
    generator: torch.Generator,
    mask_token: int,
    special_tokens: Sequence[int],
    vocabulary_size: int,
    fraction: float = 0.15,
) -> tuple[Tensor, Tensor]:
    """Hides a `fraction` of each sequence's ordinary tokens: (inputs, labels), both like `tokens`.

    tokens (..., length) int64. Of the chosen tokens 80% become `mask_token`, 10% become a uniformly
    drawn ordinary token, 10% stay. Their labels hold the original token; other labels are -100.
    Special tokens are never chosen or drawn. Of n ordinary tokens in a sequence `fraction` n are
    chosen, rounded up or down at random to keep the mean, as in fairseq.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, not {fraction}")
    specials = torch.tensor(sorted(set(special_tokens)), dtype=torch.long)
    ordinary = ~torch.isin(tokens, specials)
    drawn = torch.rand(tokens.shape, generator=generator)
    rounding = torch.rand(tokens.shape[:-1], generator=generator)
    counts = (fraction * ordinary.sum(-1) + rounding).floor()
    chosen = drawn.masked_fill(~ordinary, 2.0).argsort(-1).argsort(-1) < counts[..., None]
    labels = torch.where(chosen, tokens, IGNORED)
    kind = torch.rand(tokens.shape, generator=generator)
    replacements = torch.arange(vocabulary_size)
    replacements = replacements[~torch.isin(replacements, specials)]
    if not len(replacements):
        raise ValueError(f"a vocabulary of {vocabulary_size} holds nothing but special tokens")
    picks = torch.randint(len(replacements), tokens.shape, generator=generator)
    inputs = torch.where(chosen & (kind < 0.8), mask_token, tokens)
    inputs = torch.where(chosen & (kind >= 0.9), replacements[picks], inputs)
    return inputs, labels
