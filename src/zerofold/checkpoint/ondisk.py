"""Tensors that stay on disk: a stretch of a file, pieces joined end to end, boxes of a grid.

Every number here may come from a damaged or hostile file, so it is checked against what is really there before
anything is allocated for it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.checkpoint.contents import CheckpointError, Stored, numel
from zerofold.layout import boxes

# A record up to this size is always read whole, so that its checksum can be checked. A range of a longer one is read
# without: checking it would make every rank read every byte.
CHECKED_BYTES = 1 << 18
LONGEST_READ = 1 << 30  # Linux reads at most 2 GiB in one call


@dataclass(frozen=True)
class Region:
    """Bytes of a file. What is asked for must lie inside it, and inside the file."""

    path: Path
    offset: int
    length: int

    @classmethod
    def whole(cls, path: Path) -> Region:
        try:
            return cls(path, 0, path.stat().st_size)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def part(self, start: int, length: int) -> Region:
        if not 0 <= start <= start + length <= self.length:
            raise CheckpointError(
                f"{self.path} is damaged: it speaks of bytes {start} to {start + length} of {self.length}; "
                "use another copy of the checkpoint"
            )
        return Region(self.path, self.offset + start, length)

    def read(self, start: int, length: int) -> Tensor:
        """A 1-D uint8 tensor."""
        wanted = self.part(start, length)
        try:
            with self.path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if wanted.offset + length > size:
                    raise CheckpointError(
                        f"{self.path} is cut short: {wanted.offset + length} bytes are needed and it has {size}; "
                        "use another copy of the checkpoint"
                    )
                result = torch.empty(length, dtype=torch.uint8)
                view = result.numpy().data
                file.seek(wanted.offset)
                done = 0
                while done < length:
                    count = file.readinto(view[done : done + LONGEST_READ])
                    if not count:
                        raise CheckpointError(f"{self.path} became shorter while it was read: is it still written to?")
                    done += count
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
        return result

    def bytes(self) -> bytes:
        return bytes(self.read(0, self.length).numpy())


@dataclass(frozen=True)
class Record:
    """A storage inside a file, with the checksum that was written beside it (0 where none was)."""

    region: Region
    checksum: int = 0

    def read(self, start: int, length: int) -> Tensor:
        whole = self.region.length
        if self.checksum and (length == whole or whole <= CHECKED_BYTES):
            data = self.region.read(0, whole)
            if zlib.crc32(data.numpy().data) != self.checksum:
                raise CheckpointError(
                    f"{self.region.path} is damaged: the checksum of bytes {self.region.offset} to "
                    f"{self.region.offset + whole} does not fit; use another copy of the checkpoint"
                )
            # A copy, so that a short range does not keep the whole record alive.
            return data if length == whole else data[start : start + length].clone()
        return self.region.read(start, length)


@dataclass(frozen=True)
class TensorOnDisk:
    """A tensor as torch describes it: a storage, where in it the tensor begins, and how it strides."""

    record: Record
    dtype: torch.dtype
    begin: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        room = self.record.region.length // self.dtype.itemsize
        numbers = (self.begin, *self.shape, *self.stride)
        fits = len(self.shape) == len(self.stride) <= 64 and all(0 <= number < 2**62 for number in numbers)
        count = math.prod(self.shape) if fits else 0
        if not fits or count > room or (count and self.begin + self._span() > room):
            raise CheckpointError(
                f"{self.record.region.path} is damaged: a tensor of shape {list(self.shape)[:64]} does not fit into "
                f"its storage of {room} elements; use another copy of the checkpoint"
            )

    def _span(self) -> int:
        """Elements of the storage from the first to the last that the tensor uses."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @cached_property
    def _is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def read(self, start: int, stop: int) -> Tensor:
        check_range(self, start, stop)
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        size = self.dtype.itemsize
        if self._is_contiguous:
            return self.record.read((self.begin + start) * size, (stop - start) * size).view(self.dtype)
        # A transposed tensor, say. Rare: the stretch that holds all of it is read.
        data = self.record.read(self.begin * size, self._span() * size).view(self.dtype)
        return data.as_strided(self.shape, self.stride).reshape(-1)[start:stop]


@dataclass(frozen=True)
class Piece:
    """Elements start to stop of a flattened tensor on disk."""

    source: Stored
    start: int
    stop: int


