"""One run at a time in a folder: two would write into the same metrics and replace each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 5.0  # for processes of a run that was just ended


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Raises where another process is in here. The lock is the folder's own, and goes with the process that has it."""
    descriptor = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # whoever writes into it will tell
        pass
    try:
        if descriptor is not None:
            _lock(descriptor, folder)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise ValueError(
                    f"{folder} is in use by a run that has not ended: end that first, or name another folder with --out"
                ) from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return
