"""An offloaded slab's update in chunks: ranges of its shard small enough to be on their way in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim.onepass import COPY_DTYPES, AdamSettings, AdamTensors
from zerofold.placement import Tier
from zerofold.slab_away import AwaySlab

CHUNK = 2**24  # elements: 64 MiB of each fp32 state. Copies of 16 MiB and more run at the full rate of the bus

_ALIGN = 2**21  # elements: whole blocks of a file


class ChunkEnds(NamedTuple):
    """Of the update of one chunk."""

    usable: Done  # forward may use what it computes with
    complete: Done  # the states are where they live


class PieceWork(NamedTuple):
    """What one step does to one parameter: its range in the shard, its gradient there, and its numbers."""

    start: int
    stop: int
    gradient: Tensor
    settings: AdamSettings
    step: int
    seed: int
    streams: bool = False  # through the device

    def within(self, start: int, stop: int) -> PieceWork | None:
        first, last = max(self.start, start), min(self.stop, stop)
        if first >= last:
            return None
        gradient = self.gradient[first - self.start : last - self.start]
        return self._replace(start=first, stop=last, gradient=gradient)


class SlabWork(NamedTuple):
    """What one step does to one slab."""

    slab: AwaySlab
    pieces: list[PieceWork]
    moments: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scaling:
    """What all gradients of a step are changed by."""

    scale: float | None
    clip_value: float | None

    def tensor(self, device: torch.device | str) -> Tensor | None:
        # Filled where it is: a copy from ordinary host memory would wait for all that its stream has to do.
        return None if self.scale is None else torch.full((), self.scale, dtype=torch.float32, device=device)


@dataclass(frozen=True, eq=False)
class Chunk:
    """A range of a slab's shard with the parts of parameters in it."""

    slab: AwaySlab
    start: int
    stop: int
    pieces: tuple[PieceWork, ...]
    states: tuple[Tensor, Tensor, Tensor]  # master and moments of this range, where they live
    copy: Tensor | None  # of this range: what forward computes with, kept beside the master
    scaling: Scaling
    arrived: Done  # the gradients

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> tuple[AwaySlab, int, int]:
        return self.slab, self.start, self.stop

    def overlaps(self, key: tuple[object, int, int]) -> bool:
        """Another chunk that has elements in common with this one."""
        slab, start, stop = key
        return slab is self.slab and key != self.key and start < self.stop and self.start < stop

    @property
    def work(self) -> str:
        """Equal for two updates of one chunk that do the same: to the same gradients, unchanged since, while the first
        chunk keeps their memory from being given to others. A string is one object to keep; tuples would be dozens."""
        gradients = [(p.gradient.data_ptr(), p.gradient._version, p.gradient.dtype) for p in self.pieces]
        numbers = [(p.start, p.stop, p.settings, p.step, p.seed) for p in self.pieces]
        return repr((self.scaling, numbers, gradients))

    def tensors(self, states: Sequence[Tensor], gradients: Sequence[Tensor], copies: Sequence[Tensor | None]) -> Groups:
        """For the kernel, by settings, with the states in other memory perhaps."""
        groups: Groups = []
        for piece, gradient, copy in zip(self.pieces, gradients, copies, strict=True):
            master, exp_avg, exp_avg_sq = (t[piece.start - self.start : piece.stop - self.start] for t in states)
            each = AdamTensors(master, gradient, exp_avg, exp_avg_sq, copy, piece.step, piece.seed)
            if groups and groups[-1][0] == piece.settings:
                groups[-1][1].append(each)
            else:
                groups.append((piece.settings, [each]))
        return groups

    def copy_of(self, piece: PieceWork) -> Tensor | None:
        return None if self.copy is None else self.copy[piece.start - self.start : piece.stop - self.start]

    def copies(self) -> list[Tensor | None]:
        return [self.copy_of(piece) for piece in self.pieces]

    def masters(self, master: Tensor) -> list[Tensor]:
        """Of each piece, in a master that is in other memory perhaps."""
        return [master[piece.start - self.start : piece.stop - self.start] for piece in self.pieces]

    @property
    def kernel_makes_copy(self) -> bool:
        """A copy in the master's own dtype is no cast: it is copied after the update."""
        return self.copy is not None and self.copy.dtype in COPY_DTYPES and self.states[0].dtype is not self.copy.dtype


Groups = list[tuple[AdamSettings, list[AdamTensors]]]


@dataclass(frozen=True, eq=False)
class Run:
    """Parameters of a slab that are next to each other and go the same way. Its chunks are made when their turn comes:
    all those of a step at once are thousands of objects, for which Python's garbage collector stops every thread."""

    slab: AwaySlab
    start: int
    stop: int
    pieces: Sequence[PieceWork]
    states: tuple[Tensor, ...]  # of the shard
    copy: Tensor | None
    scaling: Scaling
    arrived: Done

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def streams(self) -> bool:
        return self.pieces[0].streams

    def chunks(self) -> Iterator[Chunk]:
        """In the order of the shard; only those in which something changes."""
        step = self._elements
        for start in range(self.start, self.stop, step):
            stop = min(start + step, self.stop)
            inside = tuple(part for piece in self.pieces if (part := piece.within(start, stop)) is not None)
            if inside:
                master, exp_avg, exp_avg_sq = (tensor[start:stop] for tensor in self.states)
                own = None if self.copy is None else self.copy[start:stop]
                states = (master, exp_avg, exp_avg_sq)
                yield Chunk(self.slab, start, stop, inside, states, own, self.scaling, self.arrived)

    @property
    def _elements(self) -> int:
        """Of a chunk. From a file all are about as large: behind a small last one, the disk would have nothing to do
        while the next burst is made ready."""
        if self.slab.tier is not Tier.NVME:
            return CHUNK
        align, count = min(_ALIGN, CHUNK), max(1, -(-self.size // CHUNK))
        return max(1, -(-self.size // (count * align))) * align


def runs_of(work: SlabWork, scaling: Scaling, arrived: Done) -> list[Run]:
    """In the order of the shard. Where a file is read in pages from its beginning, all of it is one."""
    slab, pieces = work.slab, work.pieces
    # `.data` has a version counter of its own: the update under way does not look like somebody's change.
    states = tuple(tensor.data for tensor in (slab.raw_shard, *work.moments))
    copy = None if slab.copy_of_shard is None else slab.copy_of_shard.data
    if slab.tier is Tier.NVME:
        return [Run(slab, 0, slab.raw_shard.numel(), pieces, states, copy, scaling, arrived)]
    ordered = sorted(pieces, key=lambda piece: piece.start)
    runs = [list(run) for _, run in groupby(ordered, key=lambda piece: piece.streams)]
    return [Run(slab, run[0].start, run[-1].stop, run, states, copy, scaling, arrived) for run in runs]


def count_of_chunks(slab: AwaySlab) -> int:
    """Where all of it goes the same way."""
    return -(-slab.raw_shard.numel() // CHUNK)
