"""The update of slabs whose states are in a file: all chunks of a step, batch by batch, in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zerofold.memory import TierMemory
from zerofold.optim.away.chunks import Chunk
from zerofold.optim.away.from_disk import DiskUpdate, Order
from zerofold.optim.away.on_host import HostUpdate
from zerofold.optim.away.slab_update import SlabUpdate
from zerofold.optim.host_worker import HostWorker, Job
from zerofold.timing import DISK

_PAGE = 1024  # elements of 4 bytes


class FileUpdates:
    """Makes its thread and its memory when the first chunks come: a model may have none in a file."""

    def __init__(self, memory: TierMemory, host: HostUpdate) -> None:
        self._memory, self._host = memory, host
        self._update: DiskUpdate | None = None
        self._worker: HostWorker | None = None
        self._order = Order()
        self._begun = 0.0
        self._nbytes = 0  # read and written by the last update
        self._seconds = 0.0
        self._rate = 0.0  # bytes a second of the last update that had some

    def begin(self) -> None:
        self._begun, self._nbytes = time.perf_counter(), 0

    def submit(self, queue: Sequence[tuple[Chunk, SlabUpdate]]) -> list[Job]:
        """Returns at once. Each slab's update gets the jobs that it waits for; all of them come back."""
        if not queue:
            return []
        update, worker = self._ready_for(max(chunk.size for chunk, _ in queue))
        update.mixes = self._order.choose(self._rate)
        updates = {id(chunk): update_of_slab for chunk, update_of_slab in queue}
        batches = list(update.batches([chunk for chunk, _ in queue]))
        jobs = []
        for batch, following in zip(batches, [*batches[1:], []], strict=True):
            jobs.append(worker.submit(_run(update, batch, following, updates)))
            for chunk in batch:
                updates[id(chunk)].jobs.append(jobs[-1])
        self._nbytes = sum(_moved(chunk) for chunk, _ in queue)
        jobs.append(worker.submit(self._end))
        return jobs

    @property
    def figures(self) -> dict[str, float]:
        """How the last update went, if it had states in a file."""
        if not self._nbytes:
            return {}
        mixes = float(self._order.mixes)
        return {"disk_bytes": float(self._nbytes), "disk_seconds": self._seconds, "disk_mixes": mixes}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _end(self) -> None:
        """In the worker's thread, as the last job of an update."""
        assert self._update is not None
        self._update.finish()
        self._seconds = time.perf_counter() - self._begun
        self._rate = self._nbytes / self._seconds

    def _ready_for(self, size: int) -> tuple[DiskUpdate, HostWorker]:
        """With room for chunks of that many elements: parameters that are unfrozen later may need more than others."""
        if self._update is not None and self._update.chunk < size:
            self._update.give_back()
            self._update = None
        if self._update is None:
            assert self._memory.disk is not None
            self._update = DiskUpdate(self._memory, self._memory.disk, self._host, -(-size // _PAGE) * _PAGE)
        if self._worker is None:
            self._worker = HostWorker(1, None)
        return self._update, self._worker


def _run(
    update: DiskUpdate, batch: list[Chunk], following: list[Chunk], updates: dict[int, SlabUpdate]
) -> Callable[[], None]:
    def work() -> None:
        begun, slab = time.perf_counter(), batch[0].slab
        for chunk, end in zip(batch, update.run(batch, following), strict=True):
            updates[id(chunk)].ends.append(end)
        if slab.clock.tape is not None:
            nbytes = sum(map(_moved, batch))
            slab.clock.tape.beside(DISK, slab.unit, begun, nbytes, what="read, update, write")

    return work


def _moved(chunk: Chunk) -> int:
    """Bytes that are read, and written again."""
    return sum(2 * state.nbytes for state in chunk.states)
