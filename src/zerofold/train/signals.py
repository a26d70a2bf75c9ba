"""SIGTERM and Ctrl-C as flags, for a loop that looks at them between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is noted instead of ending the process. A second SIGINT ends it.

    >>> with StopSignals() as signals:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     signals.counts
    [0, 1]
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._before: dict[int, Any] = {}

    @property
    def counts(self) -> list[int]:
        """For each of SIGNALS, 1 if this process has got it: numbers that can be added over ranks."""
        return [int(number in self._seen) for number in SIGNALS]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # no other thread may
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen.add(number)
        if number == signal.SIGINT:
            # Not a handler in Python: a rank that waits in a collective would never come to run it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def first_of(counts: list[float]) -> int | None:
    """The signal that some rank has got, if any."""
    return next((int(number) for number, count in zip(SIGNALS, counts, strict=True) if count), None)
