"""Torch's pipeline schedules by the names that users know them by, and which rank has which stage."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from torch.distributed import pipelining


@dataclass(frozen=True)
class ScheduleKind:
    """One of torch's schedules."""

    torch_name: str
    has_chunks: bool = False
    """A rank may have several stages."""
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
        found = getattr(pipelining, self.torch_name, None)
        if not isinstance(found, type):
            raise ValueError(f"this torch has no pipeline schedule {self.torch_name}: choose another schedule=")
        return found


SCHEDULES = {
    "gpipe": ScheduleKind("ScheduleGPipe"),
    "1f1b": ScheduleKind("Schedule1F1B", needs_filling=True),
    "interleaved": ScheduleKind("ScheduleInterleaved1F1B", has_chunks=True, has_rounds=True),
    "zero_bubble": ScheduleKind(
        "ScheduleInterleavedZeroBubble", has_chunks=True, splits_backward=True, has_rounds=True
    ),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", has_chunks=True, is_v=True, splits_backward=True),
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


def check_counts(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    """What torch's schedules ask of these numbers, said before anything is cut."""
    kind = schedule_kind(name)
    for said, number in (("microbatches", microbatches), ("chunks_per_rank", chunks)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{said}={number!r} must be a whole number, at least 1")
    if kind.is_v and chunks != 2:
        raise ValueError(f"schedule={name!r} gives every rank two stages: set chunks_per_rank=2, not {chunks}")
    if not kind.has_chunks and chunks != 1:
        raise ValueError(
            f"chunks_per_rank={chunks}, but with schedule={name!r} a rank has one stage: use schedule='interleaved'"
        )
    if kind.needs_filling and microbatches < ranks:
        raise ValueError(
            f"microbatches={microbatches} cannot fill {ranks} stages with schedule={name!r}: give at least {ranks}, "
            "or use schedule='gpipe'"
        )
    rounds = max(1, microbatches // ranks)
    if kind.has_rounds and microbatches % rounds:
        raise ValueError(
            f"microbatches={microbatches} do not make {rounds} equal rounds, which schedule={name!r} needs: use "
            f"{microbatches - microbatches % ranks}, a multiple of the {ranks} pipeline ranks"
        )


def owners_of_stages(kind: ScheduleKind, ranks: int, chunks: int) -> list[int]:
    """For each stage, the pipeline rank that has it.

    >>> owners_of_stages(SCHEDULES["interleaved"], 2, 2), owners_of_stages(SCHEDULES["zbv"], 2, 2)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    if kind.is_v:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(ranks * chunks)]
