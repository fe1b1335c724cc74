"""Progress is lines in a file, one for each tenth of the work, and a bar on a terminal."""

import io

import pytest

from value_aware_attention.measurement.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO, steps: int, total: float) -> str:
    with Progress(total=total, file=file, leave=False) as progress:
        for step in range(steps):
            progress.set_postfix_str(f"part {step}")
            progress.update(total / steps)
    return file.getvalue()


@pytest.mark.parametrize(("steps", "lines"), [(100, 10), (10, 10), (3, 3), (1, 1)])
def test_a_file_has_a_line_for_each_tenth(steps: int, lines: int) -> None:
    written = shown(io.StringIO(), steps, total=7.0).splitlines()
    assert len(written) == lines and "\r" not in "".join(written)
    assert written[-1] == f"100% measured, 00:00 left; part {steps - 1}"


def test_a_terminal_has_a_bar() -> None:
    assert "\r" in shown(Terminal(), 3, total=3) and "measured" not in shown(Terminal(), 3, total=3)
