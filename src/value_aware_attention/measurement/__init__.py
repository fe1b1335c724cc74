"""Measures a method on a model's own text: end metric, output error, keys needed.

record = measurement.measure(task, {"window": lambda r, layer: SlidingWindow(r)}, sizes=[4, 16])
record.to_json()
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from value_aware_attention.measurement.measure import LayerOptions, Setting, measure
    from value_aware_attention.measurement.task import Task, Text
    from value_aware_attention.records.record import Record

__all__ = ["LayerOptions", "Record", "Setting", "Task", "Text", "measure"]

_HOMES = {"Record": "records.record", "Task": "measurement.task", "Text": "measurement.task"}
"""Modules of these names; the others are in `measure`"""


def __getattr__(name: str) -> object:
    """Imports a name on first use, so that records can be read without torch."""
    if name in __all__:
        home = _HOMES.get(name, "measurement.measure")
        return getattr(import_module(f"value_aware_attention.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """Offers the function `measure`; importing the module would otherwise put the module there."""

    @property
    def measure(self) -> object:
        return import_module(f"{self.__name__}.measure").measure

    @measure.setter
    def measure(self, module: ModuleType) -> None: ...


sys.modules[__name__].__class__ = _Package
