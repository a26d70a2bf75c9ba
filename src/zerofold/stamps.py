"""Points in time: of the host's clock, or of a stream of a device, which may have to be asked for later."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Stamp = Any
"""A point in time that may have to be asked for later: seconds, or an event of a device."""


class Stamps(Protocol):
    def now(self) -> Stamp: ...
    def is_over(self, stamp: Stamp) -> bool:
        """Whether its time can be read."""

    def after(self, first: Stamp, stamp: Stamp) -> float:
        """Seconds from one to the other."""

    def take_back(self, stamps: list[Stamp]) -> None:
        """Nobody will read them any more."""


class HostStamps:
    """The clock of the host."""

    now = staticmethod(time.perf_counter)

    def is_over(self, stamp: Stamp) -> bool:
        return True

    def after(self, first: Stamp, stamp: Stamp) -> float:
        return float(stamp - first)

    def take_back(self, stamps: list[Stamp]) -> None:
        """Numbers need no care."""


class CudaStamps:
    """Events on the stream that was current when the tape began. They are used again when they have been read."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free: list[torch.cuda.Event] = []

    def now(self) -> Stamp:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def is_over(self, stamp: Stamp) -> bool:
        return bool(stamp.query())

    def after(self, first: Stamp, stamp: Stamp) -> float:
        return float(first.elapsed_time(stamp)) / 1000

    def take_back(self, stamps: list[Stamp]) -> None:
        self._free += stamps
