"""From logs of the same step with different batches to moments: lines over the batch, equal blocks told once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zerofold.plan.shape import Moment, PerSample, Phase, Work
from zerofold.plan.tracing.recording import (
    BecameGradient,
    Dropped,
    Entered,
    Kernel,
    Made,
    Recording,
    SlabComplete,
)


class Instant(NamedTuple):
    """While one kernel ran: bytes of activations, and of gradients of parameters as autograd made them."""

    alive: int
    gradients: int
    """That wait for the others of their slab."""
    sent: int
    """That are complete and on their way to other ranks, where there are any."""
    arrived: int
    """That are complete, for a rank alone."""
    logits: int
    """Of the activations: whose last dimension is the vocabulary's."""

    @property
    def total(self) -> float:
        return self.alive + self.gradients + self.sent


@dataclass
class Stretch:
    """What one unit did until another one's turn came."""

    phase: Phase
    unit: int
    instants: list[Instant] = field(default_factory=list)
    flops: float = 0
    moved: float = 0
    kernels: int = 0
    left: float = 0
    """Bytes of activations at its end."""

    def absorb(self, other: Stretch) -> None:
        self.instants += other.instants
        self.flops, self.moved = self.flops + other.flops, self.moved + other.moved
        self.kernels, self.left = self.kernels + other.kernels, other.left


def read(recording: Recording, vocabulary: int | None) -> list[Stretch]:
    """Goes through a log and adds up. Gradients of parameters are no activations from the moment they are made."""
    gradients = {event.storage: event.slab for event in recording.events if isinstance(event, BecameGradient)}
    sizes: dict[int, Made] = {}
    alive = waiting = of_logits = 0
    waits: dict[int, int] = {}
    wire = _Wire()
    stretches: list[Stretch] = []
    for event in recording.events:
        match event:
            case Made(storage, nbytes, last):
                sizes[storage] = event
                if storage in gradients:
                    waits[gradients[storage]] = waits.get(gradients[storage], 0) + nbytes
                    waiting += nbytes
                else:
                    alive += nbytes
                    of_logits += nbytes if last == vocabulary else 0
            case Dropped(storage):
                made = sizes.pop(storage)
                if storage not in gradients:  # those stay until their unit is complete
                    alive -= made.nbytes
                    of_logits -= made.nbytes if made.last == vocabulary else 0
            case SlabComplete(slab, chunks):
                complete = waits.pop(slab, 0)
                waiting -= complete
                wire.send(slab, complete, chunks)
            case Entered(phase, unit):
                if not stretches or (stretches[-1].phase, stretches[-1].unit) != (phase, unit):
                    stretches.append(Stretch(phase, unit))
            case Kernel(scratch, flops, moved, is_kernel):
                now = stretches[-1]
                now.instants.append(Instant(alive + scratch, waiting, wire.nbytes, wire.sent, of_logits))
                now.flops, now.moved, now.kernels = now.flops + flops, now.moved + moved, now.kernels + is_kernel
        stretches[-1].left = alive
    return _merged([stretch for stretch in stretches if stretch.instants])


class _Wire:
    """Slabs whose reduction is under way: as in `zerofold.reduce` by gloo, a slab goes in chunks, of which the last
    two have not been waited for; each keeps all gradients of its slab."""

    def __init__(self) -> None:
        self._chunks: deque[int] = deque(maxlen=_IN_FLIGHT)
        self._sizes: dict[int, int] = {}
        self.sent = 0  # in all

    def send(self, slab: int, nbytes: int, chunks: int) -> None:
        self.sent += nbytes
        self._sizes[slab] = nbytes
        self._chunks.extend([slab] * chunks)

    @property
    def nbytes(self) -> int:
        return sum(self._sizes[slab] for slab in set(self._chunks))


_IN_FLIGHT = 2


def _merged(stretches: list[Stretch]) -> list[Stretch]:
    """What the root does between two blocks goes with the block before: a mask, a residual, a sum of losses."""
    merged: list[Stretch] = []
    for position, stretch in enumerate(stretches):
        after = stretches[position + 1] if position + 1 < len(stretches) else None
        is_between = (
            stretch.unit == 0
            and merged
            and merged[-1].unit
            and after is not None
            and after.phase is stretch.phase is merged[-1].phase
        )
        same = merged and (merged[-1].phase, merged[-1].unit) == (stretch.phase, stretch.unit)
        if is_between or same:
            merged[-1].absorb(stretch)
        else:
            merged.append(stretch)
    return merged


class Line(NamedTuple):
    """Activations that grow with the batch, and gradients beside them that do not."""

    alive: PerSample
    gradients: int
    sent: int
    arrived: int
    logits: PerSample

    def at(self, samples: float) -> float:
        """In all, on one of several ranks."""
        return self.alive.at(samples) + self.gradients + self.sent

    def at_packed(self, samples: float) -> float:
        """In all, where what is sent is a packed copy, and gradients go."""
        return self.alive.at(samples) + self.gradients

    def at_alone(self, samples: float) -> float:
        """In all, on a rank alone."""
        return self.alive.at(samples) + self.gradients + self.arrived


@dataclass(frozen=True)
class Fitted:
    """A stretch over all batches: the lines that are the highest for some batch, the first for the smallest."""

    phase: Phase
    unit: int
    lines: tuple[Line, ...]
    work: Work
    growth: PerSample

    def follows(self, other: Fitted, groups: Sequence[int]) -> bool:
        """Whether this may be the next of a row of equal stretches."""
        return (
            self.phase is other.phase
            and groups[self.unit] == groups[other.unit]
            and abs(self.unit - other.unit) == 1
            and self.work == other.work
            and len(self.lines) == len(other.lines)
            and all(
                (mine.gradients, mine.sent) == (its.gradients, its.sent)
                for mine, its in zip(self.lines, other.lines, strict=True)
            )
        )

    def steps_from(self, other: Fitted) -> tuple[PerSample, ...]:
        """By how much each line is higher than the other's."""
        return tuple(_less(mine.alive, its.alive) for mine, its in zip(self.lines, other.lines, strict=True))


