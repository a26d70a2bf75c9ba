"""What this rank's copy of a parameter is of the whole, where tensor or pipeline parallelism spreads a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ATTRIBUTE = "_zerofold_part"


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

    @property
    def local_shape(self) -> torch.Size:
        if self.dim is None:
            return self.shape
        return torch.Size((*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :]))


def set_part(parameter: Tensor, part: Part) -> None:
    setattr(parameter, _ATTRIBUTE, part)


def part_of(parameter: Tensor) -> Part | None:
    """None for a parameter that no axis of model parallelism touches: it is whole, and counts."""
    found = vars(parameter).get(_ATTRIBUTE)
    return found if isinstance(found, Part) else None
