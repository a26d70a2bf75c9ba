"""Fused communication buffers of a constant size, whatever the model's size (C_b of ZeRO-R)."""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = {"cpu": 16 * 2**20}
_BYTES_ON_ACCELERATORS = 256 * 2**20


def default_buffer_bytes(device_type: str) -> int:
    """Of one buffer. On the CPU small ones stay in its caches. Elsewhere the stream that computes waits for the buffer
    before the last, so a unit's gradients should go in few.

    >>> default_buffer_bytes("cpu"), default_buffer_bytes("cuda")
    (16777216, 268435456)
    """
    return _BYTES.get(device_type, _BYTES_ON_ACCELERATORS)


class BufferPool:
    """Hands out flat buffers of at most `nbytes` each and takes them back; memory grows to what is in use at once.

    >>> pool = BufferPool(1024)
    >>> buffer = pool.take(100, torch.float32, torch.device("cpu"))
    >>> pool.give(buffer); pool.take(100, torch.float32, torch.device("cpu")) is buffer
    True
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer_nbytes = nbytes
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._all: list[Tensor] = []

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements of `dtype` that one buffer holds."""
        return max(1, self.buffer_nbytes // dtype.itemsize)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer with room for at least `numel` elements; the caller slices what it needs."""
        if not numel:  # whoever sends nothing must not take a buffer from who needs one
            return torch.empty(0, dtype=dtype, device=device)
        free = self._free.setdefault((dtype, device), [])
        for index, buffer in enumerate(free):
            if buffer.numel() >= numel:
                return free.pop(index)
        if free:  # too small: replace it, so that the number of buffers stays what is in use at once
            small = free.pop()
            self._all = [kept for kept in self._all if kept is not small]
            del small
        buffer = torch.empty(numel, dtype=dtype, device=device)
        self._all.append(buffer)
        return buffer

    def give(self, buffer: Tensor) -> None:
        if buffer.numel():
            self._free[buffer.dtype, buffer.device].append(buffer)

    def clear(self) -> None:
        self._free.clear()
        self._all.clear()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._all)
