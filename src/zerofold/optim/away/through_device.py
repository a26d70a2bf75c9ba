"""Chunks that stream through the device: states come up, are updated there, and go down again.

up       [c0][c1][c2][c3]          master and moments (12 bytes a parameter), and the gradient if it is on the host
kernel       [k0][k1][k2]
down             [c0][c1]          the bus carries both directions at once

The bus and the host's cores share the host's memory, yet together they update half as fast again as either alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim.away.chunks import CHUNK, Chunk, Ends
from zerofold.optim.onepass import COPY_DTYPES, adam

SLOTS = 4  # chunks on their way at once


class _Slot:
    """Device memory for one chunk."""

    def __init__(self, device: torch.device, gradient: torch.dtype, copy: torch.dtype) -> None:
        self.states = tuple(torch.empty(CHUNK, device=device) for _ in range(3))
        self.gradient = torch.empty(CHUNK, dtype=gradient, device=device)
        self.copy = torch.empty(CHUNK, dtype=copy, device=device)
        self.free: Any = None  # the event after which it may be filled again

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.states, self.gradient, self.copy))


class DeviceUpdate:
    """Runs in the thread of a worker, which sets the copies and kernels going and never waits for them."""

    def __init__(self, device: torch.device, gradient: torch.dtype, copy: torch.dtype) -> None:
        self._device = device
        self._up, self._kernel, self._down = (torch.cuda.Stream(device) for _ in range(3))
        self._slots = [_Slot(device, gradient, copy) for _ in range(SLOTS)]
        self._next = 0
        self._times = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    @staticmethod
    def can_take(chunk: Chunk) -> bool:
        """fp32 states in host memory; what forward computes with on the device, or there too."""
        pinned = all(state.device.type == "cpu" and state.dtype is torch.float32 for state in chunk.states)
        return pinned and (chunk.copy is None or chunk.copy.dtype in (*COPY_DTYPES, torch.float32))

    def begin(self) -> None:
        """What the step before has sent down may come up again now."""
        torch.cuda.set_device(self._device)
        self._up.wait_stream(self._down)
        self._up.wait_stream(torch.cuda.default_stream(self._device))
        self._times[0].record(self._up)

    def end(self) -> None:
        self._times[1].record(self._down)

    def seconds(self) -> float:
        """Between the two, on the device, when both are over."""
        self._times[1].synchronize()
        return self._times[0].elapsed_time(self._times[1]) / 1000

    def run(self, chunk: Chunk) -> Ends:
        torch.cuda.set_device(self._device)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        states = [held[: chunk.size] for held in slot.states]
        with torch.cuda.stream(self._up):
            chunk.arrived.wait()
            if slot.free is not None:
                self._up.wait_event(slot.free)
            for here, there in zip(states, chunk.states, strict=True):
                here.copy_(there, non_blocking=True)
            gradients = [self._brought(chunk, piece.start, piece.gradient, slot) for piece in chunk.pieces]
            arrived = self._up.record_event()
        with torch.cuda.stream(self._kernel):
            self._kernel.wait_event(arrived)
            copies = self._rooms_for_copies(chunk, slot)
            made = copies if chunk.kernel_makes_copy else [None] * len(copies)
            scale = chunk.scaling.tensor(self._device)
            for settings, tensors in chunk.tensors(states, gradients, made):
                adam(tensors, settings, scale=scale, clip_value=chunk.scaling.clip_value)
            if chunk.copy is not None and not chunk.kernel_makes_copy:
                for master, target in zip(chunk.masters(states[0]), copies, strict=True):
                    assert target is not None
                    target.copy_(master)
            updated = self._kernel.record_event()
        with torch.cuda.stream(self._down):
            self._down.wait_event(updated)
            for here, there in zip(states, chunk.states, strict=True):
                there.copy_(here, non_blocking=True)
            for target, source in zip(chunk.copies(), copies, strict=True):
                if target is not None and source is not None and target.device.type == "cpu":
                    target.copy_(source, non_blocking=True)
            slot.free = self._down.record_event()
        is_here = chunk.copy is not None and chunk.copy.device.type != "cpu"
        return Ends(Done(updated if is_here else slot.free), Done(slot.free))

    def _brought(self, chunk: Chunk, start: int, gradient: Tensor, slot: _Slot) -> Tensor:
        if gradient.device.type != "cpu":
            gradient.record_stream(self._kernel)  # its owner may let go of it before the kernel has read it
            return gradient
        first = start - chunk.start
        return slot.gradient[first : first + gradient.numel()].copy_(gradient, non_blocking=True)

    def _rooms_for_copies(self, chunk: Chunk, slot: _Slot) -> list[Tensor | None]:
        """Where forward needs them, if that is the device; else in the slot, from where they go down."""
        rooms: list[Tensor | None] = []
        for piece in chunk.pieces:
            target = chunk.copy_of(piece)
            if target is not None and target.device.type == "cpu":
                target = slot.copy[piece.start - chunk.start : piece.stop - chunk.start]
            rooms.append(target)
        return rooms
