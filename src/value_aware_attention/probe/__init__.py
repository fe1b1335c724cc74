"""Counts the keys that a trained model's attention needs on a text, by layer and head.

    report = probe.probe(model, tokenizer, text)
    print(report.headline)

`docs/probe.md` says what is measured and how.
"""

from value_aware_attention.probe.caches import default_cache_methods, probe_caches
from value_aware_attention.probe.report import Report, default_methods, probe

__all__ = ["Report", "default_cache_methods", "default_methods", "probe", "probe_caches"]
