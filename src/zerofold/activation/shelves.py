"""Where kept tensors lie: in one block of the device, in pinned host memory, or in files."""

from __future__ import annotations

import errno
import math
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.activation.reserve import CudaCache, Reserve
from zerofold.activation.slots import Slot, Slots
from zerofold.memory import Done, Transfers
from zerofold.memory.arena import HostArena
from zerofold.memory.disk import PAGE, DiskError, DiskStore, Extent, Request
from zerofold.placement import Tier
from zerofold.schedule import in_backward

_ALIGN = 512  # bytes: as CUDA's allocator starts its blocks, so that kernels choose the same code
_LEAST_FILE = 64 * 2**20


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


@dataclass
class Item:
    """One tensor on a shelf."""

    layout: Layout
    slot: Slot | None = None
    done: Done | None = None
    """The end of the copy that filled the slot."""
    room: tuple[DiskStore, Extent] | None = None
    reading: Request | None = None


class DeviceShelf:
    """One contiguous block for all of a step. What is taken from it are views.

    When a step begins with a longer tensor than any before, the block is made anew, as much larger, before it is too
    small. What CUDA's allocator holds around it is kept small (`Reserve`).
    """

    frees_device = False

    def __init__(self, device: torch.device, reserve: Reserve | None = None) -> None:
        """`reserve`: by default of CUDA's allocator; other devices have none."""
        self._longest = 0
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
            self._slots.expect(math.ceil(self._slots.peak_nbytes * growth))
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

    def fetch(self, item: Item) -> None:
        """It will be wanted soon."""

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

    def fetch(self, item: Item) -> None:
        """It will be wanted soon."""

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


class DiskShelf(HostShelf):
    """Files past the page cache; host memory is only passed through."""

    def __init__(self, device: torch.device, folder: str | os.PathLike[str]) -> None:
        super().__init__(device)
        self._folder = folder
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._files: list[DiskStore] = []
        self._passing: list[tuple[Slot, Request | None, Done]] = []  # host memory whose last use is under way
        self._returned: deque[Item] = deque()  # appended to in any thread, perhaps in the middle of a request
        self._written = 0

    def put(self, tensor: Tensor) -> Item:
        self._reclaim()
        return super().put(tensor)

    def settle(self, item: Item) -> None:
        super().settle(item)
        if item.slot is not None and item.room is None:
            assert item.done is not None
            item.done.finish()  # threads write it, and know nothing of streams
            item.room = store, extent = self._take_room(item.layout.nbytes)
            request = store.write(extent.offset, item.slot.memory)
            self._passing.append((item.slot, request, Done()))
            item.slot = None

    def fetch(self, item: Item) -> None:
        if item.slot is None and item.room is not None:
            store, extent = item.room
            item.slot = self._slots.take(item.layout.nbytes)
            item.reading = store.read(extent.offset, item.slot.memory)

    def fill(self, item: Item, target: Tensor, then: Callable[[], Ends]) -> Ends:
        self._reclaim()
        self.fetch(item)
        if item.reading is not None:
            item.reading.wait()
        copied = Done()

        def after() -> Ends:
            nonlocal copied
            copied = self._transfers.done()
            return then()

        ends = super().fill(item, target, after)
        if item.reading is not None:
            assert item.slot is not None
            self._passing.append((item.slot, None, copied))
            item.slot = item.reading = None
        else:
            item.done = copied  # before it threads may not fill the slot again, which know nothing of streams
        return ends

    def give(self, item: Item) -> None:
        self._returned.append(item)

    def close(self) -> None:
        self._reclaim()
        for _, request, done in self._passing:
            done.finish()
            if request is not None:
                request.settle()
        self._reclaim()
        super().close()
        for store in self._files:
            store.close()

    def nbytes(self) -> dict[str, int]:
        self._reclaim()
        return {**super().nbytes(), "nvme": self._written}

    def _reclaim(self) -> None:
        """Takes back what has been returned, and host memory that nobody reads or writes any more."""
        while self._returned:
            item = self._returned.popleft()
            if item.slot is not None:
                self._passing.append((item.slot, item.reading, item.done or Done()))
            if item.room is not None:
                store, extent = item.room
                store.give(extent)
                self._written -= extent.nbytes
        passing, self._passing, failed = self._passing, [], None
        for slot, request, done in passing:
            if done.is_over and (request is None or request.is_done):
                self._slots.give(slot)
                failed = failed or (request if request is not None and request.error is not None else None)
            else:
                self._passing.append((slot, request, done))
        if failed is not None:
            failed.wait()  # which raises what went wrong

    def _take_room(self, nbytes: int) -> tuple[DiskStore, Extent]:
        for store in self._files:
            try:
                return self._noted(store, nbytes)
            except DiskError as error:
                if error.errno != errno.ENOSPC:
                    raise
        size = max(nbytes, _LEAST_FILE, sum(store.nbytes for store in self._files))
        self._files.append(DiskStore(self._folder, size, rank=self._rank))
        return self._noted(self._files[-1], nbytes)

    def _noted(self, store: DiskStore, nbytes: int) -> tuple[DiskStore, Extent]:
        extent = store.take(nbytes, "activations")
        self._written += extent.nbytes
        return store, extent


Shelf = DeviceShelf | HostShelf


def make_shelf(tier: Tier, device: torch.device, folder: str | os.PathLike[str] | None) -> Shelf:
    if tier is Tier.NVME:
        assert folder is not None
        return DiskShelf(device, folder)
    return HostShelf(device) if tier is Tier.HOST else DeviceShelf(device)
