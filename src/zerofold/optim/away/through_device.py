"""Chunks that stream through the device: states come up, are updated there, and go down again.

up       [c0][c1][c2][c3]        [c0]   master and moments (12 bytes a parameter), and the gradient if it is on the host
kernel       [k0][k1][k2][k3]
down             [c0][c1][c2][c3]       the bus carries both directions at once

The bus and the host's cores share the host's memory, yet together they update half as fast again as either alone. Where
the device has room, the first chunks come up again at the end, and wait there for the next step.

In either direction the bus serves one stream until that has nothing more for it. So one chunk at a time is set going,
by a thread for each direction: a batch that goes up, a loss that comes down and parameters that forward needs get their
turn in between, and not after the whole update.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim.away.chunks import CHUNK, Chunk, Ends
from zerofold.optim.onepass import adam

SLOTS = 4  # chunks on their way at once


class _IsDown(Done):
    """States that another thread sends down, when it comes to it."""

    def __init__(self, going: Future[torch.cuda.Event]) -> None:
        super().__init__()
        self._going = going

    def wait(self) -> None:
        self._event = self._going.result()
        super().wait()

    def finish(self) -> None:
        self._event = self._going.result()
        super().finish()

    @property
    def is_under_way(self) -> bool:
        return self._going.done()

    @property
    def is_over(self) -> bool:
        if not self.is_under_way:
            return False
        self._event = self._going.result()
        return super().is_over


class _Slot:
    """Device memory for one chunk."""

    def __init__(self, device: torch.device) -> None:
        self.states = tuple(torch.empty(CHUNK, device=device) for _ in range(3))
        self._others: dict[tuple[str, torch.dtype], Tensor] = {}
        self.free = Done()  # after which it may be filled again

    def room(self, name: str, dtype: torch.dtype) -> Tensor:
        """For gradients that come up, or copies that go down; made when first needed."""
        if (name, dtype) not in self._others:
            self._others[name, dtype] = torch.empty(CHUNK, dtype=dtype, device=self.states[0].device)
        return self._others[name, dtype]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.states, *self._others.values()))


class DeviceUpdate:
    """Runs in the thread of a worker; what goes down has another, so that neither direction waits for the other."""

    def __init__(self, device: torch.device, up: Any, *, ahead: int) -> None:
        """`ahead`: chunks that wait on the device for the next step."""
        self._device, self._up, self._ahead = device, up, ahead
        self._kernel, self._copies, self._down = (torch.cuda.Stream(device) for _ in range(3))
        self._slots = deque(_Slot(device) for _ in range(SLOTS + ahead))  # free the longest first
        self._staged: dict[tuple[object, int, int], _Slot] = {}
        # Of this step, as many as can wait for the next, without their gradients; and when each is down.
        self._first: list[tuple[Chunk, Done]] = []
        self._arrived = torch.cuda.Event(blocking=True)  # the chunk before
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="zerofold states down")
        self._sent = torch.cuda.Event(blocking=True)  # the chunk before
        self._times = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._has_run = False  # since `begin`

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in (*self._slots, *self._staged.values()))

    def begin(self, changed: set[object]) -> None:
        """What the step before has sent down may come up again now. `changed`: slabs that somebody else has changed."""
        torch.cuda.set_device(self._device)
        self._first, self._has_run = [], False
        for key in [key for key in self._staged if key[0] in changed]:
            self._slots.appendleft(self._staged.pop(key))
        self._up.wait_stream(self._down)
        self._times[0].record(self._up)

    def end(self) -> None:
        """All chunks are on their way."""
        for left in self._staged.values():  # not part of this step
            self._slots.appendleft(left)
        self._staged = {}
        for chunk, is_down in self._first:
            slot = self._take_slot()
            is_down.finish()
            self._arrived.synchronize()
            with torch.cuda.stream(self._up):
                self._bring(chunk, slot)
                self._arrived = torch.cuda.Event(blocking=True)
                self._arrived.record(self._up)
            self._staged[_key(chunk)] = slot
        self._first = []

    def settle(self) -> None:
        """Returns when nothing on its way up reads the host's memory any more, which may then get another owner."""
        self._arrived.synchronize()

    def seconds(self) -> float:
        """From the beginning until forward could use all that was updated, when that is over; 0 without a chunk."""
        if not self._has_run:  # an event that was never recorded has no time
            return 0.0
        self._times[1].synchronize()
        return self._times[0].elapsed_time(self._times[1]) / 1000

    def close(self) -> None:
        self._sender.shutdown()

    def run(self, chunk: Chunk) -> Ends:
        torch.cuda.set_device(self._device)
        self._has_run = True
        slot = self._staged.pop(_key(chunk), None)
        is_here = slot is not None
        slot = slot or self._take_slot()
        states = [held[: chunk.size] for held in slot.states]
        self._arrived.synchronize()  # by the host: the stream has nothing more for the bus meanwhile
        with torch.cuda.stream(self._up):
            chunk.arrived.wait()
            if not is_here:
                self._bring(chunk, slot)
            gradients = [self._brought(chunk, piece.start, piece.gradient, slot) for piece in chunk.pieces]
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._up)
        self._arrived = arrived
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
            usable = self._kernel.record_event()
            self._times[1].record(self._kernel)
        if chunk.copy is not None and chunk.copy.device.type == "cpu":
            with torch.cuda.stream(self._copies):  # what forward waits for is not behind states that nobody needs
                self._copies.wait_event(usable)
                for target, source in zip(chunk.copies(), copies, strict=True):
                    if target is not None and source is not None:
                        target.copy_(source, non_blocking=True)
                usable = self._copies.record_event()
                self._times[1].record(self._copies)
        complete = slot.free = _IsDown(self._sender.submit(self._send_down, chunk, slot, usable))
        self._slots.append(slot)
        if len(self._first) < self._ahead:
            self._first.append((replace(chunk, pieces=()), complete))
        # Without a copy, forward computes with the master.
        return Ends(complete if chunk.copy is None else Done(usable), complete)

    def _send_down(self, chunk: Chunk, slot: _Slot, usable: torch.cuda.Event) -> torch.cuda.Event:
        torch.cuda.set_device(self._device)
        self._sent.synchronize()
        with torch.cuda.stream(self._down):
            self._down.wait_event(usable)
            for here, there in zip(slot.states, chunk.states, strict=True):
                there.copy_(here[: chunk.size], non_blocking=True)
            self._sent = torch.cuda.Event(blocking=True)
            self._sent.record(self._down)
            if chunk.copy is None:
                self._times[1].record(self._down)
        return self._sent

    def _take_slot(self) -> _Slot:
        slot = self._slots.popleft()
        slot.free.finish()
        return slot

    def _bring(self, chunk: Chunk, slot: _Slot) -> None:
        for here, there in zip(slot.states, chunk.states, strict=True):
            here[: chunk.size].copy_(there, non_blocking=True)

    def _brought(self, chunk: Chunk, start: int, gradient: Tensor, slot: _Slot) -> Tensor:
        if gradient.device.type != "cpu":
            gradient.record_stream(self._kernel)  # its owner may let go of it before the kernel has read it
            return gradient
        first = start - chunk.start
        room = slot.room("gradient", gradient.dtype)
        return room[first : first + gradient.numel()].copy_(gradient, non_blocking=True)

    def _rooms_for_copies(self, chunk: Chunk, slot: _Slot) -> list[Tensor | None]:
        """Where forward needs them, if that is the device; else in the slot, from where they go down."""
        rooms: list[Tensor | None] = []
        for piece in chunk.pieces:
            target = chunk.copy_of(piece)
            if target is not None and target.device.type == "cpu":
                target = slot.room("copy", target.dtype)[piece.start - chunk.start : piece.stop - chunk.start]
            rooms.append(target)
        return rooms


def _key(chunk: Chunk) -> tuple[object, int, int]:
    return chunk.slab, chunk.start, chunk.stop
