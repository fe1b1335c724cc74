"""Shows how much of a measurement is done: a bar on a terminal, lines in a file."""

from tqdm import tqdm


class Progress(tqdm):
    """Draws a bar on a terminal; elsewhere it writes a line after every tenth of the work."""

    tenths = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draws the bar, or writes a line where another tenth of `total` is done.

        Returns whether there is a bar, which is cleared at the end.
        """
        if self.fp.isatty():
            return bool(super().display(msg, pos))
        tenths = int(10 * self.n / self.total + 1e-9)
        if tenths > self.tenths:
            self.tenths = tenths
            left = self.format_dict["elapsed"] * max(self.total / self.n - 1, 0)
            end = f"; {self.postfix}" if self.postfix else ""
            self.fp.write(f"{10 * tenths}% measured, {self.format_interval(left)} left{end}\n")
        return False
