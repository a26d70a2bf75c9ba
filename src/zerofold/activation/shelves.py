"""Where kept tensors lie: in one block of the device, or in pinned host memory; `disk_shelf` has files."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zerofold.activation.reserve import CudaCache, Reserve
from zerofold.activation.slots import Slot, Slots
from zerofold.memory import Done, Transfers
from zerofold.memory.arena import HostArena
from zerofold.memory.disk import PAGE, DiskStore, Extent, Request
from zerofold.schedule import in_backward

_ALIGN = 512  # bytes: as CUDA's allocator starts its blocks, so that kernels choose the same code


class Layout(NamedTuple):
    """How a tensor lies in its memory; a tensor with gaps is kept without them."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def over(self, memory: Tensor) -> Tensor:
        """The tensor over these bytes, with a version counter of its own: its neighbours may change."""
        return memory.view(self.dtype).as_strided(self.shape, self.stride).data

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class Ends(Protocol):
    """Work that was set going."""

    def wait(self) -> None:
        """Returns when the current stream may use what came of it."""


class Arrived(NamedTuple):
    tensor: Tensor
    done: Ends
    check: Callable[[], None] | None = None
    """Asked when it is done: raises if what has come is of no use."""


@dataclass
class Item:
    """One tensor on a shelf."""

    layout: Layout
    slot: Slot | None = None
    done: Done | None = None
    """The end of the copy that filled the slot."""
    room: tuple[DiskStore, Extent] | None = None
    reading: Request | None = None
    fault: Exception | None = None
    """Why it is lost; raised when it is wanted."""


class DeviceShelf:
    """One contiguous block for all of a step. What is taken from it are views.

    When a step begins with a longer tensor than any before, the block is made anew, as much larger, before it is too
    small. What CUDA's allocator holds around it is kept small (`Reserve`).
    """

    frees_device, can_fail = False, False

    def __init__(self, device: torch.device, reserve: Reserve | None = None, *, expected: int = 0) -> None:
        """`reserve`: by default of CUDA's allocator; other devices have none. `expected`: tensors like a step's first,
        for which the first block has room already."""
        self._longest, self._expected = 0, expected
        self.reserve = reserve or (Reserve(CudaCache(device)) if device.type == "cuda" else None)
        self._awaits_end = False  # of the backward under way
        self._slots = Slots(
            lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device), align=_ALIGN, merges=True
        )

    def put(self, tensor: Tensor) -> Item:
        item = Item(Layout.of(tensor))
        if not self._slots.taken_nbytes:
            self._begin(item.layout.nbytes)
        item.slot, item.done = self._slots.take(item.layout.nbytes), Done()
        item.layout.over(item.slot.memory).copy_(tensor)
        return item

    def _begin(self, first: int) -> None:
        """A step, with a tensor of so many bytes."""
        self._awaits_end = False  # an exception may have kept the last one from its end
        is_new = first > self._longest or self._slots.blocks > 1
        if is_new:
            growth = max(1.0, first / self._longest) if self._longest else 1.0
            self._longest = max(self._longest, first)
            told = self._expected * -(-first // _ALIGN) * _ALIGN
            self._slots.expect(max(told, math.ceil(self._slots.peak_nbytes * growth)))
        if self.reserve is not None:
            self.reserve.begin(first, is_new=is_new)

    def _await_end(self) -> None:
        """Backward wants what is kept. When it is through, its tensors are gone, and segments can be given back."""
        if self.reserve is not None and not self._awaits_end and in_backward():
            self._awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        assert self.reserve is not None
        if self._awaits_end:
            self._awaits_end = False
            self.reserve.end()

    def settle(self, item: Item) -> None:
        """Its tensor on the device is about to go."""

    def turn(self) -> None:
        """Another block begins, in forward or in backward."""

    def fetch(self, item: Item) -> None:
        """It will be wanted soon."""

    def trouble(self, item: Item) -> Exception | None:
        """Why it cannot be had, if so. Waits until it is in memory."""
        return item.fault

    def get(self, item: Item) -> Arrived:
        assert item.slot is not None
        self._await_end()
        return Arrived(item.layout.over(item.slot.memory), Done())

    def fill(self, item: Item, target: Tensor, then: Callable[[], Ends]) -> Ends:
        """Copies it to where the caller wants it; `then` is behind the copy, in the same stream."""
        assert item.slot is not None
        self._await_end()
        target.copy_(item.layout.over(item.slot.memory))
        return then()

    def give(self, item: Item) -> None:
        if item.slot is not None:
            self._slots.give(item.slot)

    def close(self) -> None:
        self._slots.clear()

    def nbytes(self) -> dict[str, int]:
        """Taken now, by tier."""
        return {"device": self._slots.taken_nbytes}

    @property
    def arena_nbytes(self) -> int:
        return self._slots.nbytes


class HostShelf:
    """Pinned memory; copies run beside the device's own work."""

    frees_device = True
    can_fail = False
    """Whether a tensor that was put there may be lost."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._transfers = Transfers(device)
        self._arena = HostArena(pins=device.type == "cuda")
        self._slots = Slots(self._arena.take, self._arena.give, align=PAGE)
        # Where nobody closes it: memory is unpinned when it goes, and no copy may be under way then.
        weakref.finalize(self, self._transfers.finish).atexit = False

    def put(self, tensor: Tensor) -> Item:
        item = Item(Layout.of(tensor))
        item.slot = self._slots.take(item.layout.nbytes)
        with self._transfers.down():
            item.layout.over(item.slot.memory).copy_(tensor, non_blocking=True)
            item.done = self._transfers.done()
        return item

    def settle(self, item: Item) -> None:
        """Its tensor on the device is about to go: what the current stream does next comes after the copy."""
        if item.done is not None:
            item.done.wait()

    def turn(self) -> None:
        """Another block begins, in forward or in backward."""

    def fetch(self, item: Item) -> None:
        """It will be wanted soon."""

    def trouble(self, item: Item) -> Exception | None:
        """Why it cannot be had, if so. Waits until it is in memory."""
        return item.fault

    def get(self, item: Item) -> Arrived:
        """On its way to the device; the memory there belongs to the stream that asks for it."""
        target = item.layout.empty(self._device)
        return Arrived(target, self.fill(item, target, self._transfers.done))

    def fill(self, item: Item, target: Tensor, then: Callable[[], Ends]) -> Ends:
        """Copies it to where the caller wants it; `then` is behind the copy, in the same stream."""
        assert item.slot is not None
        with self._transfers.up():
            target.copy_(item.layout.over(item.slot.memory), non_blocking=True)
            return then()

    def give(self, item: Item) -> None:
        if item.slot is not None:
            self._slots.give(item.slot)

    def close(self) -> None:
        self._transfers.finish()
        self._slots.clear()
        self._arena.close()

    def nbytes(self) -> dict[str, int]:
        return {"host": self._slots.taken_nbytes}

    @property
    def arena_nbytes(self) -> int:
        """Host memory; none of it is the device's."""
        return 0


Shelf = DeviceShelf | HostShelf
