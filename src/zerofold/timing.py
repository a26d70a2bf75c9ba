"""When things happen on this rank: what its computing waits for, and what every unit is doing. Off unless asked for.

marks   |compute      |gather |compute         |reduce|compute |update    |     where the time of a step goes
        t0            t1      t2               t3     t4       t5         t6
spans   [ forward blocks.0 ][ wait ][ forward blocks.1 ] …                      what a timeline shows

A mark says what begins with it; the time until the next mark is that. On a CPU it is a time of the clock. On CUDA it is
an event on the stream that computes, so that a wait is as long as that stream stands still, whoever waits: the stream
for another stream, or the host for something else while the stream runs dry. Events are read a step later, when they
are over, and nobody is kept waiting for that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from zerofold.ends import Ends
from zerofold.stamps import CudaStamps, HostStamps, Stamp, Stamps

COMPUTE, GATHER, REDUCE, OTHER, HOST, DISK, UPDATE = (
    "compute",
    "gather",
    "reduce",
    "other",
    "host",
    "disk",
    "update",
)
CATEGORIES = (COMPUTE, GATHER, REDUCE, OTHER, HOST, DISK, UPDATE)
FORWARD, BACKWARD, WAIT = "forward", "backward", "wait"
MAIN, WIRE = "main", "wire"
LANES = (MAIN, WIRE, HOST, DISK)


class Span(NamedTuple):
    """Something that took a while. `begin` and `end` are seconds on this rank's clock, `time.perf_counter()`."""

    lane: str
    category: str
    name: str
    unit: str
    begin: float
    end: float
    nbytes: int = 0


class Sample(NamedTuple):
    """Bytes by state at one moment."""

    at: float
    nbytes: dict[str, int]


@dataclass(frozen=True)
class StepTimes:
    """One step that is over: seconds by category, and what a timeline shows of it."""

    number: int  # of the tape, from 1
    begin: float
    end: float
    seconds: dict[str, float]
    spans: list[Span]
    samples: list[Sample]


class _Open(NamedTuple):
    """A span whose times are stamps. It gets its name when somebody reads it: most are never read."""

    lane: str
    category: str
    waits_for: str  # of a wait
    unit: str
    begin: Stamp
    end: Stamp
    nbytes: int


@dataclass(eq=False)
class _Step:
    """The step under way, as it is written down."""

    first: Stamp
    marks: list[tuple[Stamp, str]]
    spans: list[_Open] = field(default_factory=list)
    beside: list[Span] = field(default_factory=list)  # by the host's clock, from any thread
    samples: list[tuple[Stamp, dict[str, int]]] = field(default_factory=list)
    stamps: list[Stamp] = field(default_factory=list)  # all that were taken
    last: Stamp = None
    is_shown: bool = True
    number: int = 0  # from 1, when it has been taken in
    begin: float = 0.0  # on the host's clock, likewise
    length: float = 0.0  # since `last` is a stamp of the next step, which may be gone before this one
    before: list[Stamp] = field(default_factory=list)  # stamps of the step before, in which a gather may have begun
    seconds: dict[str, float] = field(default_factory=dict)


