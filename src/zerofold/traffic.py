"""What this rank has sent: every call counted by what, for which unit and in which group; the last ones remembered."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from zerofold.timing import OTHER, Clock

REMEMBERED = 64  # calls


@dataclass(slots=True)
class Call:
    """One remembered call: what, for which unit, how much, and whether it has finished."""

    number: int
    operation: str
    unit: str
    elements: int
    done: bool = False
    position: int = 0  # among the calls of its group: the same call has the same one on every rank
    nbytes: int = 0  # of the whole, the same on every rank
    root: int | None = None  # who sends, where one rank alone does
    started: float = 0.0  # on time.monotonic()'s clock
    purpose: str = OTHER  # what waiting for it counts as

    def __str__(self) -> str:
        return f"#{self.number} {self.operation}({self.unit}, {self.elements}){'' if self.done else ' unfinished'}"


@dataclass
class Traffic:
    """Elements and bytes this rank has sent, by operation and unit, and the last calls.

    An operation counts what a ring would send per rank: n(N-1)/N for a gather, scatter, reduce or broadcast of n
    elements, twice that for an all-reduce.
    """

    elements: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    bytes: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    sent: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """Bytes by operation and group."""
    counts: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Calls by operation and group."""
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    number: int = 0
    last_started: float = 0.0  # on time.monotonic()'s clock
    clock: Clock = field(default_factory=Clock)
    """Of the engine whose traffic it is."""
    onto: Traffic | None = None
    """Where the same counts besides; the calls of a group apart are not remembered there."""

    def record(self, operation: str, unit: str, group: str, sent: float, itemsize: int) -> Call:
        self.number += 1
        self.add(operation, unit, group, sent, itemsize)
        self.last_started = time.monotonic()
        call = Call(self.number, operation, unit, round(sent), started=self.last_started)
        self.calls.append(call)
        return call

    def add(self, operation: str, unit: str, group: str, sent: float, itemsize: int, *, times: int = 1) -> None:
        """Calls that others have made, of so many elements each: they count, and are not remembered one by one."""
        self.elements[operation, unit] += times * sent
        self.bytes[operation, unit] += times * sent * itemsize
        self.sent[operation, group] += times * sent * itemsize
        self.counts[operation, group] += times
        if self.onto is not None:
            self.onto.add(operation, unit, group, sent, itemsize, times=times)

    def bytes_by_operation(self) -> dict[str, int]:
        total: defaultdict[str, float] = defaultdict(float)
        for (operation, _), sent in self.bytes.items():
            total[operation] += sent
        return {operation: round(sent) for operation, sent in total.items()}

    def bytes_by_group(self) -> dict[str, int]:
        total: defaultdict[str, float] = defaultdict(float)
        for (_, group), sent in self.sent.items():
            total[group] += sent
        return {group: round(sent) for group, sent in total.items()}

    def calls_by_operation(self) -> dict[str, int]:
        total: defaultdict[str, int] = defaultdict(int)
        for (operation, _), calls in self.counts.items():
            total[operation] += calls
        return dict(total)

    def last(self, count: int = 4) -> str:
        return ", ".join(str(call) for call in list(self.calls)[-count:])


class Habit:
    """Which call has followed which; one that is new in its place is confirmed with the other ranks before it starts.

    A rank that goes another way than the others goes another way than itself the last time. It is found before its call
    meets a different one of the others: of two broadcasts of different sizes gloo makes a crash, NCCL wrong numbers.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[Any, Any], Any] = {}
        self._before: tuple[Any, Any] = (None, None)

    def breaks_with(self, call: Call) -> bool:
        """Also takes the call in."""
        mark = (call.operation, call.unit, call.nbytes, call.root)
        is_new = self._next.get(self._before) != mark
        self._next[self._before] = mark
        self._before = self._before[1], mark
        return is_new
