"""The models that the approximations are put into."""

from value_aware_attention.models.causal_lm import CausalLanguageModel
from value_aware_attention.models.long_roberta import (
    BlockPositions,
    build_roberta,
    save_folded,
    warm_start,
)

__all__ = ["BlockPositions", "CausalLanguageModel", "build_roberta", "save_folded", "warm_start"]