class Tape:
    """Written by the training thread (autograd's counts as the same: one waits for the other), step by step.

    `traces` keeps spans and samples of the last `keep` steps in a row that are to be shown; without it only seconds by
    category are kept.

    >>> tape = Tape(torch.device("cpu"))
    >>> with tape.spent(GATHER, "blocks.0"):
    ...     time.sleep(0.01)
    >>> tape.end_step()
    >>> tape.steps, 0.01 <= tape.seconds[GATHER] < 1
    (1, True)
    """

    def __init__(
        self, device: torch.device, *, traces: bool = True, keep: int = 2, stamps: Stamps | None = None
    ) -> None:
        self.traces = traces
        self.steps = 0
        """That are over and read."""
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        """Of all of them together."""
        self._kept: list[_Step] = []  # the last steps that are shown, and those before them until they are enough
        self._keep = keep if traces else 0
        self.sample: Callable[[Any], dict[str, int]] | None = None
        """What the memory holds when a unit (or None: any) has just changed something."""
        self.looks = True
        """Whether the step under way is shown, and memory looked at in it."""
        self.after_step: Callable[[], None] | None = None
        self._stamps = stamps or (CudaStamps(device) if device.type == "cuda" else HostStamps())
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # once: from here on its clock and the host's run side by side
        self._begin = time.perf_counter()
        self._stack: list[tuple[str, str, Stamp]] = []
        self._has_updated = False
        self._forwards: dict[str, Stamp] = {}
        self._backward: tuple[str, Stamp] | None = None
        self._lane_ends: dict[str, float] = {}
        self._ends: dict[object, Ends] = {}
        self._unread: deque[_Step] = deque()
        self._before: list[Stamp] = []  # those of the last step that was read, if it is not shown
        self._new_step(self._stamps.now())

    # what is waited for, and the update

    def begin(self, category: str, unit: str = "") -> None:
        stamp = self.stamp()
        self._step.marks.append((stamp, category))
        self._stack.append((category, unit, stamp))

    def end(self) -> Stamp | None:
        """When that was; None where a step has ended in between: one that raised."""
        if not self._stack:
            return None
        category, unit, began = self._stack.pop()
        stamp = self.stamp()
        self._step.marks.append((stamp, self._stack[-1][0] if self._stack else COMPUTE))
        if self.traces:
            shown = UPDATE if category == UPDATE else WAIT
            self._step.spans.append(_Open(MAIN, shown, category, unit, began, stamp, 0))
        return stamp

    def begin_update(self) -> None:
        """Gradients are all there. An update before that has raised is over."""
        while self._stack:
            self.end()
        self.begin(UPDATE)
        self._has_updated = True

    @contextmanager
    def spent(self, category: str, unit: str = "") -> Iterator[None]:
        """What is inside is no computing."""
        self.begin(category, unit)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is inside is no part of a step: an evaluation, a checkpoint."""
        self.begin(_PAUSE)
        try:
            yield
        finally:
            self.end()

    def end_update(self) -> None:
        """It ends the step. A subclass whose step calls that of its base class ends two for one."""
        if self._has_updated:
            self.end_step()

    def end_step(self) -> None:
        """The optimizer has stepped: the next step begins."""
        while self._stack:
            self.end()
        self._has_updated = False
        step, last = self._step, self._stamps.now()
        step.last, step.is_shown = last, self.looks
        self._unread.append(step)
        self._new_step(last)
        if self.after_step is not None:
            self.after_step()
        self.read()

    # what units do, for a timeline

    def stamp(self) -> Stamp:
        stamp = self._stamps.now()
        self._step.stamps.append(stamp)
        return stamp

    def forward(self, unit: str) -> Stamp | None:
        if not self.traces:
            return None
        self._forwards[unit] = now = self.stamp()
        return now

    def forward_ends(self, unit: str) -> Stamp | None:
        began = self._forwards.pop(unit, None)
        return None if began is None else self._add(FORWARD, unit, began)

    def backward(self, unit: str) -> Stamp | None:
        """Until the next unit's begins: which of two events comes first, its end or that, depends on autograd."""
        if not self.traces:
            return None
        now = self.stamp()
        self.backward_ends(now)
        self._backward = unit, now
        return now

    def backward_ends(self, now: Stamp | None = None) -> None:
        if self._backward is not None:
            unit, began = self._backward
            self._backward = None
            self._add(BACKWARD, unit, began, now)

    def on_wire(self, category: str, unit: str, began: Stamp, nbytes: int, ended: Stamp | None = None) -> None:
        """A collective is through. `ended`: when somebody saw it end, or when the wait for its result did."""
        if self.traces:
            end = self.stamp() if ended is None else ended
            self._step.spans.append(_Open(WIRE, category, "", unit, began, end, nbytes))

    def ends_of(self, group: object) -> Ends:
        """Who sees when that group's calls end, from the first of them until the tape is closed."""
        if group not in self._ends:
            self._ends[group] = Ends()
        return self._ends[group]

    def close(self) -> None:
        """Nothing more is written."""
        for ends in self._ends.values():
            ends.close()
        self._ends.clear()
        self.read()

    def beside(self, lane: str, unit: str, began: float, nbytes: int = 0, *, what: str) -> None:
        """Work of another thread is through. It began at `began`, or when the work before it in its lane ended."""
        if self.traces:
            now = time.perf_counter()
            began = max(began, self._lane_ends.get(lane, began))
            self._lane_ends[lane] = now
            self._step.beside.append(Span(lane, lane, f"{what} {unit or 'root'}", unit, began, now, nbytes))

    def take_sample(self, unit: Any = None, *, at: Stamp | None = None) -> None:
        """`at`: a stamp that was taken just now."""
        if self.looks and self.sample is not None:
            nbytes = self.sample(unit)
            if self.traces:
                self._step.samples.append((self.stamp() if at is None else at, nbytes))

    def _add(self, category: str, unit: str, began: Stamp, ended: Stamp | None = None) -> Stamp:
        ended = self.stamp() if ended is None else ended
        self._step.spans.append(_Open(MAIN, category, "", unit, began, ended, 0))
        return ended

    # reading

    def read(self) -> None:
        """Takes in the steps whose end has been reached."""
        while self._unread and self._stamps.is_over(self._unread[0].last):
            self._take_in(self._unread.popleft())

    def _new_step(self, first: Stamp) -> None:
        self._step = _Step(first, [(first, COMPUTE)])
        self._forwards.clear()
        self._backward = None

    def _take_in(self, step: _Step) -> None:
        after = self._stamps.after
        seconds = dict.fromkeys((*CATEGORIES, _PAUSE), 0.0)
        at = [after(step.first, stamp) for stamp, _ in step.marks] + [after(step.first, step.last)]
        for (_, category), begin, end in zip(step.marks, at, at[1:], strict=False):
            seconds[category] += end - begin
        seconds.pop(_PAUSE)
        for category, spent in seconds.items():
            self.seconds[category] += spent
        self.steps += 1

        step.number, step.begin, step.seconds = self.steps, self._begin_of(step), seconds
        step.length = after(step.first, step.last)
        self._begin = step.begin + step.length
        own = [step.first, *step.stamps]
        if step.is_shown and self._keep:
            step.before, self._before = self._before, []
            self._kept.append(step)
            self._let_go()
        else:
            self._stamps.take_back(self._before)
            self._before = own

    def _let_go(self) -> None:
        """Of steps that will not be shown: more recent ones in a row are enough."""
        enough = _last_in_a_row(self._kept)[-self._keep :]
        if len(enough) < self._keep:
            return
        gone, self._kept = self._kept[: -self._keep], enough
        for step, after in pairwise([*gone, enough[0]]):
            self._stamps.take_back(step.before)
            own = [step.first, *step.stamps]
            if after.number == step.number + 1:
                after.before = own
            else:
                self._stamps.take_back(own)

    @property
    def last_steps(self) -> list[StepTimes]:
        """Those that are shown, one right after the other. Read anew each time, and only then: while a model trains
        nobody looks at spans.
        """
        newest = _last_in_a_row(self._kept)
        before = _last_in_a_row(self._kept[: len(self._kept) - len(newest)])
        shown = newest if len(newest) >= len(before) else before
        return [self._times_of(step) for step in shown]

    def _times_of(self, step: _Step) -> StepTimes:
        def clock(stamp: Stamp) -> float:
            return stamp if isinstance(stamp, float) else step.begin + self._stamps.after(step.first, stamp)

        spans = [_read_span(span, clock) for span in step.spans]
        samples = [Sample(clock(stamp), nbytes) for stamp, nbytes in step.samples]
        return StepTimes(step.number, step.begin, step.begin + step.length, step.seconds, spans + step.beside, samples)

    def _begin_of(self, step: _Step) -> float:
        """The host's stamps are its own seconds; a device's count from the end of the step before."""
        return step.first if isinstance(step.first, float) else self._begin


_PAUSE = "pause"


def _last_in_a_row(steps: list[_Step]) -> list[_Step]:
    """The last of them, and those right before it."""
    first = len(steps) - 1
    while first > 0 and steps[first - 1].number == steps[first].number - 1:
        first -= 1
    return steps[max(0, first) :]


def _read_span(span: _Open, clock: Callable[[Stamp], float]) -> Span:
    begin, end = clock(span.begin), clock(span.end)
    return Span(span.lane, span.category, _name_of(span), span.unit, min(begin, end), end, span.nbytes)


def _name_of(span: _Open) -> str:
    if span.category == UPDATE:
        return UPDATE
    what = f"wait for {span.waits_for}" if span.category == WAIT else span.category
    return f"{what} {span.unit or 'root'}"


@dataclass
class Clock:
    """Where the parts of an engine find the tape while one is running; None otherwise, and nothing is done."""

    tape: Tape | None = None

    def spent(self, category: str, unit: str = "") -> AbstractContextManager[None]:
        return nullcontext() if self.tape is None else self.tape.spent(category, unit)
