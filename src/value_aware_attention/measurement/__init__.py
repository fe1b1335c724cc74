"""Measures a method on a model's own text: end metric, output error, keys needed.

record = measurement.measure(task, {"window": lambda r, layer: SlidingWindow(r)}, sizes=[4, 16])
record.to_json()
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from value_aware_attention.measurement.measure import LayerOptions, Setting, measure
    from value_aware_attention.measurement.record import Record
    from value_aware_attention.measurement.task import Task, Text

__all__ = ["LayerOptions", "Record", "Setting", "Task", "Text", "measure"]

_HOMES = {"Record": "record", "Task": "task", "Text": "task"}
"""Modules of the names above; the others are of `measure`"""


def __getattr__(name: str) -> Any:
    """Imports a name only when it is asked for, so that records are read without torch."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'measure')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """Has the function `measure`, where Python would put the module when it is imported."""

    @property
    def measure(self) -> Any:
        return import_module(f"{self.__name__}.measure").measure

    @measure.setter
    def measure(self, module: ModuleType) -> None: ...


sys.modules[__name__].__class__ = _Package
