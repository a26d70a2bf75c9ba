"""Torch's pipeline schedules by the names users know them by: the counts they take, and which rank has which stage.

`zf.pipeline` and the plan ask the same rule. It is arithmetic: torch's pipelining is loaded by whoever runs a schedule.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ScheduleKind:
    """One of torch's schedules."""

    torch_name: str
    has_chunks: bool = False
    """A rank may have several stages."""
    usual_chunks: int = 1
    """How many it has, where nobody says."""
    is_v: bool = False
    """Two stages a rank, there and back: the first rank has the first stage and the last one."""
    needs_filling: bool = False
    """At least as many micro-batches as stages."""
    splits_backward: bool = False
    """Gradients of weights come after those of inputs, in a backward of their own."""
    has_rounds: bool = False
    """Micro-batches come in equal rounds of about as many as there are ranks."""

    @property
    def of_torch(self) -> type:
        from torch.distributed import pipelining  # takes a second, which a plan need not wait for

        found = getattr(pipelining, self.torch_name, None)
        if not isinstance(found, type):
            raise ValueError(f"this torch has no pipeline schedule {self.torch_name}: choose another schedule=")
        return found


SCHEDULES = {
    "gpipe": ScheduleKind("ScheduleGPipe"),
    "1f1b": ScheduleKind("Schedule1F1B", needs_filling=True),
    "interleaved": ScheduleKind("ScheduleInterleaved1F1B", has_chunks=True, usual_chunks=2, has_rounds=True),
    "zero_bubble": ScheduleKind(
        "ScheduleInterleavedZeroBubble", has_chunks=True, splits_backward=True, has_rounds=True
    ),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", has_chunks=True, usual_chunks=2, is_v=True, splits_backward=True),
}


def schedule_kind(name: str) -> ScheduleKind:
    """
    >>> schedule_kind("1F1B").torch_name
    'Schedule1F1B'
    """
    found = SCHEDULES.get(name.lower() if isinstance(name, str) else name)
    if found is None:
        near = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(map(repr, SCHEDULES))}"
        raise ValueError(f"schedule={name!r} is unknown: {fix}")
    return found


class Names(NamedTuple):
    """What a caller's arguments are called, for messages."""

    microbatches: str = "microbatches"
    chunks: str = "chunks_per_rank"


_OWN_NAMES = Names()


def check_counts(name: str, ranks: int, chunks: int, microbatches: int, names: Names = _OWN_NAMES) -> None:
    """What torch's schedules ask of these numbers, said before anything is cut.

    >>> check_counts("1f1b", 4, 1, 2)
    Traceback (most recent call last):
    ...
    ValueError: microbatches=2 cannot fill 4 stages with schedule='1f1b': give at least 4, or use schedule='gpipe'
    """
    for refusal in _refusals(name, ranks, chunks, microbatches, names):
        raise ValueError(refusal)


def are_allowed(name: str, ranks: int, chunks: int, microbatches: int) -> bool:
    """
    >>> [count for count in range(1, 10) if are_allowed("interleaved", 4, 2, count)]
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    return not any(_refusals(name, ranks, chunks, microbatches, _OWN_NAMES))


def _refusals(name: str, ranks: int, chunks: int, microbatches: int, names: Names) -> Iterator[str]:
    kind = schedule_kind(name)
    for said, number in ((names.microbatches, microbatches), (names.chunks, chunks)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            yield f"{said}={number!r} must be a whole number, at least 1"
            return
    if kind.is_v and chunks != 2:
        yield f"schedule={name!r} gives every rank two stages: set {names.chunks}=2, not {chunks}"
    if not kind.has_chunks and chunks != 1:
        yield f"{names.chunks}={chunks}, but with schedule={name!r} a rank has one stage: use schedule='interleaved'"
    if kind.needs_filling and microbatches < ranks:
        yield (
            f"{names.microbatches}={microbatches} cannot fill {ranks} stages with schedule={name!r}: give at least "
            f"{ranks}, or use schedule='gpipe'"
        )
    rounds = max(1, microbatches // ranks)
    if kind.has_rounds and microbatches % rounds:
        yield (
            f"{names.microbatches}={microbatches} do not make {rounds} equal rounds, which schedule={name!r} needs: "
            f"use {microbatches - microbatches % ranks}, a multiple of the {ranks} pipeline ranks"
        )


def owners_of_stages(kind: ScheduleKind, ranks: int, chunks: int) -> list[int]:
    """For each stage, the pipeline rank that has it.

    >>> owners_of_stages(SCHEDULES["interleaved"], 2, 2), owners_of_stages(SCHEDULES["zbv"], 2, 2)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    if kind.is_v:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(ranks * chunks)]
