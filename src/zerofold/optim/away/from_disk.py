"""Chunks whose states are in a file: read, updated on the host, written, with the disk busy all the time.

disk      [ read b1 ][ write b0 ][ read b2 ][ write b1 ] …      bursts of one kind: some disks lose by a mix
host      [upd b0]               [upd b1]

disk      [r4][r5][r6][r7][r8] …                                 both at once, chunk by chunk: others carry more so
          [w0][w1][w2][w3][w4] …
host    [u0][u1][u2][u3][u4] …

One burst begins with the last chunk of the one before, so that the disk always has something to do. Which of the two
is faster on a disk, updates find out (`Order`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.memory import Done, TierMemory
from zerofold.memory.disk import DiskStore, Request
from zerofold.optim.away.chunks import Chunk, ChunkEnds
from zerofold.optim.away.on_host import HostUpdate
from zerofold.optim.host_pool import PoolJob
from zerofold.placement import Tier

BATCH = 4  # chunks of a burst: 0.8 GB of fp32 states
STATES = 3
_FIRST_TRIED, _LAST_TRIED = 2, 5  # these updates take turns; the first one of all makes memory and blocks of the file
_PERIOD = 32  # later, one of so many tries what is not done otherwise


class Order:
    """Whether an update's reads and writes go at once, or in bursts of one kind: what was faster when last tried.

    >>> order, rates = Order(), {True: 4.7e9, False: 3.7e9}  # bytes a second
    >>> [order.choose(rates[order.mixes]) for _ in range(8)]
    [True, False, True, False, True, True, True, True]
    """

    def __init__(self) -> None:
        self.mixes = False
        self._updates = 0
        self._rates: dict[bool, deque[float]] = {mixes: deque(maxlen=2) for mixes in (False, True)}

    def choose(self, rate: float) -> bool:
        """For the next update; `rate`: the last one's, where there was one."""
        self._updates += 1
        if self._updates > _FIRST_TRIED and rate:
            self._rates[self.mixes].append(rate)
        # By the better of two: what disturbs a disk only makes it slower.
        bursts, mixed = (max(self._rates[mixes], default=0.0) for mixes in (False, True))
        if self._updates <= _LAST_TRIED:
            self.mixes = not self.mixes
        else:
            self.mixes = (mixed > bursts) != (self._updates % _PERIOD == 0)
        return self.mixes


