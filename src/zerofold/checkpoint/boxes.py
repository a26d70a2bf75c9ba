"""Boxes of stored tensors: what a rank of a tensor axis has of a parameter, and a whole that such ranks have written.

whole (4, 6)         saved by two ranks, cut along dim 1        loaded by two ranks, cut along dim 0

a a a b b b          a a a   b b b                              c c c c c c
a a a b b b          a a a   b b b                              c c c c c c
a a a b b b          a a a   b b b
a a a b b b          a a a   b b b                              d d d d d d
                                                                d d d d d d

Each side is read in flat ranges of its own. A range is blocks of whole rows, and each block meets some boxes of the
other side; where both are cut alike, it meets one, and the range is read as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zerofold.checkpoint.contents import CheckpointError, Stored
from zerofold.checkpoint.ondisk import check_range, overlap
from zerofold.layout import boxes
from zerofold.part import Part, PartBox, part_of

_PAGE_BYTES = 4096  # a disk gives no less, so what lies closer together is read in one go
_AT_ONCE = 2**22  # elements of such a stretch

Index = tuple[int, ...]


class Found(NamedTuple):
    """A box of what was asked for, and the tensor that has it, which can be read in flat ranges."""

    at: Index  # in what was asked for
    sizes: Index
    stored: Stored
    offsets: Index  # in `stored`


class InBoxes(Stored, Protocol):
    """A tensor whose boxes are in others."""

    def find(self, offsets: Index, sizes: Index) -> Iterator[Found]: ...


@dataclass(frozen=True)
class SavedPart:
    """What one rank has written of a tensor."""

    boxes: tuple[PartBox, ...]
    stored: Stored  # in that rank's shape


@dataclass(frozen=True)
class Spread:
    """A whole tensor that several ranks have written, each a part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[SavedPart, ...]

    def read(self, start: int, stop: int) -> Tensor:
        return _read(self, start, stop)

    def find(self, offsets: Index, sizes: Index) -> Iterator[Found]:
        for part in self.parts:
            for box in part.boxes:
                common = overlap(offsets, sizes, box.offsets, box.sizes)
                if common is not None:
                    there = _moved(common.lows, box.offsets, box.local)
                    yield Found(common.lows, common.sizes, part.stored, there)


@dataclass(frozen=True)
class CutOut:
    """What this rank has of a whole tensor."""

    whole: Stored
    part: Part

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.part.local_shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return _read(self, start, stop)

    def find(self, offsets: Index, sizes: Index) -> Iterator[Found]:
        for box in self.part.boxes():
            common = overlap(offsets, sizes, box.local, box.sizes)
            if common is None:
                continue
            there = _moved(common.lows, box.local, box.offsets)
            if not isinstance(self.whole, Spread):
                yield Found(common.lows, common.sizes, self.whole, there)
                continue
            for found in self.whole.find(there, common.sizes):
                yield found._replace(at=_moved(found.at, there, common.lows))


def _moved(place: Index, origin: Index, to: Index) -> Index:
    """The same place, counted from another origin."""
    return tuple(p - o + t for p, o, t in zip(place, origin, to, strict=True))


class Run(NamedTuple):
    """A flat range of what a rank has, and where it begins in the whole."""

    start: int
    stop: int
    place: int


def runs_in_whole(part: Part, start: int, stop: int) -> Iterator[Run]:
    """A flat range of what a rank has, as stretches that follow each other in the whole as well.

    >>> part = Part(torch.Size([4, 6]), dim=1, start=3, stop=6, counts=True)
    >>> [tuple(run) for run in runs_in_whole(part, 2, 8)]
    [(2, 3, 5), (3, 6, 9), (6, 8, 15)]
    """
    shape = tuple(part.local_shape)
    for block in boxes(shape, start, stop):
        for box in part.boxes():
            common = overlap(block.offsets, block.sizes, box.local, box.sizes)
            if common is None:
                continue
            there = _moved(common.lows, box.local, box.offsets)
            for stretch in stretches(part.shape, there, common.sizes, _PAGE_BYTES):  # no row is too short
                local = tuple(map(int.__add__, stretch.at, common.lows))
                low = sum(a * stride for a, stride in zip(local, _strides(shape), strict=True))
                yield Run(low, low + stretch.stop - stretch.start, stretch.start)


