"""Chunks that stream through the device: states come up, are updated there, and go down again.

up       [c0][c1][c2][c3]        [c0]   master and moments (12 bytes a parameter), and the gradient if it is on the host
kernel       [k0][k1][k2][k3]
down             [c0][c1][c2][c3]       the bus carries both directions at once

The bus and the host's cores share the host's memory, yet together they update half as fast again as either alone.

Where the device has room for some chunks more, the bus works under backward too. The first chunks to have their
gradients are updated as if nothing were clipped, and go down; their old states stay on the device until the step has
seen the norm of all gradients. Then the early update stands, or is made anew from the old states (`run_early`). Where
that is of no use, the first chunks of the next update come up before it, and wait.

In either direction the bus serves one stream until that has nothing more for it. So one chunk at a time is set going,
by a thread for each direction: a batch that goes up, a loss that comes down and parameters that forward needs get their
turn in between, and not after the whole update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim.away.chunks import Chunk, ChunkEnds
from zerofold.optim.away.slots import IsDown, Slot
from zerofold.optim.onepass import adam

SLOTS = 4  # chunks on their way at once
_LEAST = 2  # with which an update gets by: an early one has two


class _Early(NamedTuple):
    """An update before its step."""

    chunk: Chunk
    work: str
    old: Slot
    """The states before the update, and the copy of the new ones that forward gets if the update stands."""
    made: torch.cuda.Event
    """The update is through."""
    is_down: Done
    """The new states are in the host's memory."""


class _Lasting(NamedTuple):
    """A chunk whose states stay on the device. The host's are brought up to date only when somebody looks at them."""

    chunk: Chunk
    slot: Slot
    made: torch.cuda.Event | None
    """The last update is through; None when the host has its result."""


