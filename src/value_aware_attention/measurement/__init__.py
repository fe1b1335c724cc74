"""Measures a method on a model's own text: end metric, output error, keys needed.

record = measurement.measure(task, {"window": lambda r, layer: SlidingWindow(r)}, sizes=[4, 16])
record.to_json()
"""

from value_aware_attention.measurement.measure import LayerOptions, Setting, measure
from value_aware_attention.measurement.record import Record
from value_aware_attention.measurement.task import Task, Text

__all__ = ["LayerOptions", "Record", "Setting", "Task", "Text", "measure"]
