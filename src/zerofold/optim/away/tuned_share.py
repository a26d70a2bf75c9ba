"""How long host and device take for their parts of an update, and what share of it each should have next."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

_LARGEST_MOVE = 0.1
_SMALLEST_MOVE = 0.015  # below it the parameters that change sides are too few to matter
_QUICK_STEPS = 4  # go all the way; later ones half of it, since a single update may have been disturbed
_PERIOD, _TRIALS = 64, (5, 6)  # of so many updates these try what is not done otherwise
_CLEAR_GAIN = 0.97  # of a step's time; less may be chance


@dataclass
class TunedShare:
    """Of the last update, and what follows for the next.

    The share moves towards the one with which both would have been done together at the rates just seen. It does so for
    ever: host and device share one memory, so each is faster when the other has less to do, and other work comes and
    goes on the host. For the same reason whole steps may be shorter with the device alone, where the host's memory has
    nothing to spare: that is tried now and then, and what it is judged by is the time from update to update. The
    device's own seconds would not do: what else is on the bus waits for it.

    >>> share = TunedShare(0.55)
    >>> for _ in range(5):  # the host has 2 of 6 parts of the speed
    ...     share.tune(share.device_share, now=0.0)
    ...     share.host_seconds, share.device_seconds = (1 - share.device_share) / 2, share.device_share / 4
    >>> round(share.together, 3), share.device_share
    (0.667, 1.0)
    """

    device_share: float
    """Of the next update."""
    host_elements: int = 0
    device_elements: int = 0
    early_elements: int = 0
    """Of them, updated under backward."""
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    steps: int = 0
    together: float = field(init=False)
    """The share with which both are done at the same time."""
    _started: float = 0.0
    _before: float | None = None  # when the last update was submitted
    _stays_alone: bool = False  # between trials
    _took: dict[bool, deque[float]] = field(init=False, repr=False)
    """By whether the device was alone: seconds of the last steps, each from update to update."""

    def __post_init__(self) -> None:
        self.together = self.device_share
        self._took = {is_alone: deque(maxlen=len(_TRIALS)) for is_alone in (False, True)}

    def begin(self) -> None:
        self._started = time.perf_counter()
        self.host_elements = self.device_elements = 0

    def end_of_host(self) -> None:
        self.host_seconds = time.perf_counter() - self._started

    def tune(self, ran_with: float | None, now: float | None = None, *, is_like_others: bool = True) -> None:
        """Before an update; `ran_with`: the share of the one before; a step unlike others is not compared with them."""
        now = time.perf_counter() if now is None else now
        took, self._before = None if self._before is None else now - self._before, now
        self.steps += 1
        if self.steps <= 2 or ran_with is None or took is None:  # the first makes kernels and faults memory in
            return
        if not 0 < self.together < 1:
            return  # one of them has nothing to do, and somebody wants it so
        is_alone, place = ran_with == 1, self.steps % _PERIOD
        if is_like_others and (self.device_seconds or not is_alone):  # something of what streams had a gradient
            self._took[is_alone].append(took)
        if not is_alone and min(self.host_seconds, self.device_seconds) > 0:
            self._move(ran_with)
        if place == _TRIALS[-1] + 2:  # what was dealt for the last of them has run
            self._stays_alone = self._alone_is_faster
        self.device_share = 1.0 if self._stays_alone != (place in _TRIALS) else self.together

    def _move(self, ran_with: float) -> None:
        host_rate, device_rate = (1 - ran_with) / self.host_seconds, ran_with / self.device_seconds
        move = device_rate / (host_rate + device_rate) - ran_with
        if abs(move) >= _SMALLEST_MOVE:
            move /= 1 if self.steps <= _QUICK_STEPS else 2
            self.together = round(ran_with + min(_LARGEST_MOVE, max(-_LARGEST_MOVE, move)), 3)

    @property
    def _alone_is_faster(self) -> bool:
        """By the better of two each: what disturbs a step only makes it longer."""
        both, alone = (min(self._took[is_alone], default=None) for is_alone in (False, True))
        return both is not None and alone is not None and alone < _CLEAR_GAIN * both
