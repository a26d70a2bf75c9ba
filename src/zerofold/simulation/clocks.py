"""The clocks of a simulation: on each, a message occupies its wire for a time, and whoever needs it waits.

host      |launch|launch|launch|            runs ahead of the device
device    | f0        | f1        | f2 |    one kernel after another, each not before it was launched
wire         [g1     ]   [g2     ]          one message after another, each not before what it sends was computed
                      ^exposed: the device has nothing to do but wait

Virtual time is kept by adding numbers up: exact, and the same every time. On the CPU and on CUDA time really passes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from zerofold.simulation.waiting import Waiting, urgent_stream

HOST = "host"
"""The wire of messages between hosts: a few numbers, that a host waits for."""


class Ticket(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Returns when the device (or the host, for a message of its own) may go on with what has arrived."""

    def is_over(self) -> bool: ...


class Clock(Protocol):
    @property
    def exposed(self) -> defaultdict[str, float]:
        """Seconds waited, by operation."""

    def send(self, wire: str, operation: str, seconds: float, fill: Callable[[], None]) -> Ticket:
        """Puts a message on a wire; `fill` writes what it brings, within the time it takes."""

    def now(self) -> float:
        """Seconds; everything that the device was given to compute is over."""

    def forget(self) -> None:
        """What was waited until now."""


class _Due:
    """A message that is there at a known time."""

    def __init__(self, clock: VirtualClock | WallClock, wire: str, operation: str, due: float) -> None:
        self._clock, self._wire, self._operation, self.due = clock, wire, operation, due

    def wait(self) -> None:
        self._clock.wait_until(self.due, self._wire, self._operation)

    def is_over(self) -> bool:
        return self._clock.has_passed(self.due)


class VirtualClock:
    """Numbers that are added up.

    >>> clock = VirtualClock()
    >>> clock.compute(3.0); ticket = clock.send("across", "all_gather", 5.0, lambda: None)
    >>> clock.compute(1.0); ticket.wait()
    >>> clock.now(), clock.busy, dict(clock.exposed)
    (8.0, 4.0, {'all_gather': 4.0})
    """

    def __init__(self) -> None:
        self.host = self.device = self.busy = 0.0
        self.exposed: defaultdict[str, float] = defaultdict(float)
        self.is_paused = False
        self._free: defaultdict[str, float] = defaultdict(float)

    def compute(self, seconds: float, *, launch: float = 0.0) -> None:
        """A kernel: it begins when it is launched and those before it are over."""
        self.host += launch
        self.device = max(self.device, self.host) + seconds
        self.busy += seconds

    def synchronize(self) -> None:
        """The host waits for the device."""
        self.host = max(self.host, self.device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is no part of the simulated program."""
        was, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was

    def send(self, wire: str, operation: str, seconds: float, fill: Callable[[], None]) -> Ticket:
        ready = self.host if wire == HOST else max(self.host, self.device)
        self._free[wire] = max(ready, self._free[wire]) + seconds
        with self.paused():
            fill()
        return _Due(self, wire, operation, self._free[wire])

    def wait_until(self, due: float, wire: str, operation: str) -> None:
        if wire == HOST:
            # The device goes on with what it was given; only what is left over after that keeps it waiting.
            busy_until = max(self.host, self.device)
            self.host = max(self.host, due)
            self.exposed[operation] += max(0.0, due - busy_until)
            return
        reached = max(self.host, self.device)
        if due > reached:
            self.exposed[operation] += due - reached
            self.device = due

    def has_passed(self, due: float) -> bool:
        return max(self.host, self.device) >= due

    def now(self) -> float:
        return max(self.host, self.device)

    def forget(self) -> None:
        self.exposed.clear()
        self.busy = 0.0


class WallClock:
    """Time as it passes on the host, for tensors on the CPU: a message is due when its wire has had time for it.

    >>> clock = WallClock(); begin = clock.now()
    >>> clock.send("across", "all_gather", 0.01, lambda: None).wait()
    >>> clock.now() - begin >= 0.01
    True
    """

    def __init__(self) -> None:
        self.exposed: defaultdict[str, float] = defaultdict(float)
        self._free: defaultdict[str, float] = defaultdict(float)

    def send(self, wire: str, operation: str, seconds: float, fill: Callable[[], None]) -> Ticket:
        begin = self.now()
        fill()
        self._free[wire] = max(begin, self._free[wire]) + seconds
        return _Due(self, wire, operation, self._free[wire])

    def wait_until(self, due: float, wire: str, operation: str) -> None:
        left = due - self.now()
        if left > 0:
            self.exposed[operation] += left
            time.sleep(left)

    def has_passed(self, due: float) -> bool:
        return self.now() >= due

    def now(self) -> float:
        return time.perf_counter()

    def forget(self) -> None:
        self.exposed.clear()


class CudaClock:
    """Time as it passes on a GPU: a message is a wait on the stream of its wire, which other streams do not feel.

    What a message brings is written beside the wait, on a stream of its own, so the wire's time includes it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing = torch.cuda.current_stream(device)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._fills = urgent_stream(device)
        self._host = WallClock()
        self.waiting = Waiting(device)
        self._waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def exposed(self) -> defaultdict[str, float]:
        """Of the stream that computes, as far as it waits for messages itself: an engine may let another one wait."""
        torch.cuda.synchronize(self._device)
        total = defaultdict(float, self._host.exposed)
        for operation, before, after in self._waits:
            total[operation] += before.elapsed_time(after) / 1e3
        return total

    def send(self, wire: str, operation: str, seconds: float, fill: Callable[[], None]) -> Ticket:
        if wire == HOST:
            return self._host.send(wire, operation, seconds, fill)
        if wire not in self._streams:  # torch has 32 streams in all, and hands them out again
            self._streams[wire] = urgent_stream(self._device)
        stream, current = self._streams[wire], torch.cuda.current_stream(self._device)
        for each in (stream, self._fills):
            each.wait_stream(current)
        with torch.cuda.stream(self._fills):
            fill()
        with torch.cuda.stream(stream):
            if seconds > 0:
                self.waiting.wait(seconds)
            stream.wait_stream(self._fills)
            over = stream.record_event()
        return _OnStream(self, operation, over)

    def wait_for(self, operation: str, over: torch.cuda.Event) -> None:
        """Of the current stream."""
        current = torch.cuda.current_stream(self._device)
        if current != self._computing:
            current.wait_event(over)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(current)
        current.wait_event(over)
        after.record(current)
        self._waits.append((operation, before, after))

    def forget(self) -> None:
        self._waits.clear()
        self._host.forget()

    def now(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _OnStream:
    def __init__(self, clock: CudaClock, operation: str, over: torch.cuda.Event) -> None:
        self._clock, self._operation, self._over = clock, operation, over

    def wait(self) -> None:
        self._clock.wait_for(self._operation, self._over)

    def is_over(self) -> bool:
        return self._over.query()
