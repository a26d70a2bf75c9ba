"""A save as its caller sees it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from zerofold.engine import Engine

Report = Callable[[int, int], None]
"""Told the bytes that this rank has written, and all it will write."""


class Saving:
    """A checkpoint on its way. `wait` returns when it is complete, and raises what went wrong, on every rank.

    >>> import tempfile, torch, zerofold as zf
    >>> model, folder = zf.shard(torch.nn.Linear(64, 64), stage=3), tempfile.mkdtemp()
    >>> saving = zf.save(model, None, folder, background=True)
    >>> saving.wait()
    >>> saving.is_done, saving.written == saving.total
    (True, True)
    >>> zf.close(model)
    """

    def __init__(self, path: Path, total: int, progress: Report | None) -> None:
        self.path, self.total, self.written = path, total, 0
        self.after: list[Callable[[], None]] = []  # what is to be done when it is over
        self._progress, self._lock = progress, threading.Lock()
        self._error: BaseException | None = None
        self.was_told = False  # of the error
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        while self.after:
            self.after.pop()()
        if self._error is not None:
            self.was_told = True
            raise self._error

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def start(self, run: Callable[[], None]) -> None:
        # Not a daemon: a process that ends waits for its checkpoint.
        self._thread = threading.Thread(target=run, name="zerofold-save")
        self._thread.start()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes
            if self._progress is not None:
                self._progress(self.written, self.total)

    def fail(self, error: BaseException) -> None:
        self._error = error
        if self._thread is not None:  # training goes on, so nobody may be waiting
            warnings.warn(f"the checkpoint {self.path} was not saved: {error}", stacklevel=2)


def finish_saving(engine: Engine) -> None:
    """Waits for a save in the background, and raises what went wrong with it, if any rank has not been told yet."""
    saving, engine.saving = engine.saving, None
    if not isinstance(saving, Saving):
        return
    was_told = saving.was_told
    try:
        saving.wait()
    except Exception:
        if not all(engine.groups.job.all_gather_objects(was_told, unit="save")):
            raise
