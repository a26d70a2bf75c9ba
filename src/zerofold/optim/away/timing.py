"""How long host and device take for their parts of an update, and the share with which both are done together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

_MEASURED = 5  # updates, after which the best share stays
_LARGEST_MOVE = 0.1
_SMALLEST_MOVE = 0.01  # below it the parameters that change sides are too few to matter


class Trial(NamedTuple):
    """One update with one share."""

    share: float
    host: float  # seconds
    device: float

    @property
    def longest(self) -> float:
        return max(self.host, self.device)

    @property
    def lead(self) -> float:
        """By which the device was done before the host."""
        return self.host - self.device


@dataclass
class Timing:
    """Of the last update, and what follows for the next.

    >>> timing = Timing(0.65)
    >>> for _ in range(7):  # the host has 2 of 6 parts of the speed
    ...     timing.tune(timing.device_share)
    ...     timing.host_seconds, timing.device_seconds = (1 - timing.device_share) / 2, timing.device_share / 4
    >>> timing.is_tuned, round(timing.device_share, 3)
    (True, 0.667)
    """

    device_share: float
    host_elements: int = 0
    device_elements: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    steps: int = 0
    trials: list[Trial] = field(default_factory=list)
    is_tuned: bool = False
    _started: float = 0.0

    def begin(self) -> None:
        self._started = time.perf_counter()
        self.host_elements = self.device_elements = 0

    def end_of_host(self) -> None:
        self.host_seconds = time.perf_counter() - self._started

    def tune(self, ran_with: float | None) -> None:
        """Before an update; `ran_with`: the share of the one before.

        Rates alone would not do: host and device share one memory, so each is faster when the other has less to do. So
        the share goes where two measured ones say that both would be done together, and is measured there.
        """
        if self.is_tuned:
            return
        self.steps += 1
        if self.steps <= 2 or ran_with is None:  # the first update makes kernels and faults memory in
            return
        self.trials.append(Trial(ran_with, self.host_seconds, self.device_seconds))
        wanted = balanced(self.trials)
        if wanted is not None and len(self.trials) < _MEASURED and abs(wanted - ran_with) >= _SMALLEST_MOVE:
            self.device_share = wanted
            return
        self.device_share = min(self.trials, key=lambda trial: trial.longest).share
        self.is_tuned = True


def balanced(trials: list[Trial]) -> float | None:
    """The share with which host and device should be done at the same time; None where one of them had nothing to do.

    >>> balanced([Trial(0.6, 0.8, 0.6), Trial(0.8, 0.4, 0.8)])
    0.667
    """
    last = trials[-1]
    if not 0 < last.share < 1 or not min(last.host, last.device) > 0:
        return None
    over = [trial for trial in trials if trial.lead >= 0]  # the device could have had more
    under = [trial for trial in trials if trial.lead < 0]
    if over and under:
        low, high = max(over, key=lambda trial: trial.share), min(under, key=lambda trial: trial.share)
        if low.share < high.share:
            return round(low.share + (high.share - low.share) * low.lead / (low.lead - high.lead), 3)
    host_rate, device_rate = (1 - last.share) / last.host, last.share / last.device
    wanted = device_rate / (host_rate + device_rate)
    return round(min(last.share + _LARGEST_MOVE, max(last.share - _LARGEST_MOVE, wanted)), 3)