class Joined:
    """A tensor whose flat elements are pieces of others, one after another.

    rank 0 [ a a a a b b ] rank 1 [ b c c c . . ]      b = rank 0 [4, 6) + rank 1 [0, 1); the dots are padding
    """

    def __init__(self, pieces: Sequence[Piece], shape: Sequence[int], *, where: str) -> None:
        self.shape = tuple(shape)
        self._pieces = [piece for piece in pieces if piece.stop > piece.start]
        self._ends = list(itertools.accumulate(piece.stop - piece.start for piece in self._pieces))
        self.dtype = pieces[0].source.dtype if pieces else torch.float32
        if any(size < 0 for size in self.shape) or (self._ends or [0])[-1] < numel(self):
            raise CheckpointError(
                f"{where} holds {(self._ends or [0])[-1]} elements for a tensor of shape {list(self.shape)}: "
                "a file is damaged or missing"
            )
        if any(piece.source.dtype != self.dtype for piece in pieces):
            raise CheckpointError(f"{where} holds pieces of one tensor in several dtypes: a file is damaged")

    def read(self, start: int, stop: int) -> Tensor:
        check_range(self, start, stop)
        found = []
        for number in range(bisect.bisect_right(self._ends, start), len(self._pieces)):
            piece = self._pieces[number]
            begin = self._ends[number] - (piece.stop - piece.start)
            if begin >= stop:
                break
            first, last = max(start, begin), min(stop, self._ends[number])
            found.append(piece.source.read(piece.start + first - begin, piece.start + last - begin))
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype)


def joined(sources: Sequence[Stored], shape: Sequence[int], *, where: str) -> Joined:
    """Whole tensors one after another; what is left over at the end is padding."""
    return Joined([Piece(source, 0, numel(source)) for source in sources], shape, where=where)


def concatenated(sources: Sequence[Stored], *, where: str) -> Joined:
    return joined(sources, [sum(numel(source) for source in sources)], where=where)


@dataclass(frozen=True)
class Box:
    """A box of the grid of a tensor, and how to get at the tensor that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    open: Callable[[], Stored]


@dataclass(frozen=True)
class Boxed:
    """A tensor cut into boxes along any of its dimensions."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    where: str

    def read(self, start: int, stop: int) -> Tensor:
        check_range(self, start, stop)
        plan = [
            (block, box, common)
            for block in boxes(self.shape, start, stop)
            for box in self.boxes
            if (common := overlap(block.offsets, block.sizes, box.offsets, box.sizes)) is not None
        ]
        # Counted before anything is allocated: a false shape must not ask for memory.
        found = sum(math.prod(common.sizes) for *_, common in plan)
        if found != stop - start:
            raise CheckpointError(
                f"{self.where} has {found} of the {stop - start} elements from {start} to {stop}: "
                "its pieces do not cover the tensor; a file is damaged or missing"
            )
        result = torch.empty(stop - start, dtype=self.dtype)
        for block, box, common in plan:
            place = block.start - start
            target = result[place : place + math.prod(block.sizes)].view(block.sizes)
            both = zip(common.lows, block.offsets, common.sizes, strict=True)
            target[tuple(slice(low - o, low - o + s) for low, o, s in both)] = self._part(box, common)
        return result

    def _part(self, box: Box, wanted: Overlap) -> Tensor:
        source = box.open()
        if source.shape != box.sizes or source.dtype != self.dtype:
            raise CheckpointError(
                f"{self.where} should hold a piece of shape {list(box.sizes)} and {self.dtype}, and holds "
                f"{list(source.shape)} and {source.dtype}: a file is damaged"
            )
        strides = [math.prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]
        first = sum((low - o) * s for low, o, s in zip(wanted.lows, box.offsets, strides, strict=True))
        last = first + sum((size - 1) * s for size, s in zip(wanted.sizes, strides, strict=True))
        return source.read(first, last + 1).as_strided(wanted.sizes, strides)


class Overlap(NamedTuple):
    """Where two boxes meet: the lowest corner and the sizes."""

    lows: tuple[int, ...]
    sizes: tuple[int, ...]


def overlap(
    offsets: tuple[int, ...], sizes: tuple[int, ...], others: tuple[int, ...], other_sizes: tuple[int, ...]
) -> Overlap | None:
    """What two boxes of a grid have in common; None where that is nothing.

    >>> overlap((0, 2), (4, 4), (2, 0), (9, 3))
    Overlap(lows=(2, 2), sizes=(2, 1))
    """
    lows = tuple(map(max, offsets, others))
    highs = (min(o + s, p + t) for o, s, p, t in zip(offsets, sizes, others, other_sizes, strict=True))
    found = tuple(high - low for low, high in zip(lows, highs, strict=True))
    return Overlap(lows, found) if all(size > 0 for size in found) else None


def check_range(stored: Stored, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= numel(stored):
        raise ValueError(f"elements {start} to {stop} of a tensor of {numel(stored)}")
