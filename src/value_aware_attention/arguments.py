"""Checks the arguments of methods, with one-line ValueErrors that name the allowed values."""

from collections.abc import Collection, Iterable
from inspect import signature
from numbers import Real
from operator import index
from typing import SupportsFloat, TypeVar

from torch import Tensor, nn

Choice = TypeVar("Choice")

SEEDS = 2**64
"""Number of seeds that torch's generators take"""


def check_at_least(minimum: int, **arguments: int) -> int:
    """Returns the one argument given, if it is an integer >= `minimum`; ValueError otherwise."""
    ((name, given),) = arguments.items()
    if not is_integer(given) or given < minimum:
        raise ValueError(f"{name} is {given!r}; it must be an integer >= {minimum}")
    return index(given)


def check_share(**arguments: SupportsFloat) -> float:
    """Returns the one argument given, a number or tensor of one, if it is above 0 and at most 1."""
    ((name, given),) = arguments.items()
    is_number = isinstance(given, Real) or (isinstance(given, Tensor) and given.ndim == 0)
    if isinstance(given, bool) or not is_number or not 0 < float(given) <= 1:
        raise ValueError(f"{name} is {given!r}; it must be above 0 and at most 1, as a number")
    return float(given)


def check_seed(seed: int) -> int:
    """Returns the seed, if torch's generators take it; ValueError otherwise."""
    if not is_integer(seed) or not 0 <= seed < SEEDS:
        raise ValueError(f"seed is {seed!r}; it must be an integer >= 0 and below 2**64")
    return index(seed)


def check_integers(**arguments: Collection[int]) -> list[int]:
    """Returns the one argument given, if it is a collection of integers; ValueError otherwise."""
    ((name, given),) = arguments.items()
    if not isinstance(given, Collection) or not all(map(is_integer, given)):
        raise ValueError(f"{name} is {given!r}; it must be a list of integers")
    return list(map(index, given))


def check_choice(choices: Iterable[Choice], **arguments: Choice) -> Choice:
    """Returns the choice that the one argument given equals; ValueError where there is none."""
    ((name, given),) = arguments.items()
    allowed = tuple(choices)
    if isinstance(given, bool) or given not in allowed:
        none = "None or " if None in allowed else ""
        named = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise ValueError(f"{name} is {given!r}; it must be {none}one of {named}")
    return allowed[allowed.index(given)]


def check_tensors(**arguments: Tensor) -> None:
    """Raises ValueError for an argument that is no tensor of floating-point numbers."""
    for name, given in arguments.items():
        if not isinstance(given, Tensor) or not given.is_floating_point():
            shown = given.dtype if isinstance(given, Tensor) else described(given)
            raise ValueError(f"{name} is {shown}; it must be a tensor of floating-point numbers")


def described(given: object) -> str:
    """Describes an argument in a few words, be it as long as a tensor."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if given is None or isinstance(given, str | int | float):
        return repr(given)
    return f"of type {type(given).__name__}"


def is_integer(given: object) -> bool:
    """Tells whether Python takes the argument for an integer, as it does numpy's; not True or
    False."""
    try:
        index(given)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(given, bool)


def arguments_shown(module: nn.Module) -> str:
    """Lists the arguments of a module except modules, which its text shows as its children."""
    given = {name: getattr(module, name) for name in signature(type(module)).parameters}
    shown = {name: x for name, x in given.items() if not isinstance(x, nn.Module)}
    return ", ".join(f"{name}={argument!r}" for name, argument in shown.items())
