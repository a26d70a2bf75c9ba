"""Updates that begin under backward, before anybody knows the norm of all gradients.

backward   [ b27 ][ b26 ][ b25 ][ b24 ] …  [ b0 ] norm     the last units have their gradients first
early             [u27 ][u26 ]                             up, updated as if nothing were clipped, and down
step                                              [u0 ][u1 ] … [u25]      u26 and u27 stand

An early update stands when the step turns out to do the same: no clipping, the same numbers, the same gradients. Else
the step begins with the old states, which are on the device until then. Whoever looks at a state before that sees the
old one. So it is always right, and in vain where gradients are clipped: after that, some steps go without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from zerofold.gradients_on_faces import FaceGradients
from zerofold.memory import Done
from zerofold.optim.away.chunks import Chunk, Scaling, SlabWork, count_of_chunks, runs_of
from zerofold.optim.away.slab_update import SlabUpdate
from zerofold.optim.away.through_device import DeviceUpdate
from zerofold.optim.host_worker import HostWorker, Job
from zerofold.slab_away import AwaySlab

_PAUSE = 16  # steps without early updates, after one in which they were in vain


Upcoming = Callable[[AwaySlab], SlabWork | None]
"""What the next step would do to a slab; None where nobody can tell."""


class _Announced(NamedTuple):
    update: SlabUpdate
    versions: tuple[int, ...]


class EarlyUpdates:
    """Of the last slabs in forward's order, as many as there is room for."""

    def __init__(self, through: DeviceUpdate, worker: HostWorker, slabs: Sequence[AwaySlab], room: int) -> None:
        self._through, self._worker = through, worker
        self._upcoming: Upcoming | None = None
        self._clip_value: float | None = None  # of every step
        self._jobs: list[Job] = []  # for the next step
        self._last: dict[AwaySlab, _Announced] = {}
        self._paused = 0
        self.slabs: list[AwaySlab] = []
        for slab in reversed(slabs):
            room -= count_of_chunks(slab)
            if room < 0:
                break
            # Without a copy, forward computes with the states themselves, which must be the old ones until the step.
            if slab.copy_of_shard is not None and isinstance(slab.gradients, FaceGradients):
                slab.gradients.on_mean = partial(self._begin, slab)
                self.slabs.append(slab)

    @property
    def is_paused(self) -> bool:
        return self._paused > 0

    def announce(self, slab: AwaySlab, update: SlabUpdate, versions: tuple[int, ...]) -> None:
        """The step updates the slab, whose states then have these versions unless somebody changes them."""
        self._last[slab] = _Announced(update, versions)

    def begin_step(self, scaling: Scaling, upcoming: Upcoming | None) -> list[Job]:
        """What was begun is now the step's own, which waits for it; `upcoming` of the one after it."""
        begun, self._jobs, self._upcoming, self._clip_value = self._jobs, [], upcoming, scaling.clip_value
        self._paused = _PAUSE if begun and scaling.scale is not None else max(0, self._paused - 1)
        return begun

    def take_back(self) -> None:
        """Returns when all states are as the last step left them, where they live."""
        if self._jobs:
            begun, self._jobs = [*self._jobs, self._worker.submit(self._through.take_back)], []
            for job in begun:
                job.wait()

    def close(self) -> None:
        for slab in self.slabs:
            if isinstance(slab.gradients, FaceGradients):
                slab.gradients.on_mean = None

    def _begin(self, slab: AwaySlab) -> None:
        """In backward's thread."""
        last = self._last.get(slab)
        if self._upcoming is None or self.is_paused or last is None or last.versions != versions_of(slab):
            return
        work = self._upcoming(slab)
        if work is None:
            return
        scaling, arrived = Scaling(None, self._clip_value), Done(torch.cuda.current_stream().record_event())
        chunks = [chunk for run in runs_of(work, scaling, arrived) for chunk in run.chunks()]
        slab.home.step.is_under_way = True
        self._jobs.append(
            self._worker.submit(partial(self._run, [(chunk, chunk.work) for chunk in chunks], last.update))
        )

    def _run(self, chunks: Sequence[tuple[Chunk, str]], last: SlabUpdate) -> None:
        for end in last.ends:
            end.complete.finish()
        for chunk, work in chunks:
            self._through.run_early(chunk, work)


def versions_of(slab: AwaySlab) -> tuple[int, ...]:
    """Of its states: another one, and somebody has changed them."""
    return tuple(state._version for state in (slab.raw_shard, *slab.moments.values()))