class DiskUpdate:
    """Runs in the thread of a worker. Holds memory for two batches, whatever the model's size."""

    def __init__(self, memory: TierMemory, disk: DiskStore, host: HostUpdate, chunk: int) -> None:
        self._memory, self._disk, self._host, self.chunk = memory, disk, host, chunk
        self._rooms = [
            memory.take(Tier.HOST, BATCH * STATES * chunk, torch.float32, "update ring", "ring").view(BATCH, STATES, -1)
            for _ in range(2)
        ]
        self.mixes = False
        """Reads and writes go at once."""
        self._turn = 0
        self._reads: list[list[Request]] = []  # of each chunk
        self._leaving: list[_Leaving] = []
        self._read_ahead: list[Chunk] = []

    def batches(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        rest = iter(chunks)
        while batch := list(islice(rest, BATCH)):
            yield batch

    def run(self, batch: list[Chunk], following: list[Chunk]) -> list[ChunkEnds]:
        """Updates one batch; the next one is read meanwhile."""
        self._disk.in_bursts = not self.mixes
        if self._read_ahead != batch:
            self._reads = [self._read(chunk, states) for chunk, states in zip(batch, self._room, strict=False)]
        room, self._turn = self._room, 1 - self._turn
        reads, self._reads, self._read_ahead = self._reads, [], following
        before, self._leaving = self._leaving, []
        sent, copies = list[Done](), list[tuple[Tensor, Request]]()
        together = 1 if self.mixes else BATCH  # chunks: a burst, or one on its way out for each on its way in
        for first in range(0, BATCH, together):
            these = slice(first, first + together)
            _wait(reads[these])
            updates = [self._begin(chunk, states) for chunk, states in zip(batch[these], room[these], strict=False)]
            self._read_in_place_of_written(following[these], before[these], these)
            for update in updates:
                update.job.wait()
                copies += self._write_copy(update)
            if not self.mixes:
                _wait(self._reads[:-1])
            for update in updates:
                self._leaving.append(self._write_states(update))
                sent += update.sent
        for made, request in copies:  # parameters are needed first
            request.wait()
            self._memory.bring_back(made, Done())
        return [ChunkEnds(done, done) for done in sent]

    def finish(self) -> None:
        """Returns when all that was updated is in the file."""
        leaving, self._leaving = self._leaving, []
        for each in leaving:
            each.wait()
        self._disk.in_bursts = False

    def give_back(self) -> None:
        """Its memory. Nothing may be under way."""
        for room in self._rooms:
            self._memory.give(room)
        self._rooms = []

    @property
    def _room(self) -> Tensor:
        return self._rooms[self._turn]

    def _begin(self, chunk: Chunk, states: Tensor) -> _Update:
        views, sent = self._views(states, chunk), list[Done]()
        return _Update(chunk, views, self._host.submit(_without_copy(chunk), views, sent.append), sent)

    def _read_in_place_of_written(self, chunks: list[Chunk], leaving: list[_Leaving], places: slice) -> None:
        """Each chunk as soon as the one before it has left that part of the room."""
        for index, states in enumerate(self._room[places]):
            if index < len(leaving):
                leaving[index].wait()
            if index < len(chunks):
                self._reads.append(self._read(chunks[index], states))

    def _write_copy(self, update: _Update) -> Iterator[tuple[Tensor, Request]]:
        """What forward computes with, if it lives in the file."""
        copy = update.chunk.copy
        if copy is not None and _is_in_file(update.chunk):
            made = self._memory.borrow(copy.nbytes).view(copy.dtype)
            made.copy_(update.states[0])
            yield made, self._disk.write(self._offset(copy), made)

    def _write_states(self, update: _Update) -> _Leaving:
        pairs = zip(update.chunk.states, update.states, strict=True)
        (copy,) = update.sent
        return _Leaving([self._disk.write(self._offset(there), here) for there, here in pairs], copy)

    def _read(self, chunk: Chunk, states: Tensor) -> list[Request]:
        pairs = zip(chunk.states, self._views(states, chunk), strict=True)
        return [self._disk.read(self._offset(there), here) for there, here in pairs]

    @staticmethod
    def _views(states: Tensor, chunk: Chunk) -> list[Tensor]:
        """Room for the chunk's states, each in its own dtype, which is at most as wide as the room's."""
        return [room.view(each.dtype)[: chunk.size] for room, each in zip(states, chunk.states, strict=True)]

    def _offset(self, tensor: Tensor) -> int:
        return self._memory.offset(tensor)


class _Update(NamedTuple):
    """A chunk that the host updates."""

    chunk: Chunk
    states: list[Tensor]
    """Where they are meanwhile."""
    job: PoolJob
    sent: list[Done]
    """The arrival of its copy where forward needs it, when the job is done."""


class _Leaving(NamedTuple):
    """A chunk on its way out of its part of a room: its states to the file, its copy to where forward needs it."""

    writes: list[Request]
    copy: Done

    def wait(self) -> None:
        _wait([self.writes])
        self.copy.finish()


def _wait(chunks: Sequence[Sequence[Request]]) -> None:
    for requests in chunks:
        for request in requests:
            request.wait()


def _is_in_file(chunk: Chunk) -> bool:
    return chunk.slab.tiers.parameters is Tier.NVME


def _without_copy(chunk: Chunk) -> Chunk:
    """Parameters in the file are written there as one, in whole pages."""
    return replace(chunk, copy=None) if _is_in_file(chunk) else chunk
