"""Gradients that live from one backward to the step, in one block of the device's memory (M_d of ZeRO-R).

without    |act|g0| act |g1|act|          made in the first backward, each where there was room between activations
with       |g0|g1|g2|   act | act         there before the first activation, and never moved

Where several backwards make a step and gradients are whole, each rank adds up its own until the last of them: then
|g0|s0|g1|s1|…, the sums beside what they are reduced into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.gradients_on_faces import FaceGradients
from zerofold.gradients_whole import WholeGradients
from zerofold.placement import Tier
from zerofold.plan.held import ARENA_ALIGNMENT
from zerofold.slab import Slab


class _Wish(NamedTuple):
    """Memory that the gradients of a slab want in the block."""

    elements: int
    dtype: torch.dtype
    give: Callable[[Tensor], None]

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


def reserve_gradients(slabs: Sequence[Slab], device: torch.device, *, sums_of: int = 0) -> int:
    """Gives the gradients of every slab their place in one block; returns its bytes. `sums_of`: backwards whose local
    sums wait for one reduction, 0 where none do.
    """
    wishes = [wish for slab in slabs for wish in _wishes(slab, sums_of)]
    starts, end = [], 0
    for wish in wishes:
        starts.append(end)
        end += -(-wish.nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
    block = torch.zeros(end, dtype=torch.uint8, device=device)
    for wish, start in zip(wishes, starts, strict=True):
        wish.give(block[start : start + wish.nbytes].view(wish.dtype))
    return end


def filled_by(slabs: Sequence[Slab], *, sums_of: int = 0) -> int:
    """Bytes of the block that they fill; the rest rounds up each of them."""
    return sum(wish.nbytes for slab in slabs for wish in _wishes(slab, sums_of))


def _wishes(slab: Slab, sums_of: int) -> list[_Wish]:
    """None for a slab whose gradients are not trained, or wait for the step in another memory."""
    gradients = slab.gradients
    if not slab.requires_grad or slab.tiers.gradients is not Tier.DEVICE:
        return []
    if isinstance(gradients, WholeGradients):
        return [_Wish(slab.layout.size, slab.parameters[0].dtype, gradients.lie_in)]
    found = [_Wish(slab.layout.shard_size(slab.place), slab.gradient_dtype, gradients.lie_in)]
    if sums_of and isinstance(gradients, FaceGradients):
        # Of two backwards nothing is added up before the second is reduced: the first waits as it was made.
        dtype = slab.dtypes.compute if sums_of == 2 else slab.dtypes.accumulation
        found.append(_Wish(sum(slab.layout.numels), dtype, gradients.sum_in))
    return found
