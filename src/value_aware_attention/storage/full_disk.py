"""A full disk by one name, whichever library found it."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["DiskFull", "full_disk_named"]

REASONS = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "files may not grow as large",
}
BY_RUST = re.compile(r"os error (\d+)")
BY_TORCH = re.compile(r"unexpected pos \d+|iostream error|PytorchStreamWriter failed")
"""torch.save says where its archive should have gone on, not why it could not."""
ROOM = 2**30
"""Free bytes with which torch's reason is rather a limit"""


class DiskFull(OSError):
    """Says in one line which folder took no more bytes."""


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Raises DiskFull for what any library raises where `folder` takes no more bytes."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        reason = _reason(error, free)
        if reason is None:
            raise
        raise DiskFull(f"{reason} in {folder} ({free:,} bytes are free)") from error


def _reason(error: BaseException | None, free: int) -> str | None:
    """Finds a lack of space in an error or in one that it followed from."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if by_rust := BY_RUST.search(str(error)):
            number = int(by_rust[1])
        if number in REASONS:
            return REASONS[number]
        if isinstance(error, RuntimeError) and BY_TORCH.search(str(error)):
            limited = f", or {REASONS[errno.EFBIG]}" if free > ROOM else ""
            return REASONS[errno.ENOSPC] + limited
        error = error.__cause__ or error.__context__
    return None
