"""Holds a call to the one line with which it is refused."""

from collections.abc import Callable
from typing import Any

import pytest


def assert_refused(
    line: str,
    call: Callable[..., Any],
    /,
    *given: Any,
    error: type[BaseException] = ValueError,
    **options: Any,
) -> None:
    """Calls with what is given; the error must be one line, in which the pattern is found."""
    with pytest.raises(error, match=line) as stopped:
        call(*given, **options)
    assert "\n" not in str(stopped.value)