class DeviceUpdate:
    """Runs in the thread of a worker; what goes down has another, so that neither direction waits for the other.

    Slots are device memory for one chunk each. Between steps some of them hold states, by the key of their chunk:

    _staged     brought up for the next step, which takes them from here; the host has the same
    _early      the old states of a chunk that was updated under backward: the host has the new ones, which stand if the
                step does the same; else the step makes its own from the old ones
    _lasting    states that never leave the device while training goes on; the host's are out of date

    All other slots are free, in `_slots`.
    """

    def __init__(self, device: torch.device, up: Any, *, ahead: int = 0) -> None:
        """`ahead`: how many slots may be staged or early."""
        self._device, self._up, self._ahead = device, up, ahead
        self._kernel, self._copies, self._down = (torch.cuda.Stream(device) for _ in range(3))
        self._slots = deque(Slot(device, up) for _ in range(SLOTS + ahead))  # free the longest first
        self.owed = 0
        """Slots whose memory was let go of, and which the next step makes again."""
        self._staged: dict[tuple[object, int, int], Slot] = {}
        self._early: dict[tuple[object, int, int], _Early] = {}
        self._lasting: dict[tuple[object, int, int], _Lasting] = {}
        self.most_lasting = 0
        """Chunks that may stay."""
        self._may_last: frozenset[object] = frozenset()  # slabs
        self.stood = 0  # elements of this step that were updated early
        # Of this step, as many as can wait for the next, without their gradients; and when each is down.
        self._first: list[tuple[Chunk, Done]] = []
        self._arrived = torch.cuda.Event(blocking=True)  # the chunk before
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="zerofold states down")
        self._sent = torch.cuda.Event(blocking=True)  # the chunk before
        self._times = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._has_run = False  # since `begin`

    @property
    def nbytes(self) -> int:
        kept = [each.old for each in list(self._early.values())]
        kept += [each.slot for each in list(self._lasting.values())]
        return sum(slot.nbytes for slot in (*self._slots, *self._staged.values(), *kept))

    def begin(self, changed: set[object], more: Sequence[Slot] = (), may_last: frozenset[object] = frozenset()) -> None:
        """A step begins; what the step before has sent down may come up again.

        `changed`: slabs whose states somebody else has changed in the host's memory, so that those here are void.
        `more`: slots with which as many chunks more may last. `may_last`: slabs that stream whole in every step; of
        others a later step may update a part on the host, which would find states that are out of date.
        """
        torch.cuda.set_device(self._device)
        self._first, self._has_run, self.stood = [], False, 0
        self._slots.extend(more)
        self.most_lasting += len(more)
        self._may_last = may_last
        self._free([key for key in self._lasting if key[0] not in may_last])
        for key in [key for key in self._staged if key[0] in changed]:
            self._slots.appendleft(self._staged.pop(key))
        # Whoever looks has them brought down first. Where nobody has, no value has changed: the host's are old ones.
        self._free([key for key, (_, _, made) in self._lasting.items() if key[0] in changed and made is None])
        self._up.wait_stream(self._down)
        self._times[0].record(self._up)
        self._kernel.wait_stream(self._up)  # and so behind all that the model still computes with what is written here

    def end(self, *, stages: bool) -> None:
        """All chunks are on their way. `stages`: the first ones come up for the next step."""
        self.take_back()
        for left in self._staged.values():  # not part of this step
            self._slots.appendleft(left)
        self._staged = {}
        for chunk, is_down in self._first if stages else ():
            slot = self._take_slot()
            is_down.finish()
            self._arrived.synchronize()
            with torch.cuda.stream(self._up):
                self._bring(chunk, slot)
                self._arrived = torch.cuda.Event(blocking=True)
                self._arrived.record(self._up)
            self._staged[chunk.key] = slot
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

    def run_early(self, chunk: Chunk, work: str) -> None:
        """Under backward, when its gradients are there. They may still change: `work` is what they were."""
        if self.owed:  # the step takes it again
            return
        torch.cuda.set_device(self._device)
        self._clear_way(chunk)  # of a backward before this one
        before = self._early.pop(chunk.key, None)
        old = self._staged.pop(chunk.key, None) if before is None else before.old
        is_here = old is not None
        if old is None:
            if len(self._early) >= self._ahead:
                return
            if len(self._early) + len(self._staged) >= self._ahead:
                self._slots.appendleft(self._staged.pop(next(iter(self._staged))))
            old = self._take_slot()
        new = self._take_slot()
        states = [held[: chunk.size] for held in new.states]
        self._arrived.synchronize()
        if not is_here:
            with torch.cuda.stream(self._up):
                self._bring(chunk, old)
                self._arrived = torch.cuda.Event(blocking=True)
                self._arrived.record(self._up)
        with torch.cuda.stream(self._kernel):
            self._kernel.wait_event(self._arrived)
            chunk.arrived.wait()
            for here, there in zip(states, old.states, strict=True):
                here.copy_(there[: chunk.size])
            gradients = [self._brought(chunk, piece.start, piece.gradient, new) for piece in chunk.pieces]
            self._compute(chunk, states, gradients, self._rooms_in(old, chunk))
            made = self._kernel.record_event()
        is_down = new.free = IsDown(self._sender.submit(self._send_down, chunk, new, made))
        self._slots.append(new)
        self._early[chunk.key] = _Early(chunk, work, old, made, is_down)

    def take_back(self) -> None:
        """What was updated early is again, where it lives, as the last step left it."""
        self._restore(list(self._early))

    def _restore(self, keys: Sequence[tuple[object, int, int]]) -> None:
        torch.cuda.set_device(self._device)
        entries = [self._early.pop(key) for key in keys]
        for early in entries:
            early.old.free = IsDown(self._sender.submit(self._send_down, early.chunk, early.old, early.made))
            self._slots.append(early.old)
        for early in entries:
            early.old.free.finish()

    def bring_down(self) -> None:
        """The host has all states as they are."""
        self._bring_down(list(self._lasting))

    def fewer(self, count: int) -> None:
        """From now on fewer chunks last, by `count`, and the memory of their slots is given back."""
        self.most_lasting -= count
        self._free(list(self._lasting)[self.most_lasting :])
        for _ in range(count):
            self._slots.pop().free.finish()

    def let_go(self) -> None:
        """Of all memory on the device, until it is wanted again; the host has all states as they are."""
        self.take_back()
        self._free(list(self._lasting))
        self._slots.extend(self._staged.values())
        self._staged = {}
        self.owed += len(self._slots)
        while self._slots:
            self._slots.pop().free.finish()

    def take_again(self) -> None:
        """What was let go of. Where somebody else has some of it by now, only what an update needs: no chunk stays or
        waits any more, and what they would have is for activations."""
        while self.owed:
            try:
                self._slots.append(Slot(self._device, self._up))
                self.owed -= 1
            except torch.OutOfMemoryError:
                if len(self._slots) < _LEAST:
                    raise
                self.owed = self.most_lasting = self._ahead = 0
                while len(self._slots) > SLOTS:
                    self._slots.pop()

    def _free(self, keys: Sequence[tuple[object, int, int]]) -> None:
        """The host has the states of these chunks, and others may have their memory."""
        self._bring_down(keys)
        for key in keys:
            self._slots.append(self._lasting.pop(key).slot)

    def _bring_down(self, keys: Sequence[tuple[object, int, int]]) -> None:
        torch.cuda.set_device(self._device)
        going = []
        for key in keys:
            chunk, slot, made = self._lasting[key]
            if made is not None:
                going.append(IsDown(self._sender.submit(self._send_down, chunk, slot, made)))
                self._lasting[key] = _Lasting(chunk, slot, None)
        for is_down in going:
            is_down.finish()

    def _clear_way(self, chunk: Chunk) -> None:
        """Where other parameters have gradients than in the steps before, a slab is cut into other chunks. What such a
        chunk has in common with this one goes back to the host, from where this one takes it."""
        early = [key for key in self._early if chunk.overlaps(key)]
        if early:
            self._restore(early)
        self._free([key for key in self._lasting if chunk.overlaps(key)])

    def _let_stand(self, early: _Early, chunk: Chunk) -> ChunkEnds:
        """The step does what was done already: forward may have the copy."""
        with torch.cuda.stream(self._kernel):
            copies = self._rooms_in(early.old, chunk)
            for target, source in zip(chunk.copies(), copies, strict=True):
                if target is not None and source is not None and target.device == self._device:
                    target.copy_(source)
            usable = self._kernel.record_event()
            self._times[1].record(self._kernel)
        usable = self._send_copies(chunk, copies, usable)
        early.old.free = Done(usable)
        self._slots.append(early.old)
        self.stood += chunk.size
        return ChunkEnds(Done(usable), early.is_down)

    def run(self, chunk: Chunk) -> ChunkEnds:
        torch.cuda.set_device(self._device)
        self._has_run = True
        self._clear_way(chunk)
        early = self._early.pop(chunk.key, None)
        if early is not None and early.work == chunk.work:
            return self._let_stand(early, chunk)
        slot = self._slot_of(chunk) if early is None else early.old
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
            self._compute(chunk, states, gradients, copies)
            usable = self._kernel.record_event()
            self._times[1].record(self._kernel)
        usable = self._send_copies(chunk, copies, usable)
        has_room = chunk.key in self._lasting or len(self._lasting) < self.most_lasting
        if has_room and chunk.slab in self._may_last:
            # Without its gradients, whose memory the next backward wants.
            self._lasting[chunk.key] = _Lasting(replace(chunk, pieces=()), slot, usable)
            return ChunkEnds(Done(usable), Done(usable))
        complete = slot.free = IsDown(self._sender.submit(self._send_down, chunk, slot, usable))
        self._slots.append(slot)
        if len(self._first) < self._ahead:
            self._first.append((replace(chunk, pieces=()), complete))
        # Without a copy, forward computes with the master.
        return ChunkEnds(complete if chunk.copy is None else Done(usable), complete)

    def _compute(
        self, chunk: Chunk, states: list[Tensor], gradients: list[Tensor], copies: list[Tensor | None]
    ) -> None:
        made = copies if chunk.kernel_makes_copy else [None] * len(copies)
        scale = chunk.scaling.tensor(self._device)
        for settings, tensors in chunk.tensors(states, gradients, made):
            adam(tensors, settings, scale=scale, clip_value=chunk.scaling.clip_value)
        if chunk.copy is not None and not chunk.kernel_makes_copy:
            for master, target in zip(chunk.masters(states[0]), copies, strict=True):
                assert target is not None
                target.copy_(master)

    def _send_copies(self, chunk: Chunk, copies: list[Tensor | None], made: torch.cuda.Event) -> torch.cuda.Event:
        """Where forward fetches them from, if that is the host. Returns after what it may."""
        if chunk.copy is None or chunk.copy.device.type != "cpu":
            return made
        with torch.cuda.stream(self._copies):  # what forward waits for is not behind states that nobody needs
            self._copies.wait_event(made)
            for target, source in zip(chunk.copies(), copies, strict=True):
                if target is not None and source is not None:
                    target.copy_(source, non_blocking=True)
            usable = self._copies.record_event()
            self._times[1].record(self._copies)
        return usable

    def _send_down(self, chunk: Chunk, slot: Slot, usable: torch.cuda.Event) -> torch.cuda.Event:
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

    def _slot_of(self, chunk: Chunk) -> Slot | None:
        """Where its states are on the device."""
        lasting = self._lasting.get(chunk.key)
        return self._staged.pop(chunk.key, None) if lasting is None else lasting.slot

    def _take_slot(self) -> Slot:
        slot = self._slots.popleft()
        slot.free.finish()
        return slot

    def _bring(self, chunk: Chunk, slot: Slot) -> None:
        for here, there in zip(slot.states, chunk.states, strict=True):
            here[: chunk.size].copy_(there, non_blocking=True)

    def _brought(self, chunk: Chunk, start: int, gradient: Tensor, slot: Slot) -> Tensor:
        if gradient.device.type != "cpu":
            gradient.record_stream(self._kernel)  # its owner may let go of it before the kernel has read it
            return gradient
        first = start - chunk.start
        room = slot.room("gradient", gradient.dtype)
        return room[first : first + gradient.numel()].copy_(gradient, non_blocking=True)

    def _rooms_for_copies(self, chunk: Chunk, slot: Slot) -> list[Tensor | None]:
        """Where forward needs them, if that is the device; else in the slot, from where they go down."""
        is_on_host = chunk.copy is not None and chunk.copy.device.type == "cpu"
        return self._rooms_in(slot, chunk) if is_on_host else chunk.copies()

    def _rooms_in(self, slot: Slot, chunk: Chunk) -> list[Tensor | None]:
        assert chunk.copy is not None
        room = slot.room("copy", chunk.copy.dtype)
        return [room[piece.start - chunk.start : piece.stop - chunk.start] for piece in chunk.pieces]