def fit(smaller: Sequence[Stretch], larger: Sequence[Stretch], samples: tuple[int, int]) -> list[Fitted] | None:
    """None where the two batches did not do the same, so that no line goes through both."""
    if [_key(stretch) for stretch in smaller] != [_key(stretch) for stretch in larger]:
        return None

    def line(low: float, high: float) -> PerSample:
        return line_through(low, high, samples)

    fitted = []
    for low, high in zip(smaller, larger, strict=True):
        lines = [
            Line(line(a.alive, b.alive), a.gradients, a.sent, a.arrived, line(a.logits, b.logits))
            for a, b in _pairs(low.instants, high.instants)
        ]
        work = Work(line(low.flops, high.flops), line(low.moved, high.moved), low.kernels)
        fitted.append(Fitted(low.phase, low.unit, _highest_of_all(lines), work, line(low.left, high.left)))
    before = PerSample()
    result = []
    for each in fitted:
        grown = _less(each.growth, before)
        before = each.growth
        sign = 1 if each.phase is Phase.FORWARD else -1
        grown = PerSample(sign * grown.fixed, sign * grown.each)
        result.append(Fitted(each.phase, each.unit, each.lines, each.work, grown))
    return result


def line_through(low: float, high: float, samples: tuple[int, int]) -> PerSample:
    """Whole numbers where both are: the plan's page computes with them to the byte."""
    each = (high - low) / (samples[1] - samples[0])
    fixed = low - each * samples[0]
    return PerSample(*(int(number) if number.is_integer() else number for number in (fixed, each)))


def _key(stretch: Stretch) -> tuple[Phase, int]:
    return stretch.phase, stretch.unit


def _pairs(low: Sequence[Instant], high: Sequence[Instant]) -> list[tuple[Instant, Instant]]:
    """The same kernel in both batches. Where a larger batch takes more of them (tiles of a cross-entropy, say), the
    largest instants stand for all, as each reading of a line has it.
    """
    if len(low) == len(high):
        return list(zip(low, high, strict=True))
    readings: tuple[Callable[[Instant], float], ...] = (
        lambda instant: instant.total,
        lambda instant: instant.alive + instant.gradients,
        lambda instant: instant.alive + instant.gradients + instant.arrived,
    )
    return [(max(low, key=reading), max(high, key=reading)) for reading in readings]


def _less(one: PerSample, other: PerSample) -> PerSample:
    return PerSample(one.fixed - other.fixed, one.each - other.each)


def logits_of(fitted: Sequence[Fitted], samples: int) -> PerSample:
    """At the largest instant of a batch."""
    return max((line for stretch in fitted for line in stretch.lines), key=lambda line: line.at(samples)).logits


def _size(step: PerSample) -> PerSample:
    return step if step.at(1) >= 0 else PerSample(-step.fixed, -step.each)


def _highest_of_all(lines: list[Line]) -> tuple[Line, ...]:
    """For several ranks, and what a rank alone has besides."""
    return tuple(
        dict.fromkeys(found for at in (Line.at, Line.at_packed, Line.at_alone) for found in _highest(lines, at))
    )


def _highest(lines: list[Line], at: Callable[[Line, float], float]) -> list[Line]:
    """The lines that are the highest at some batch of at least one sample, by rising slope."""
    current = max(lines, key=lambda line: (at(line, 1), line.alive.each))
    chosen, samples = [current], 1.0
    while True:
        steeper = [line for line in lines if line.alive.each > current.alive.each]
        if not steeper:
            return chosen

        def meets(line: Line, current: Line = current) -> float:
            return (at(current, 0) - at(line, 0)) / (line.alive.each - current.alive.each)

        current = min(steeper, key=lambda line: (meets(line), -line.alive.each))
        samples = max(samples, meets(current))
        if samples > _LARGEST_BATCH:
            return chosen
        chosen.append(current)


_LARGEST_BATCH = 4096
"""Beyond which nobody asks: lines that are the highest only there are left out."""


def moments(fitted: Sequence[Fitted], groups: Sequence[int]) -> tuple[Moment, ...]:
    """Rows of equal stretches become one moment each; `groups` tells which unit of the shape each unit is.

    A stretch with several lines becomes several moments, of which the first has all of the work: the largest of them
    is what is alive.
    """
    rows: list[list[Fitted]] = []
    for stretch in fitted:
        row = rows[-1] if rows else None
        if row and stretch.follows(row[-1], groups):
            step = stretch.steps_from(row[-1])
            if len(row) == 1 or step == row[-1].steps_from(row[-2]):
                row.append(stretch)
                continue
        rows.append([stretch])
    result = []
    for row in rows:
        largest = max(row[0], row[-1], key=lambda each: each.lines[0].at(1))
        growth = _size(row[1].steps_from(row[0])[0]) if len(row) > 1 else row[0].growth
        for number, line in enumerate(largest.lines):
            result.append(
                Moment(
                    phase=largest.phase,
                    unit=groups[largest.unit],
                    alive=line.alive,
                    gradients=line.gradients,
                    sent=line.sent,
                    arrived=line.arrived,
                    work=largest.work if number == 0 else Work(),
                    repeats=len(row),
                    growth=growth,
                )
            )
    return tuple(result)
