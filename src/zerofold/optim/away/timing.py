"""How long host and device take for their parts of an update, and the share with which both are done together."""

from __future__ import annotations

import time
from dataclasses import dataclass

_LARGEST_MOVE = 0.1
_SMALLEST_MOVE = 0.015  # below it the parameters that change sides are too few to matter
_QUICK_STEPS = 4  # go all the way; later ones half of it, since a single update may have been disturbed


@dataclass
class Timing:
    """Of the last update, and what follows for the next.

    >>> timing = Timing(0.55)
    >>> for _ in range(7):  # the host has 2 of 6 parts of the speed
    ...     timing.tune(timing.device_share)
    ...     timing.host_seconds, timing.device_seconds = (1 - timing.device_share) / 2, timing.device_share / 4
    >>> round(timing.device_share, 3)
    0.667
    """

    device_share: float
    host_elements: int = 0
    device_elements: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    steps: int = 0
    _started: float = 0.0

    def begin(self) -> None:
        self._started = time.perf_counter()
        self.host_elements = self.device_elements = 0

    def end_of_host(self) -> None:
        self.host_seconds = time.perf_counter() - self._started

    def tune(self, ran_with: float | None) -> None:
        """Before an update; `ran_with`: the share of the one before.

        The share moves towards the one with which both would have been done together at the rates just seen. It does
        so for ever: host and device share one memory, so each is faster when the other has less to do, and other
        work comes and goes on the host.
        """
        self.steps += 1
        if self.steps <= 2 or ran_with is None:  # the first update makes kernels and faults memory in
            return
        if not 0 < ran_with < 1 or not min(self.host_seconds, self.device_seconds) > 0:
            return  # one of them had nothing to do
        host_rate, device_rate = (1 - ran_with) / self.host_seconds, ran_with / self.device_seconds
        move = device_rate / (host_rate + device_rate) - ran_with
        if abs(move) >= _SMALLEST_MOVE:
            move /= 1 if self.steps <= _QUICK_STEPS else 2
            self.device_share = round(ran_with + min(_LARGEST_MOVE, max(-_LARGEST_MOVE, move)), 3)
