"""Builds, saves and loads the models that are used with approximations."""

from value_aware_attention.models.causal_lm import CausalLanguageModel, CausalLanguageModelConfig
from value_aware_attention.models.long_roberta import (
    BlockPositions,
    build_roberta,
    save_folded,
    warm_start,
)
from value_aware_attention.models.masked_lm import attend_with, load_masked, save_masked
from value_aware_attention.models.mixing import FourierMixing, LinearMixing, RandomMixing
from value_aware_attention.models.trained_attention import TrainedAttention

__all__ = [
    "BlockPositions",
    "CausalLanguageModel",
    "CausalLanguageModelConfig",
    "FourierMixing",
    "LinearMixing",
    "RandomMixing",
    "TrainedAttention",
    "attend_with",
    "build_roberta",
    "load_masked",
    "save_folded",
    "save_masked",
    "warm_start",
]
