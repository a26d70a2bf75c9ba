"""Whole tensors of a live model that several ranks hold between them, along a tensor or a pipeline axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.checkpoint.boxes import read_box
from zerofold.checkpoint.contents import CheckpointError, Stored
from zerofold.checkpoint.ondisk import check_range, overlap
from zerofold.comm import Comm
from zerofold.layout import boxes
from zerofold.part import Part, PartBox


class Told(NamedTuple):
    """What one rank says of a tensor that it has some of."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    boxes: tuple[PartBox, ...]
    is_cut: bool


class Holder(NamedTuple):
    """A rank of the model's group, and what it has."""

    rank: int
    boxes: tuple[PartBox, ...]


@dataclass(frozen=True)
class LiveParts:
    """A tensor that ranks have parts of. They read what they have, and send it to the others through the host."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[Holder, ...]
    own: Stored | None
    model: Comm
    device: torch.device

    def read(self, start: int, stop: int) -> Tensor:
        """All ranks must call it, with the same range."""
        check_range(self, start, stop)
        result = torch.empty(stop - start, dtype=self.dtype)
        for block in boxes(self.shape, start, stop):
            place = block.start - start
            target = result[place : place + math.prod(block.sizes)].view(block.sizes)
            for holder in self.holders:
                for box in holder.boxes:
                    common = overlap(block.offsets, block.sizes, box.offsets, box.sizes)
                    if common is None:
                        continue
                    there = tuple(map(_moved, common.lows, box.offsets, box.local))
                    sent = self._send(holder.rank, there, common.sizes)
                    both = zip(common.lows, block.offsets, common.sizes, strict=True)
                    target[tuple(slice(low - o, low - o + size) for low, o, size in both)] = sent
        return result.to(self.device)

    def _send(self, source: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        if source == self.model.rank:
            assert self.own is not None, f"this rank has said that it has some of '{self.name}'"
            values = read_box(self.own, offsets, sizes)
        else:
            values = torch.empty(sizes, dtype=self.dtype)
        self.model.broadcast(values.reshape(-1).view(torch.uint8), source, unit=self.name).wait()
        return values


def join_parts(
    own: Mapping[str, Stored], parts: Mapping[str, Part], model: Comm, device: torch.device
) -> dict[str, Stored]:
    """Every tensor of the model, whole, from what each rank has; all ranks of the model's group must call it.

    `own` are this rank's tensors by their names in the whole, `parts` what it has of those that it shares with others.
    """
    everyone = model.all_gather_objects({name: _told(own[name], parts.get(name)) for name in own}, unit="names")
    found: dict[str, list[tuple[int, Told]]] = {}
    for rank, told in enumerate(everyone):
        for name, each in told.items():
            found.setdefault(name, []).append((rank, each))
    joined: dict[str, Stored] = {}
    for name, holders in found.items():
        (_, first), *others = holders
        odd = [(rank, each) for rank, each in others if each[:2] != first[:2]]
        if odd:
            rank, each = odd[0]
            raise CheckpointError(
                f"'{name}' is {first.dtype} of shape {first.shape} on one rank, and {each.dtype} of shape {each.shape} "
                f"on rank {rank} of those that hold the model: the ranks do not train the same model"
            )
        if not first.is_cut:  # of those who have all of it, the first is asked
            holders = holders[:1]
        # Of those who have the same part, too: norms may count it on one of them, and here that makes no difference.
        once = {each.boxes: Holder(rank, each.boxes) for rank, each in reversed(holders)}
        sources = tuple(sorted(once.values()))
        covered = sum(math.prod(box.sizes) for holder in sources for box in holder.boxes)
        if covered != math.prod(first.shape):
            raise CheckpointError(
                f"the ranks hold {covered} elements of '{name}', which has {math.prod(first.shape)}: the parts that "
                "they say they have (zerofold.part) do not make the whole"
            )
        joined[name] = LiveParts(name, first.shape, first.dtype, sources, own.get(name), model, device)
    return joined


def _told(stored: Stored, part: Part | None) -> Told:
    if part is not None:
        return Told(tuple(part.shape), stored.dtype, part.boxes(), part.is_cut)
    shape = tuple(stored.shape)
    nowhere = (0,) * len(shape)
    return Told(shape, stored.dtype, (PartBox(nowhere, shape, nowhere),), False)


def _moved(place: int, origin: int, to: int) -> int:
    return place - origin + to
