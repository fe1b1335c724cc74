"""Time and peak memory of one encoder layer, or of its attention alone, for every method."""

from value_aware_attention.benchmarking.layer import EagerAttention, EncoderLayer
from value_aware_attention.benchmarking.passes import PASSES, Setting, Subject
from value_aware_attention.benchmarking.survey import Plan, measure

__all__ = ["PASSES", "EagerAttention", "EncoderLayer", "Plan", "Setting", "Subject", "measure"]
