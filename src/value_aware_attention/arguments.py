"""Checks the arguments of methods, with one-line ValueErrors that name the allowed values."""

from collections.abc import Collection, Iterable
from inspect import signature
from numbers import Real
from operator import index
from typing import TypeVar

from torch import Tensor, nn

Choice = TypeVar("Choice")

SEED_COUNT = 2**64
"""Number of seeds that torch's generators take"""
HIDDEN_DEFAULTS = [("engine", None), ("mean", False), ("share_query_key", False), ("sinks", 0)]
"""Arguments that a method's text omits at these defaults: records older than them still match"""


def check_at_least(minimum: int, **arguments: int) -> int:
    """Returns the only argument, if it is an integer >= `minimum`; ValueError otherwise."""
    ((name, number),) = arguments.items()
    if not is_integer(number) or number < minimum:
        raise ValueError(f"{name} is {number!r}; it must be an integer >= {minimum}")
    return index(number)


def check_keep(keep: float) -> float:
    """Returns a share of keys as a float, or a number of keys as an int.

    Python's and numpy's numbers are accepted, and tensors with one element. Raises ValueError
    except for a number above 0 and at most 1, or an integer >= 2.
    """
    is_number = isinstance(keep, Real) or (isinstance(keep, Tensor) and keep.ndim == 0)
    if is_number and is_integer(keep) and keep >= 2:
        return index(keep)  # type: ignore[arg-type]
    if isinstance(keep, bool) or not is_number or not 0 < float(keep) <= 1:
        raise ValueError(
            f"keep is {keep!r}; it must be a share above 0 and at most 1, or an integer >= 2"
        )
    return float(keep)


def check_seed(seed: int) -> int:
    """Returns the seed, if torch's generators take it; ValueError otherwise."""
    if not is_integer(seed) or not 0 <= seed < SEED_COUNT:
        raise ValueError(f"seed is {seed!r}; it must be an integer >= 0 and below 2**64")
    return index(seed)


def check_integers(**arguments: Collection[int]) -> list[int]:
    """Returns the only argument, if it is a collection of integers; ValueError otherwise."""
    ((name, integers),) = arguments.items()
    if not isinstance(integers, Collection) or not all(map(is_integer, integers)):
        raise ValueError(f"{name} is {integers!r}; it must be a list of integers")
    return list(map(index, integers))


def check_choice(choices: Iterable[Choice], **arguments: Choice) -> Choice:
    """Returns the choice that equals the only argument; ValueError if none does."""
    ((name, choice),) = arguments.items()
    allowed = tuple(choices)
    if isinstance(choice, bool) or choice not in allowed:
        none = "None or " if None in allowed else ""
        names = ", ".join(str(name) for name in allowed if name is not None)
        raise ValueError(f"{name} is {choice!r}; it must be {none}one of {names}")
    return allowed[allowed.index(choice)]


def check_flag(**arguments: bool) -> bool:
    """Returns the only argument, if it is True or False; ValueError otherwise."""
    ((name, flag),) = arguments.items()
    if not isinstance(flag, bool):
        raise ValueError(f"{name} is {flag!r}; it must be True or False")
    return flag


def check_tensors(**arguments: Tensor) -> None:
    """Raises ValueError for an argument that is not a floating-point tensor."""
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else described(tensor)
            raise ValueError(f"{name} is {kind}; it must be a tensor of floating-point numbers")


def described(argument: object) -> str:
    """Describes an argument in a few words, even a large tensor."""
    if isinstance(argument, type):
        return f"the class {argument.__name__}"
    if argument is None or isinstance(argument, str | int | float):
        return repr(argument)
    return f"of type {type(argument).__name__}"


def is_integer(number: object) -> bool:
    """Returns whether the argument works as an integer: Python's or numpy's, but not a bool."""
    try:
        index(number)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(number, bool)


def arguments_shown(module: nn.Module) -> str:
    """Lists the arguments of a module's constructor; records are looked up by this text.

    Arguments that are modules are left out: the module's text shows them as children.
    """
    arguments = [
        (x.name, getattr(module, x.name))
        for x in signature(type(module)).parameters.values()
        if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
    ]
    return ", ".join(
        f"{name}={argument!r}"
        for name, argument in arguments
        if not isinstance(argument, nn.Module) and (name, argument) not in HIDDEN_DEFAULTS
    )
