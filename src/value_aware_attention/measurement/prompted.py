"""Keeps the names that measured prompts before 1.2; `caches` has them now."""

from value_aware_attention.measurement.caches import Build, Prompt, measure_prompts
from value_aware_attention.records.cache_record import CacheCell as PromptCell
from value_aware_attention.records.cache_record import CacheRecord as PromptRecord

__all__ = ["Build", "Prompt", "PromptCell", "PromptRecord", "measure_prompts"]
