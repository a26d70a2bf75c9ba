"""What this rank's copy of a parameter is of the whole, where tensor or pipeline parallelism spreads a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_ATTRIBUTE, _GROUP = "_zerofold_part", "_zerofold_part_group"


class PartBox(NamedTuple):
    """A box of the whole parameter, and where it lies in what this rank has."""

    offsets: tuple[int, ...]  # in the whole
    sizes: tuple[int, ...]
    local: tuple[int, ...]  # offsets in this rank's tensor


@dataclass(frozen=True)
class Part:
    """A range along one dimension of the whole parameter, or all of it.

    ZeRO cuts what a rank has, and never asks what it is a part of. Norms ask, since a parameter that several ranks
    hold alike counts once, and checkpoints, which store whole parameters.

    Where several matrices are stored as one (query, key and value), the dimension has `blocks` of equal length, and
    the rank has the same range of each:

        whole   [ q0 q1 | k0 k1 | v0 v1 ]      blocks=3
        rank 1  [ q1 k1 v1 ]                   start and stop are those of q1 in the first block

    >>> Part(torch.Size([8, 4]), dim=0, start=4, stop=8, counts=True).local_shape
    torch.Size([4, 4])
    >>> fused = Part(torch.Size([12, 4]), dim=0, start=2, stop=4, counts=True, blocks=3)
    >>> fused.ranges, fused.local_shape
    (((2, 4), (6, 8), (10, 12)), torch.Size([6, 4]))
    """

    shape: torch.Size  # of the whole
    dim: int | None  # along which it is cut; None where this rank has all of it
    start: int
    stop: int
    counts: bool  # in norms and checkpoints: one of the ranks that hold the same values does
    blocks: int = 1  # of equal length along the dimension, each cut alike
    name: str | None = None  # under which the rank that counts it has it, where that is another name than here

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Starts and stops along the dimension of the whole, in the order in which the rank has them."""
        length = 0 if self.dim is None else self.shape[self.dim] // self.blocks
        return tuple((self.start + block * length, self.stop + block * length) for block in range(self.blocks))

    @property
    def local_shape(self) -> torch.Size:
        if self.dim is None:
            return self.shape
        length = self.blocks * (self.stop - self.start)
        return torch.Size((*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]))

    @property
    def is_cut(self) -> bool:
        return self.dim is not None

    @property
    def leads(self) -> bool:
        """Whether this rank's word counts for what belongs to the parameter and is cut by nobody, such as a step."""
        return self.counts and (self.dim is None or self.start == 0)

    def boxes(self) -> tuple[PartBox, ...]:
        """What this rank has, as boxes of the whole. Checkpoints and exports ask for nothing else.

        >>> Part(torch.Size([8, 4]), dim=0, start=4, stop=8, counts=True).boxes()
        (PartBox(offsets=(4, 0), sizes=(4, 4), local=(0, 0)),)
        """
        if self.dim is None:
            nowhere = (0,) * len(self.shape)
            return (PartBox(nowhere, tuple(self.shape), nowhere),)
        size = self.stop - self.start
        sizes = self._along(size, self.shape)
        starts = (self._along(start, (0,) * len(self.shape)) for start, _ in self.ranges)
        places = (self._along(size * block, (0,) * len(self.shape)) for block in range(self.blocks))
        return tuple(PartBox(start, sizes, place) for start, place in zip(starts, places, strict=True))

    def _along(self, number: int, others: Sequence[int]) -> tuple[int, ...]:
        return tuple(number if dim == self.dim else other for dim, other in enumerate(others))

    def of(self, whole: Tensor) -> Tensor:
        """The rank's part of a tensor that has the shape of the whole, in memory of its own.

        >>> Part(torch.Size([4]), dim=0, start=1, stop=2, counts=True, blocks=2).of(torch.arange(4))
        tensor([1, 3])
        """
        if self.dim is None:
            return whole
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)


class _Peers:
    """Who has the other parts. It pickles as nobody."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Peers, ()


def set_part(parameter: Tensor, part: Part, group: dist.ProcessGroup | None = None) -> None:
    """`group`: the ranks that have the other parts, in their order, on the parameter's device."""
    setattr(parameter, _ATTRIBUTE, part)
    if group is not None:
        setattr(parameter, _GROUP, _Peers(group))


def part_of(parameter: Tensor) -> Part | None:
    """None for a parameter that no axis of model parallelism touches: it is whole, and counts."""
    found = vars(parameter).get(_ATTRIBUTE)
    return found if isinstance(found, Part) else None


def group_of(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that have the other parts of this parameter; None where it is whole, or they were not told."""
    part, found = part_of(parameter), vars(parameter).get(_GROUP)
    return found.group if part is not None and part.dim is not None and isinstance(found, _Peers) else None
