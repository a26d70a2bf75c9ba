"""One chunk on the host's cores: the one-pass update, and the new parameters on their way up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim import adam_cpu
from zerofold.optim.away.chunks import Chunk, Piece

BLOCK = (
    2**17
)  # elements of a thread: what it casts stays in its own cache, while copies over the bus pass the shared one


class HostUpdate:
    """Runs in the thread of a worker. New parameters go up on the stream for all that does."""

    def __init__(self, device: torch.device, up: Any) -> None:
        self._device, self._up = device, up
        self._rooms = threading.local()  # of each worker

    def run(self, chunk: Chunk, states: Sequence[Tensor]) -> Done:
        """`states` are the chunk's master and moments in host memory, and updated when this returns; the copy has then
        set out for where forward needs it."""
        if self._up is not None:
            torch.cuda.set_device(self._device)
        chunk.arrived.finish()
        gradients = [piece.gradient.cpu() for piece in chunk.pieces]  # the same memory where it is on the host
        copies = [self._room_for_copy(chunk, piece, g) for piece, g in zip(chunk.pieces, gradients, strict=True)]
        made = copies if chunk.kernel_makes_copy else [None] * len(copies)
        with torch.no_grad():
            for settings, tensors in chunk.tensors(states, gradients, made):
                scale, clip_value = chunk.scaling.tensor("cpu"), chunk.scaling.clip_value
                adam_cpu.update(tensors, settings, scale, clip_value, block=BLOCK, room=self._room())
        if chunk.copy is None:
            return Done()
        if not chunk.kernel_makes_copy:
            copies = list(chunk.masters(states[0]))
        return self._send(chunk, copies)

    def _room(self) -> adam_cpu.Room:
        if not hasattr(self._rooms, "room"):
            self._rooms.room = adam_cpu.Room(BLOCK * torch.get_num_threads())
        room: adam_cpu.Room = self._rooms.room
        return room

    def _room_for_copy(self, chunk: Chunk, piece: Piece, gradient: Tensor) -> Tensor | None:
        """The copy itself where it is in host memory, else the place of the gradient: it has been read by then."""
        copy = chunk.copy_of(piece)
        if copy is None or copy.device.type == "cpu":
            return copy
        return gradient.view(torch.uint8)[: copy.nbytes].view(copy.dtype)

    def _send(self, chunk: Chunk, copies: Sequence[Tensor | None]) -> Done:
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            for target, made in zip(chunk.copies(), copies, strict=True):
                if target is not None and made is not None and target.data_ptr() != made.data_ptr():
                    target.copy_(made, non_blocking=True)
            return Done() if self._up is None else Done(self._up.record_event())
