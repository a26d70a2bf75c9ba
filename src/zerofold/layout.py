"""Integers only: where each parameter lies in its slab's flat space, and which rank owns which range.

flat space of one slab, N = 3 ranks ('.' is padding: parameters start on 128 bytes, shards are equal)

| w w w w w w w w w w|b b .|u u u u u u u u u .|
| rank 0        | rank 1         | rank 2       |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT_BYTES = 128


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns; empty when start == stop."""

    index: int  # which parameter of the slab
    start: int  # range inside the flattened parameter
    stop: int
    shard_start: int  # where that range begins inside the owner's shard

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def shard_stop(self) -> int:
        return self.shard_start + self.size

    def within(self, chunk_start: int, chunk_stop: int) -> Piece:
        """The part of this piece inside shard range [chunk_start, chunk_stop)."""
        low = min(max(self.shard_start, chunk_start), chunk_stop)
        high = max(min(self.shard_stop, chunk_stop), low)
        offset = self.start - self.shard_start
        return Piece(self.index, low + offset, high + offset, low)


@dataclass(frozen=True)
class FlatLayout:
    """The even cut of a list of flattened parameters over `world` ranks.

    >>> layout = FlatLayout.even([100, 7], world=2, itemsize=4)
    >>> layout.offsets, layout.size, layout.shard_size
    ((0, 128), 192, 96)
    >>> layout.pieces(1)[0].start, layout.pieces(1)[0].stop, layout.pieces(1)[1].size
    (96, 100, 7)
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    world: int

    @classmethod
    def even(cls, numels: list[int], *, world: int, itemsize: int) -> FlatLayout:
        step = max(1, ALIGNMENT_BYTES // itemsize)
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += -(-numel // step) * step
        shard = -(-end // (world * step)) * step
        return cls(tuple(numels), tuple(offsets), shard * world, world)

    @property
    def shard_size(self) -> int:
        return self.size // self.world

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` owns of each parameter, one entry per parameter, empty ones included."""
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(self._piece(i, rank) for i in range(len(self.numels))) for rank in range(self.world))

    def _piece(self, index: int, rank: int) -> Piece:
        shard_start = rank * self.shard_size
        low, high = self.offsets[index], self.offsets[index] + self.numels[index]
        start = min(max(low, shard_start), high)
        stop = max(min(high, shard_start + self.shard_size), start)
        return Piece(index, start - low, stop - low, max(start - shard_start, 0))

    def chunks(self, buffer_elements: int) -> Iterator[tuple[int, int]]:
        """Ranges of a shard such that one range from every rank fits a buffer of `buffer_elements`.

        >>> list(FlatLayout.even([320], world=2, itemsize=4).chunks(buffer_elements=128))
        [(0, 64), (64, 128), (128, 160)]
        """
        width = max(1, buffer_elements // self.world)
        for start in range(0, self.shard_size, width):
            yield start, min(start + width, self.shard_size)
