"""Chunks whose states are in a file: read, updated on the host, written, with the disk busy all the time.

disk      [ read b1 ][ write b0 ][ read b2 ][ write b1 ] …      bursts of one kind: a mix costs a disk some of its rate
host      [upd b0]               [upd b1]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from zerofold.memory import Done, TierMemory
from zerofold.memory.disk import DiskStore, Request
from zerofold.optim.away.chunks import Chunk, Ends
from zerofold.optim.away.on_host import HostUpdate
from zerofold.placement import Tier

BATCH = 4  # chunks of a burst: 0.8 GB of fp32 states
STATES = 3


class DiskUpdate:
    """Runs in the thread of a worker. Holds memory for two batches, whatever the model's size."""

    def __init__(self, memory: TierMemory, disk: DiskStore, host: HostUpdate, chunk: int) -> None:
        self._memory, self._disk, self._host, self.chunk = memory, disk, host, chunk
        self._rooms = [
            memory.take(Tier.HOST, BATCH * STATES * chunk, torch.float32, "update ring", "ring").view(BATCH, STATES, -1)
            for _ in range(2)
        ]
        self._turn = 0
        self._reads: list[Request] = []
        self._writes: list[Request] = []
        self._sent: list[Done] = []  # copies out of the rooms
        self._read_ahead: list[Chunk] = []

    def batches(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        rest = iter(chunks)
        while batch := list(islice(rest, BATCH)):
            yield batch

    def run(self, batch: list[Chunk], following: list[Chunk]) -> list[Ends]:
        """Updates one batch; the next one is read meanwhile."""
        if self._read_ahead != batch:
            self._read(batch)
        for request in self._reads:
            request.wait()
        room = self._rooms[self._turn]
        self._turn = 1 - self._turn
        self.finish()  # the writes of the batch before, from the room that is read into next
        self._read_ahead = following
        if following:
            self._read(following)
        sent: list[list[Done]] = [[] for _ in batch]
        jobs = [
            self._host.submit(_without_copy(chunk), self._views(states, chunk), done.append)
            for chunk, states, done in zip(batch, room, sent, strict=False)
        ]
        copies = []
        for job, chunk, states in zip(jobs, batch, room, strict=False):
            job.wait()
            if chunk.copy is not None and _is_in_file(chunk):
                made = self._memory.borrow(chunk.copy.nbytes).view(chunk.copy.dtype)
                made.copy_(self._views(states, chunk)[0])
                copies.append((made, self._disk.write(self._offset(chunk.copy), made)))
        for request in self._reads if following else ():
            request.wait()
        for chunk, states in zip(batch, room, strict=False):
            for there, here in zip(chunk.states, self._views(states, chunk), strict=True):
                self._writes.append(self._disk.write(self._offset(there), here))
        for made, request in copies:  # parameters are needed first
            request.wait()
            self._memory.bring_back(made, Done())
        self._sent += [done for (done,) in sent]
        return [Ends(done, done) for (done,) in sent]

    def finish(self) -> None:
        """Returns when all that was updated is in the file."""
        writes, self._writes = self._writes, []
        sent, self._sent = self._sent, []
        for request in writes:
            request.wait()
        for done in sent:
            done.finish()

    def give_back(self) -> None:
        """Its memory. Nothing may be under way."""
        for room in self._rooms:
            self._memory.give(room)
        self._rooms = []

    def _read(self, batch: list[Chunk]) -> None:
        self._reads = [
            self._disk.read(self._offset(there), here)
            for chunk, states in zip(batch, self._rooms[self._turn], strict=False)
            for there, here in zip(chunk.states, self._views(states, chunk), strict=True)
        ]

    @staticmethod
    def _views(states: Tensor, chunk: Chunk) -> list[Tensor]:
        """Room for the chunk's states, each in its own dtype, which is at most as wide as the room's."""
        return [room.view(each.dtype)[: chunk.size] for room, each in zip(states, chunk.states, strict=True)]

    def _offset(self, tensor: Tensor) -> int:
        return self._memory.offset(tensor)


def _is_in_file(chunk: Chunk) -> bool:
    return chunk.slab.tiers.parameters is Tier.NVME


def _without_copy(chunk: Chunk) -> Chunk:
    """Parameters in the file are written there as one, in whole pages."""
    return replace(chunk, copy=None) if _is_in_file(chunk) else chunk
