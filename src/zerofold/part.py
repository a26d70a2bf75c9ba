"""What this rank's copy of a parameter is of the whole, where tensor or pipeline parallelism spreads a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ATTRIBUTE = "_zerofold_part"


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

    >>> Part(torch.Size([8, 4]), dim=0, start=4, stop=8, counts=True).local_shape
    torch.Size([4, 4])
    """

    shape: torch.Size  # of the whole
    dim: int | None  # along which it is cut; None where this rank has all of it
    start: int
    stop: int
    counts: bool  # in norms and checkpoints: one of the ranks that hold the same values does
    name: str | None = None  # under which the rank that counts it has it, where that is another name than here

    @property
    def local_shape(self) -> torch.Size:
        if self.dim is None:
            return self.shape
        return torch.Size((*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :]))

    @property
    def is_cut(self) -> bool:
        return self.dim is not None

    @property
    def leads(self) -> bool:
        """Whether this rank's word counts for what belongs to the parameter and is cut by nobody, such as a step."""
        return self.counts and not any(self.boxes()[0].offsets)

    def boxes(self) -> tuple[PartBox, ...]:
        """What this rank has, as boxes of the whole. Checkpoints and exports ask for nothing else.

        >>> Part(torch.Size([8, 4]), dim=0, start=4, stop=8, counts=True).boxes()
        (PartBox(offsets=(4, 0), sizes=(4, 4), local=(0, 0)),)
        """
        nowhere = (0,) * len(self.shape)
        offsets = tuple(self.start if dim == self.dim else 0 for dim in range(len(self.shape)))
        return (PartBox(offsets, tuple(self.local_shape), nowhere),)

    def of(self, whole: Tensor) -> Tensor:
        """What this rank has of a whole tensor, a copy.

        >>> Part(torch.Size([4]), dim=0, start=1, stop=3, counts=True).of(torch.arange(4))
        tensor([1, 2])
        """
        local = torch.empty(self.local_shape, dtype=whole.dtype, device=whole.device)
        for box in self.boxes():
            there, here = (tuple(map(_range, corner, box.sizes)) for corner in (box.offsets, box.local))
            local[here] = whole.detach()[there]
        return local


def _range(start: int, size: int) -> slice:
    return slice(start, start + size)


def set_part(parameter: Tensor, part: Part) -> None:
    setattr(parameter, _ATTRIBUTE, part)


def part_of(parameter: Tensor) -> Part | None:
    """None for a parameter that no axis of model parallelism touches: it is whole, and counts."""
    found = vars(parameter).get(_ATTRIBUTE)
    return found if isinstance(found, Part) else None
