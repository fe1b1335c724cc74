"""Time and peak memory of one encoder layer, or of its attention alone, for every method."""

from value_aware_study.benchmarking.layer import EagerAttention, EncoderLayer
from value_aware_study.benchmarking.measurement import Plan, measure
from value_aware_study.benchmarking.passes import PASSES, Setting, Subject

__all__ = ["PASSES", "EagerAttention", "EncoderLayer", "Plan", "Setting", "Subject", "measure"]
