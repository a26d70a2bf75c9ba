"""Memory of each tier for the states of one model: every tier gives ordinary tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from zerofold.memory.arena import HostArena
from zerofold.memory.disk import DiskStore, Extent
from zerofold.memory.transfers import Done
from zerofold.placement import Tier
from zerofold.timing import DISK


class TierMemory:
    """Takes memory on the device, from pinned segments of host memory, or in a file; counts it by state.

    >>> memory = TierMemory(torch.device("cpu"), None, None)
    >>> memory.take(Tier.DEVICE, 3, torch.float32, "optimizer", "a").tolist()
    [0.0, 0.0, 0.0]
    """

    def __init__(self, device: torch.device, arena: HostArena | None, disk: DiskStore | None) -> None:
        self.device, self.arena, self.disk = device, arena, disk
        self._blocks: dict[int, tuple[Tensor, Tier, str, Extent | None]] = {}  # by the address of their storage
        self._lock = threading.RLock()  # an update takes and borrows memory in a thread of its own
        self._was_used = False  # a part of the file, which is zeros until then
        self._staging: list[tuple[Tensor, Done]] = []  # host memory that was read into, and the end of its last use

    def take(self, tier: Tier, numel: int, dtype: torch.dtype, state: str, label: str) -> Tensor:
        """Zeros. What another tier than the device gives has a version counter of its own."""
        if tier is Tier.DEVICE or not numel:
            return torch.zeros(numel, dtype=dtype, device=self.device if tier is Tier.DEVICE else "cpu")
        with self._lock:
            return self._take(tier, numel * dtype.itemsize, state, label).view(dtype).data

    def _take(self, tier: Tier, nbytes: int, state: str, label: str) -> Tensor:
        if tier is Tier.HOST:
            assert self.arena is not None, "no host memory was planned for this model"
            block, extent = self.arena.take(nbytes), None
        else:
            assert self.disk is not None, "no disk was planned for this model"
            self.disk.make_room(nbytes)  # parameters that are unfrozen later are in no plan
            extent = self.disk.take(nbytes, f"{label}: {state}")
            block = self.disk.tensor(extent)
            if self._was_used:
                block.zero_()
        self._blocks[_address(block)] = block, tier, state, extent
        return block[:nbytes]

    def give(self, tensor: Tensor) -> None:
        """Nobody may use it after this."""
        with self._lock:
            block, tier, _, extent = self._blocks.pop(_address(tensor), (None, Tier.DEVICE, "", None))
            if block is not None and tier is Tier.HOST and self.arena is not None:
                self.arena.give(block)
                return
        if extent is not None and self.disk is not None:
            self.disk.give(extent)
            self._was_used = True

    def offset(self, tensor: Tensor) -> int:
        """Where in the file a tensor begins that was taken there, or a view of one."""
        extent = self._blocks[_address(tensor)][3]
        assert extent is not None
        return extent.offset + tensor.data_ptr() - _address(tensor)

    def written(self, tensor: Tensor) -> None:
        """Somebody has changed a tensor by ordinary means: one in the file is brought there, and its memory freed."""
        extent = self._blocks.get(_address(tensor), (None, None, None, None))[3]
        if extent is not None and self.disk is not None:
            self.disk.changed(extent)
            self.disk.forget(extent)

    def borrow(self, nbytes: int) -> Tensor:
        """Host memory to read a part of the file into; `bring_back` when its use has been set going."""
        with self._lock:
            for index, (block, used) in enumerate(self._staging):
                if block.nbytes >= nbytes:
                    del self._staging[index]
                    used.finish()
                    return block[:nbytes]
            return self._take(Tier.HOST, nbytes, "staging", "staging")

    def bring_back(self, block: Tensor, used: Done) -> None:
        with self._lock:
            self._staging.append((self._blocks[_address(block)][0], used))

    def bytes_by_state(self, tier: Tier) -> dict[str, int]:
        """Off the device; what is on it belongs to whoever took it."""
        total: dict[str, int] = {}
        with self._lock:  # an update under way may borrow
            blocks = list(self._blocks.values())
        for block, where, state, _ in blocks:
            if where is tier:
                total[state] = total.get(state, 0) + block.nbytes
        return total

    def close(self) -> None:
        """All that was taken must have been let go of."""
        self._blocks.clear()
        self._staging.clear()
        if self.arena is not None:
            self.arena.close()
        if self.disk is not None:
            self.disk.close()


class FromFile:
    """A tensor in the file on its way: it is being read, and `arrive` takes it from there."""

    waits_for = DISK

    def __init__(self, memory: TierMemory, tensor: Tensor, arrive: Callable[[Tensor], Done]) -> None:
        assert memory.disk is not None
        self._memory, self._arrive = memory, arrive
        self._block: Tensor | None = memory.borrow(tensor.nbytes)
        self._staged = self._block.view(tensor.dtype)
        self._request = memory.disk.read(memory.offset(tensor), self._staged)

    def wait(self) -> None:
        if self._block is not None:
            self._request.wait()
            block, self._block = self._block, None
            self._memory.bring_back(block, self._arrive(self._staged))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
