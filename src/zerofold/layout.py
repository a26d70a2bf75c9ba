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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

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


class Repeated(Sequence[int]):
    """One number for every rank, without a list of them: there may be 100,000.

    >>> widths = Repeated(64, 3)
    >>> list(widths), widths.total
    ([64, 64, 64], 192)
    """

    def __init__(self, number: int, times: int) -> None:
        self.number, self.times = number, times

    @property
    def total(self) -> int:
        return self.number * self.times

    def __len__(self) -> int:
        return self.times

    def __getitem__(self, index: Any) -> Any:
        places = range(self.times)[index]
        return self.number if isinstance(places, int) else [self.number] * len(places)


class EvenRanges(Sequence[tuple[int, int]]):
    """By rank, the range of a flattened parameter that lies in its shard, where all shards are equal.

    >>> list(EvenRanges(start=60, numel=100, shard=64, world=3))
    [(0, 4), (4, 68), (68, 100)]
    """

    def __init__(self, *, start: int, numel: int, shard: int, world: int) -> None:
        self._key = (start, numel, shard, world)

    def __len__(self) -> int:
        return self._key[3]

    def __getitem__(self, rank: Any) -> Any:
        start, numel, shard, world = self._key
        places = range(world)[rank]
        if not isinstance(places, int):
            return [self[place] for place in places]
        low = min(max(places * shard - start, 0), numel)
        return low, max(min((places + 1) * shard - start, numel), low)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EvenRanges) and self._key == other._key:
            return True
        is_like = isinstance(other, Sequence) and len(other) == len(self)
        return is_like and all(mine == theirs for mine, theirs in zip(self, other, strict=True))  # type: ignore[call-overload]

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class FlatLayout:
    """The cut of a list of flattened parameters over ranks: rank r's shard is flat[bounds[r]:bounds[r + 1]].

    >>> layout = FlatLayout.even([100, 7], world=2, itemsize=4)
    >>> layout.offsets, tuple(layout.bounds)
    ((0, 128), (0, 96, 192))
    >>> layout.pieces(1)[0].start, layout.pieces(1)[0].stop, layout.pieces(1)[1].size
    (96, 100, 7)
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: Sequence[int]
    """A range where all shards are equal: of 100,000 ranks nobody needs a list for each slab."""
    _pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def even(cls, numels: Sequence[int], *, world: int, itemsize: int) -> FlatLayout:
        step = max(1, ALIGNMENT_BYTES // itemsize)
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += _round_up(numel, step)
        shard = _round_up(-(-end // world), step)
        bounds = range(0, shard * world + 1, shard) if shard else (0,) * (world + 1)
        return cls(tuple(numels), tuple(offsets), bounds)

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
        if rank not in self._pieces:
            self._pieces[rank] = tuple(self._piece(index, rank) for index in range(len(self.numels)))
        return self._pieces[rank]

    @property
    def is_even(self) -> bool:
        return isinstance(self.bounds, range)

    def ranges(self, index: int) -> Sequence[tuple[int, int]]:
        """By rank, what it owns of one flattened parameter."""
        if self.is_even:
            shard, start = self.shard_size(0), self.offsets[index]
            return EvenRanges(start=start, numel=self.numels[index], shard=shard, world=self.world)
        pieces = [self._piece(index, rank) for rank in range(self.world)]
        return tuple((piece.start, piece.stop) for piece in pieces)

    def _piece(self, index: int, rank: int) -> Piece:
        shard_start, shard_stop = self.bounds[rank], self.bounds[rank + 1]
        low, high = self.offsets[index], self.offsets[index] + self.numels[index]
        start = min(max(low, shard_start), high)
        stop = max(min(high, shard_stop), start)
        return Piece(index, start - low, stop - low, max(start - shard_start, 0))

    def blocks(self, index: int) -> Iterator[Block]:
        """Where one parameter lies among equal shards: the end of a shard, whole shards, the beginning of one.

        >>> layout = FlatLayout.even([32, 480], world=8, itemsize=4)
        >>> [(block.row, block.rows, block.column, block.start, block.stop) for block in layout.blocks(1)]
        [(0, 1, 32, 0, 32), (1, 7, 0, 32, 480)]
        """
        shard, low = self.shard_size(0), self.offsets[index]
        place, end = low, low + self.numels[index]
        while place < end:
            row, column = divmod(place, shard)
            rows = 1 if column else max(1, (end - place) // shard)
            stop = min(place + rows * shard - column, end)
            yield Block(row, rows, column, place - low, stop - low)
            place = stop

    def chunks(self, buffer_elements: int) -> Iterator[Chunk]:
        """Ranges of the shards such that one range from every rank fits a buffer of `buffer_elements`.

        >>> [tuple(chunk.widths) for chunk in FlatLayout.even([320], world=2, itemsize=4).chunks(buffer_elements=128)]
        [(64, 64), (64, 64), (32, 32)]
        """
        width = max(1, buffer_elements // self.world)
        if self.is_even:
            shard = self.shard_size(0)
            for start in range(0, shard, width):
                yield Chunk(start, Repeated(min(shard - start, width), self.world))
            return
        sizes = [high - low for low, high in pairwise(self.bounds)]
        for start in range(0, max(sizes), width):
            yield Chunk(start, tuple(min(max(size - start, 0), width) for size in sizes))


@dataclass(frozen=True)
class Chunk:
    """The same range of every rank's shard, as far as each shard reaches."""

    start: int
    widths: Sequence[int]  # by rank

    @property
    def is_even(self) -> bool:
        return isinstance(self.widths, Repeated) or len(set(self.widths)) == 1

    @property
    def size(self) -> int:
        """Of all ranks' ranges together."""
        return self.widths.total if isinstance(self.widths, Repeated) else sum(self.widths)

    def part(self, piece: Piece, rank: int) -> Piece:
        """What of rank's piece lies in this chunk."""
        return piece.within(self.start, self.start + self.widths[rank])


@dataclass(frozen=True)
class Block:
    """A range of a flattened parameter in the table of equal shards, one shard a row: `rows` equal parts of rows."""

    row: int
    rows: int
    column: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        return (self.stop - self.start) // self.rows


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