def own_part(stored: Stored, part: Part | None) -> Stored:
    """Of a whole tensor, what a rank with this part of it has."""
    return CutOut(stored, part) if part is not None and part.is_cut else stored


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Of the parameter of which this may be a part."""
    part = part_of(tensor)
    return tuple(tensor.shape if part is None else part.shape)


def flat_ranges(stored: Stored, start: int, stop: int) -> Iterator[tuple[Stored, int, int]]:
    """The ranges of tensors in files that reading this range of `stored` reads."""
    if not isinstance(stored, (Spread, CutOut)):
        yield stored, start, stop
        return
    for block in boxes(stored.shape, start, stop):
        for found in stored.find(block.offsets, block.sizes):
            for stretch in stretches(found.stored.shape, found.offsets, found.sizes, found.stored.dtype.itemsize):
                yield found.stored, stretch.start, stretch.stop


def _read(tensor: InBoxes, start: int, stop: int) -> Tensor:
    check_range(tensor, start, stop)
    plan = [(block, list(tensor.find(block.offsets, block.sizes))) for block in boxes(tensor.shape, start, stop)]
    there = sum(math.prod(found.sizes) for _, each in plan for found in each)
    if there != stop - start:
        raise CheckpointError(
            f"{there} of the {stop - start} elements from {start} to {stop} of a tensor of shape "
            f"{list(tensor.shape)} are there: its parts do not cover it; a file is damaged or missing"
        )
    result = torch.empty(stop - start, dtype=tensor.dtype)
    for block, each in plan:
        target = result[block.start - start : block.start - start + math.prod(block.sizes)].view(block.sizes)
        for found in each:
            inside = tuple(
                slice(a - o, a - o + s) for a, o, s in zip(found.at, block.offsets, found.sizes, strict=True)
            )
            target[inside] = read_box(found.stored, found.offsets, found.sizes)
    return result


def read_box(stored: Stored, offsets: Index, sizes: Index) -> Tensor:
    """A box of a tensor that can be read in flat ranges."""
    result, strides = torch.empty(sizes, dtype=stored.dtype), _strides(stored.shape)
    for stretch in stretches(stored.shape, offsets, sizes, stored.dtype.itemsize):
        inside = tuple(slice(a, a + s) for a, s in zip(stretch.at, stretch.sizes, strict=True))
        result[inside] = stored.read(stretch.start, stretch.stop).as_strided(stretch.sizes, strides)
    return result


class Stretch(NamedTuple):
    """A flat range of a tensor, and the part of a box that lies in it."""

    start: int
    stop: int
    at: Index  # in the box
    sizes: Index


def stretches(shape: Sequence[int], offsets: Index, sizes: Index, itemsize: int) -> Iterator[Stretch]:
    """What to read of a flattened tensor to get a box of it: its rows, or where these are short, all between them too.

    >>> [(s.start, s.stop) for s in stretches((4, 4096), (1, 1024), (2, 1024), itemsize=4)]
    [(5120, 6144), (9216, 10240)]
    >>> [(s.start, s.stop) for s in stretches((4, 6), (1, 0), (2, 3), itemsize=4)]
    [(6, 15)]
    """
    if 0 in sizes:
        return
    strides, dim = _strides(shape), len(shape)
    while dim and sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    # Elements that follow each other: all of the inner dimensions, and this box's range of the one before them.
    outer = max(dim - 1, 0)
    is_short = outer > 0 and sizes[outer] * strides[outer] * itemsize < _PAGE_BYTES
    rows = 1
    if is_short:
        outer -= 1
        rows = max(1, min(sizes[outer], _AT_ONCE // strides[outer]))
    ranges = [range(size) for size in sizes[:outer]]
    steps = [range(0, sizes[outer], rows)] if is_short else [range(1)] if sizes else []
    for index in itertools.product(*ranges, *steps):
        at = (*index, *(0 for _ in range(len(sizes) - len(index))))
        taken = tuple(1 for _ in range(outer)) + tuple(sizes[outer:])
        if is_short:
            taken = (*taken[:outer], min(rows, sizes[outer] - at[outer]), *taken[outer + 1 :])
        first = sum((o + a) * stride for o, a, stride in zip(offsets, at, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(taken, strides, strict=True))
        yield Stretch(first, last + 1, at, taken)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
