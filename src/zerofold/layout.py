"""Integers only: where each parameter lies in its slab's flat space, and which rank owns which range.

flat space of one slab, N = 3 ranks ('.' is padding: parameters start on 128 bytes)

even cut    | w w w w w w w w w w|b b .|u u u u u u u u u .|      shards are equal
            | rank 0        | rank 1         | rank 2       |

by owner    | u u u u u u u u u .|w w w w w w w w w w|b b .|      parameters ordered by their owner
            | rank 0             | rank 1            | 2    |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

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
    """The cut of a list of flattened parameters over ranks: rank r's shard is flat[bounds[r]:bounds[r + 1]].

    >>> layout = FlatLayout.even([100, 7], world=2, itemsize=4)
    >>> layout.offsets, layout.bounds
    ((0, 128), (0, 96, 192))
    >>> layout.pieces(1)[0].start, layout.pieces(1)[0].stop, layout.pieces(1)[1].size
    (96, 100, 7)
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]

    @classmethod
    def even(cls, numels: Sequence[int], *, world: int, itemsize: int) -> FlatLayout:
        step = max(1, ALIGNMENT_BYTES // itemsize)
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += _round_up(numel, step)
        shard = _round_up(-(-end // world), step)
        return cls(tuple(numels), tuple(offsets), tuple(shard * rank for rank in range(world + 1)))

    @classmethod
    def by_owner(cls, numels: Sequence[int], owners: Sequence[int], *, world: int, itemsize: int) -> FlatLayout:
        """Each parameter whole at its owner.

        >>> layout = FlatLayout.by_owner([100, 7], [1, 0], world=2, itemsize=4)
        >>> layout.offsets, layout.bounds, layout.pieces(1)[0].size, layout.pieces(1)[1].size
        ((32, 0), (0, 32, 160), 100, 0)
        """
        step = max(1, ALIGNMENT_BYTES // itemsize)
        offsets, bounds, end = [0] * len(numels), [0], 0
        for rank in range(world):
            for index, owner in enumerate(owners):
                if owner == rank:
                    offsets[index] = end
                    end += _round_up(numels[index], step)
            bounds.append(end)
        return cls(tuple(numels), tuple(offsets), tuple(bounds))

    @property
    def world(self) -> int:
        return len(self.bounds) - 1

    @property
    def size(self) -> int:
        return self.bounds[-1]

    def shard_size(self, rank: int) -> int:
        return self.bounds[rank + 1] - self.bounds[rank]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` owns of each parameter, one entry per parameter, empty ones included."""
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(self._piece(i, rank) for i in range(len(self.numels))) for rank in range(self.world))

    def _piece(self, index: int, rank: int) -> Piece:
        shard_start, shard_stop = self.bounds[rank], self.bounds[rank + 1]
        low, high = self.offsets[index], self.offsets[index] + self.numels[index]
        start = min(max(low, shard_start), high)
        stop = max(min(high, shard_stop), start)
        return Piece(index, start - low, stop - low, max(start - shard_start, 0))

    def chunks(self, buffer_elements: int) -> Iterator[Chunk]:
        """Ranges of the shards such that one range from every rank fits a buffer of `buffer_elements`.

        >>> [chunk.widths for chunk in FlatLayout.even([320], world=2, itemsize=4).chunks(buffer_elements=128)]
        [(64, 64), (64, 64), (32, 32)]
        """
        width = max(1, buffer_elements // self.world)
        sizes = [high - low for low, high in pairwise(self.bounds)]
        for start in range(0, max(sizes), width):
            yield Chunk(start, tuple(min(max(size - start, 0), width) for size in sizes))


@dataclass(frozen=True)
class Chunk:
    """The same range of every rank's shard, as far as each shard reaches."""

    start: int
    widths: tuple[int, ...]  # by rank

    @property
    def is_even(self) -> bool:
        return len(set(self.widths)) == 1

    def part(self, piece: Piece, rank: int) -> Piece:
        """What of rank's piece lies in this chunk."""
        return piece.within(self.start, self.start + self.widths[rank])


@dataclass(frozen=True)
class Box:
    """A block of an N-dimensional tensor whose elements follow each other in the flattened one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # of the flattened tensor

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """A flat range of a tensor as blocks: the rest of a row, whole rows, the beginning of a row, at every depth.

    >>> [(box.offsets, box.sizes) for box in boxes((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    place = start
    while place < stop:
        # The largest block of whole rows, planes, … that begins here and ends in time.
        dim, row = len(shape), 1
        while dim and place % (row * shape[dim - 1]) == 0 and place + row * shape[dim - 1] <= stop:
            dim -= 1
            row *= shape[dim]
        if dim == 0:
            yield Box((0,) * len(shape), tuple(shape), place)
            return
        index = place // row % shape[dim - 1]
        count = min(shape[dim - 1] - index, (stop - place) // row)
        offsets, rest = [], place
        for size in reversed(shape):
            offsets.append(rest % size)
            rest //= size
        yield Box(tuple(reversed(offsets)), ((1,) * (dim - 1) + (count,) + tuple(shape[dim:])), place)
        place += count * row


def balance(costs: Sequence[float], world: int) -> list[int]:
    """An owner for each item so that the ranks' sums are close: the costliest first, to the rank with the least.

    >>> balance([5, 1, 4, 3, 3], world=2)
    [0, 1, 1, 1, 0]
    """
    owners, load = [0] * len(costs), [0.0] * world
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = min(range(world), key=lambda rank: (load[rank], rank))
        load[owners[index]] += costs[index]
    return owners


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
