"""How long host and device take for their parts of an update, and what share of it each should have next."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

_LARGEST_MOVE = 0.1
_SMALLEST_MOVE = 0.015  # below it the parameters that change sides are too few to matter
_QUICK_STEPS = 4  # go all the way; later ones half of it, since a single update may have been disturbed
_PERIOD, _FIRST_TRIED, _TRIED = 64, 5, 2  # of so many updates, from which on how many try each way that is not taken
_CLEAR_GAIN = 0.97  # of a step's time; less may be chance


class Split(NamedTuple):
    """How an update is shared."""

    device_share: float
    """Of its elements; 1 where the device is alone."""
    pool: int = 0
    """Which of the pools of the host's cores has the rest."""


@dataclass
class TunedShare:
    """Of the last update, and what follows for the next.

    The share moves towards the one with which both would have been done together at the rates just seen. It does so for
    ever: host and device share one memory, so each is faster when the other has less to do, and other work comes and
    goes on the host. For the same reason whole steps may be shorter with a smaller pool, or with the device alone,
    where the host's memory has nothing to spare. Those are tried now and then, and what a way is judged by is the time
    from update to update. The device's own seconds would not do: what else is on the bus waits for it.

    >>> share = TunedShare(0.55)
    >>> for _ in range(5):  # the host has 2 of 6 parts of the speed
    ...     share.tune(share.next, now=0.0)
    ...     share.host_seconds = (1 - share.next.device_share) / 2
    ...     share.device_seconds = share.next.device_share / 4
    >>> round(share.together, 3), share.next.device_share
    (0.667, 1.0)
    """

    first_share: float
    pools: int = 1
    next: Split = field(init=False)
    """For the next update."""
    host_elements: int = 0
    device_elements: int = 0
    early_elements: int = 0
    """Of them, updated under backward."""
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    steps: int = 0
    _started: float = 0.0
    _before: float | None = None  # when the last update was submitted
    # Ways: each pool beside the device, by its number, and after them the device alone.
    _taken: int = 0  # between trials
    _together: dict[int, float] = field(init=False)
    """By pool, the share with which both are done at the same time."""
    _took: list[deque[float]] = field(init=False, repr=False)
    """By way, seconds of the last steps, each from update to update."""

    def __post_init__(self) -> None:
        self.next = Split(self.first_share)
        self._together = {0: self.first_share}
        self._took = [deque(maxlen=_TRIED) for _ in range(self.pools + 1)]

    @property
    def together(self) -> float:
        """With the first pool."""
        return self._together[0]

    @property
    def figures(self) -> dict[str, float]:
        """Seconds of a step, by way, as they were when it was taken or tried last."""
        names = ["first_pool_step", "second_pool_step"][: self.pools] + ["device_alone_step"]
        return {f"{name}_seconds": min(took) for name, took in zip(names, self._took, strict=True) if took}

    def begin(self) -> None:
        self._started = time.perf_counter()
        self.host_elements = self.device_elements = 0

    def end_of_host(self) -> None:
        self.host_seconds = time.perf_counter() - self._started

    def tune(self, ran: Split | None, now: float | None = None, *, is_like_others: bool = True) -> None:
        """Before an update; `ran`: how the one before was shared; a step unlike others is not compared with them."""
        now = time.perf_counter() if now is None else now
        took, self._before = None if self._before is None else now - self._before, now
        self.steps += 1
        if self.steps <= 2 or ran is None or took is None:  # the first makes kernels and faults memory in
            return
        if not 0 < self.together < 1:
            return  # one of them has nothing to do, and somebody wants it so
        is_alone, place = ran.device_share == 1, self.steps % _PERIOD
        if is_like_others and (self.device_seconds or not is_alone):  # something of what streams had a gradient
            self._took[self.pools if is_alone else ran.pool].append(took)
        if not is_alone and min(self.host_seconds, self.device_seconds) > 0:
            self._move(ran)
        if place == _FIRST_TRIED + _TRIED * self.pools + 1:  # what was dealt for the last of them has run
            self._taken = self._fastest()
        way = self._way_at(place)
        self.next = Split(1.0) if way == self.pools else Split(self._together.get(way, self.together), way)

    def _move(self, ran: Split) -> None:
        share = ran.device_share
        host_rate, device_rate = (1 - share) / self.host_seconds, share / self.device_seconds
        move = device_rate / (host_rate + device_rate) - share
        self._together.setdefault(ran.pool, share)
        if abs(move) >= _SMALLEST_MOVE:
            move /= 1 if self.steps <= _QUICK_STEPS else 2
            self._together[ran.pool] = round(share + min(_LARGEST_MOVE, max(-_LARGEST_MOVE, move)), 3)

    def _way_at(self, place: int) -> int:
        others = [way for way in range(self.pools + 1) if way != self._taken]
        trial = (place - _FIRST_TRIED) // _TRIED
        return others[trial] if 0 <= trial < len(others) else self._taken

    def _fastest(self) -> int:
        """By the better of two steps each: what disturbs a step only makes it longer."""
        best = [min(took, default=float("inf")) for took in self._took]
        way = best.index(min(best))
        return way if self._took[0] and best[way] < _CLEAR_GAIN * best[0] else 0
