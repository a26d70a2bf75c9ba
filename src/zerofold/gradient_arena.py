"""Gradients that live from one backward to the step, in one block of the device's memory (M_d of ZeRO-R).

without    |act|g0| act |g1|act|          made in the first backward, each where there was room between activations
with       |g0|g1|g2|   act | act         there before the first activation, and never moved
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofold.plan.held import ARENA_ALIGNMENT
from zerofold.slab import Slab


def reserve_gradients(slabs: Sequence[Slab], device: torch.device) -> int:
    """Gives the gradients of every slab their place in one block; returns its bytes."""
    rooms = [(slab, room) for slab in slabs if (room := slab.gradient_room) is not None]
    starts, end = [], 0
    for _, room in rooms:
        starts.append(end)
        end += -(-room.elements * room.dtype.itemsize // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
    block = torch.zeros(end, dtype=torch.uint8, device=device)
    for (slab, room), start in zip(rooms, starts, strict=True):
        slab.gradients.lie_in(block[start : start + room.elements * room.dtype.itemsize].view(room.dtype))
    return end
