"""Checks of the arguments that methods are built with: one-line ValueErrors that name what fits."""

from collections.abc import Iterable
from inspect import signature
from typing import TypeVar

from torch import nn

__all__ = ["arguments_shown", "check_at_least", "check_choice"]

Choice = TypeVar("Choice")


def check_at_least(minimum: int, **arguments: int) -> int:
    """Returns the one argument given, if it is an integer >= `minimum`; ValueError otherwise."""
    ((name, given),) = arguments.items()
    if isinstance(given, bool) or not isinstance(given, int) or given < minimum:
        raise ValueError(f"{name} is {given!r}; it must be an integer >= {minimum}")
    return given


def check_choice(choices: Iterable[Choice], **arguments: Choice) -> Choice:
    """Returns the one argument given, if it is among the choices; ValueError otherwise."""
    ((name, given),) = arguments.items()
    allowed = tuple(choices)
    if isinstance(given, bool) or given not in allowed:
        none = "None or " if None in allowed else ""
        named = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise ValueError(f"{name} is {given!r}; it must be {none}one of {named}")
    return given


def arguments_shown(module: nn.Module) -> str:
    """Lists what a module was built with, but for modules, which its text shows as its children."""
    given = {name: getattr(module, name) for name in signature(type(module)).parameters}
    shown = {name: x for name, x in given.items() if not isinstance(x, nn.Module)}
    return ", ".join(f"{name}={argument!r}" for name, argument in shown.items())
