"""Checks the shapes in annotations at run time, with jaxtyping and beartype, under pytest alone.

jaxtyping's own import hook checks every annotation of a module. That would put its errors before
the ValueErrors of the public boundary, double the time of the tests, and stop torch.compile.
"""

import sys
from collections.abc import Sequence
from functools import cache, cached_property, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import Signature, isclass, isfunction, isgeneratorfunction, signature
from types import ModuleType
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from beartype import beartype
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor

__all__ = ["CHECKED", "check_shapes", "checked"]

LIBRARY = (
    *("approximations", "attention", "caches", "call", "error", "hugging_face", "kernels"),
    *("measurement", "models", "probe", "weights"),
)
STUDY = ("data", "evaluation", "training")
CHECKED = (
    *(f"value_aware_attention.{name}" for name in LIBRARY),
    *(f"value_aware_study.{name}" for name in STUDY),
    "tests.reference",
)
PUBLIC = {
    "attention",
    "attention_weights",
    "Approximation.forward",
    "Exact.forward",
    "AfterPrefix.forward",
    "SparseApproximation.select",
    "OptimalValueAware.path",
    "ValueAwareKeysAttentionWeights.path",
    "Call.of",
    "relative_output_error",
}
"""The public boundary: it raises ValueErrors of its own, and what it calls is checked."""


def check_shapes(*packages: str) -> None:
    """Checks the functions of packages and modules, none of which may have been imported."""
    imported = [package for package in packages if package in sys.modules]
    assert not imported, f"{imported} are imported already"
    sys.meta_path.insert(0, _Finder(packages))


def checked(item: Any) -> Any:
    """Returns a function whose calls are checked, or a class with such methods.

    Functions without a shape in their annotations, and everything else, are returned as given.
    """
    if isclass(item):
        for name, attribute in list(vars(item).items()):
            if (checks := _checked_attribute(attribute)) is not attribute:
                setattr(item, name, checks)
        return item
    return _checked_function(item) if isfunction(item) else item


def _checked_attribute(attribute: Any) -> Any:
    if isinstance(attribute, classmethod | staticmethod):
        return type(attribute)(checked(attribute.__func__))
    if isinstance(attribute, property):
        return property(checked(attribute.fget), attribute.fset)
    if isinstance(attribute, cached_property):
        attribute.func = checked(attribute.func)
        return attribute
    return checked(attribute) if isfunction(attribute) else attribute


def _checked_function(function: Any) -> Any:
    shapes = {name: x for name, x in function.__annotations__.items() if _has_shape(x)}
    # beartype checks a generator's arguments when it is iterated, among the letters of another call
    if not shapes or function.__qualname__ in PUBLIC or isgeneratorfunction(function):
        return function
    # The shapes alone: of a tuple of any length beartype looks at a random item, and the tests'
    # random numbers would depend on it.
    function.__annotations__ = shapes
    forms: dict[Any, set[Any]] = {}  # of arguments -> of results, where all were found right

    @cache
    def typed() -> tuple[Any, Any]:  # made at the first call: many functions are never called
        return beartype(function), beartype(_returning(function))

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # which cannot trace the checks
            return function(*arguments, **options)
        form = _form((arguments, options))
        results = forms.get(form)
        if results is None:
            with jaxtyped("context"):  # the letters of one call mean one number each
                result = typed()[0](*arguments, **options)
            forms[form] = {_form(result)}
            return result
        result = function(*arguments, **options)
        if (returned := _form(result)) not in results:
            _returned.append(result)
            with jaxtyped("context"):
                typed()[1](*arguments, **options)
            results.add(returned)
        return result

    return call


_returned: list[Any] = []


def _returning(function: Any) -> Any:
    """Returns a function with the parameters and annotations of another that pops `_returned`."""
    plain = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else None)
        for p in signature(function).parameters.values()
    ]
    made: dict[str, Any] = {"returned": _returned}
    exec(f"def stand_in{Signature(plain)}: return returned.pop()", made)
    made["stand_in"].__annotations__ = get_type_hints(function, include_extras=True)
    return made["stand_in"]


def _form(x: Any) -> Any:
    """Returns all that annotations of shapes depend on: types, and sizes and dtypes of tensors."""
    if isinstance(x, Tensor | np.ndarray):
        return type(x), x.shape, x.dtype
    if isinstance(x, tuple | list):
        return type(x), tuple(map(_form, x))
    if isinstance(x, dict):
        return tuple((key, _form(value)) for key, value in x.items())
    return type(x)


def _has_shape(annotation: Any) -> bool:
    if isclass(annotation) and issubclass(annotation, AbstractArray):
        return True
    return any(map(_has_shape, get_args(annotation)))


class _Finder(MetaPathFinder):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{package}.") for package in self.packages):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, item in list(vars(module).items()):
            if getattr(item, "__module__", None) == module.__name__:
                setattr(module, name, checked(item))
