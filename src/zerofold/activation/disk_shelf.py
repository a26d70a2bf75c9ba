"""Kept tensors in files, past the page cache. Host memory is only passed through, and little of it:

            in host memory
forward     | w2 | d3 | d4 |    block 4 computes: 3 and 4 have not left the device, 2 is being written to the file,
                                and 1 has been: else block 4 would not have begun
backward    | u3 | u2 | r1 |    block 3 is computed again: it has come up, or nearly so, 2 comes up, 1 is read

Between them, when the first read begins beside the last writes, there are four blocks' tensors at most. A disk that is
slower than the blocks holds them up, and does not fill the memory of the host.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.activation.shelves import DeviceShelf, Ends, HostShelf, Item, Shelf
from zerofold.activation.slots import Slot
from zerofold.memory import Done
from zerofold.memory.disk import DiskError, DiskStore, Extent, Request
from zerofold.placement import Tier

_LEAST_FILE = 64 * 2**20


class _Passing(NamedTuple):
    """Host memory whose last use is under way."""

    slot: Slot
    request: Request | None
    done: Done
    turn: int

    @property
    def is_over(self) -> bool:
        return self.done.is_over and (self.request is None or self.request.is_done)

    def finish(self) -> None:
        self.done.finish()
        if self.request is not None:
            self.request.settle()


class DiskShelf(HostShelf):
    """Files of one rank.

    is_shared  other ranks keep parts of the same tensors, and wait for this one: what goes wrong is not raised where it
               is found, by this rank alone, but told by `trouble` when the tensor is wanted
    """

    can_fail = True

    def __init__(self, device: torch.device, folder: str | os.PathLike[str], *, is_shared: bool = False) -> None:
        super().__init__(device)
        self._folder, self._is_shared = folder, is_shared
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._files: list[DiskStore] = []
        self._passing: list[_Passing] = []
        self._returned: deque[Item] = deque()  # appended to in any thread, perhaps in the middle of a request
        self._written = 0
        self._turn = 0

    @property
    def peak_host_nbytes(self) -> int:
        """The most host memory that was taken at once."""
        return self._slots.peak_nbytes

    def turn(self) -> None:
        """Waits until the host memory of the block before the last is free: disk and device fall no further behind."""
        self._turn += 1
        for each in self._passing:
            if each.turn < self._turn - 1:
                each.finish()

    def put(self, tensor: Tensor) -> Item:
        self._reclaim()
        return super().put(tensor)

    def settle(self, item: Item) -> None:
        super().settle(item)
        if item.slot is None or item.room is not None:
            return
        assert item.done is not None
        item.done.finish()  # threads write it, and know nothing of streams
        request = None
        try:
            item.room = store, extent = self._take_room(item.layout.nbytes)
            request = store.write(extent.offset, item.slot.memory)
        except Exception as error:
            self._note(item, error)
        self._pass_on(item, request)

    def fetch(self, item: Item) -> None:
        if item.slot is not None or item.room is None or item.fault is not None:
            return
        self._reclaim()
        store, extent = item.room
        slot = None
        try:
            slot = self._slots.take(item.layout.nbytes)
            item.reading = store.read(extent.offset, slot.memory)
            item.slot = slot
        except Exception as error:
            if slot is not None:
                self._slots.give(slot)
            self._note(item, error)

    def trouble(self, item: Item) -> Exception | None:
        """A read that failed may be tried again."""
        self.fetch(item)
        if item.fault is not None or item.reading is None:
            return item.fault
        item.reading.settle()
        error = item.reading.error
        if error is None:
            return None
        self._pass_on(item)
        found = DiskError(error.errno, error.strerror)
        found.__cause__ = error
        return found

    def fill(self, item: Item, target: Tensor, then: Callable[[], Ends]) -> Ends:
        self._reclaim()
        trouble = self.trouble(item)
        if trouble is not None:
            raise trouble
        copied = Done()

        def after() -> Ends:
            nonlocal copied
            copied = self._transfers.done()
            return then()

        ends = super().fill(item, target, after)
        if item.reading is not None:
            self._pass_on(item, done=copied)
        else:
            item.done = copied  # before it threads may not fill the slot again, which know nothing of streams
        return ends

    def give(self, item: Item) -> None:
        self._returned.append(item)

    def close(self) -> None:
        self._reclaim()
        for each in self._passing:
            each.finish()
        self._reclaim()
        super().close()
        for store in self._files:
            store.close()

    def nbytes(self) -> dict[str, int]:
        self._reclaim()
        return {**super().nbytes(), "nvme": self._written}

    def _note(self, item: Item, error: Exception) -> None:
        if not self._is_shared:
            raise error
        item.fault = error.with_traceback(None)  # whose frames hold the item

    def _pass_on(self, item: Item, request: Request | None = None, done: Done | None = None) -> None:
        """The item leaves host memory, which is free after the request and the copy."""
        if item.slot is not None:
            self._passing.append(_Passing(item.slot, request, done or Done(), self._turn))
        item.slot = item.reading = None

    def _reclaim(self) -> None:
        """Takes back what has been returned, and host memory that nobody reads or writes any more."""
        while self._returned:
            item = self._returned.popleft()
            self._pass_on(item, item.reading, item.done)
            if item.room is not None:
                store, extent = item.room
                store.give(extent)
                self._written -= extent.nbytes
        passing, self._passing, failed = self._passing, [], None
        for each in passing:
            if each.is_over:
                self._slots.give(each.slot)
                has_failed = each.request is not None and each.request.error is not None
                failed = failed or (each.request if has_failed else None)
            else:
                self._passing.append(each)
        if failed is not None and not self._is_shared:  # else the read of it says so
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


def make_shelf(
    tier: Tier,
    device: torch.device,
    folder: str | os.PathLike[str] | None,
    *,
    is_shared: bool = False,
    expected: int = 0,
) -> Shelf:
    if tier is Tier.NVME:
        assert folder is not None
        return DiskShelf(device, folder, is_shared=is_shared)
    return HostShelf(device) if tier is Tier.HOST else DeviceShelf(device, expected=expected)
