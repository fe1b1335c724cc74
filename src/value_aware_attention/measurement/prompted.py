"""Names of `caches` by which prompts were measured before 1.2."""

from value_aware_attention.measurement.caches import Build, Prompt, measure_prompts
from value_aware_attention.records.cache_record import CacheCell as PromptCell
from value_aware_attention.records.cache_record import CacheRecord as PromptRecord

__all__ = ["Build", "Prompt", "PromptCell", "PromptRecord", "measure_prompts"]
