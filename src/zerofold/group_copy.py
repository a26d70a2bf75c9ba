"""The second copy of gathered parameters that hpZ keeps inside a group."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofold.comm import Comm, Handle
from zerofold.memory import FlatStorage


class GroupCopy:
    """The last gathered values cut over a smaller group, so that gathering them again stays inside that group."""

    def __init__(self, storage: FlatStorage, comm: Comm) -> None:
        self._storage, self._comm = storage, comm
        self.version: int | None = None  # of the shard it was gathered from
        self._piece = torch.empty(storage.tensor.numel() // comm.size, dtype=storage.tensor.dtype, device=comm.device)

    def keep(self, version: int) -> None:
        self._piece.copy_(self._own_slice())
        self.version = version

    def start_gather(self, *, unit: str) -> Handle:
        self._own_slice().copy_(self._piece)
        width = self._piece.numel()
        bounds = range(0, width * self._comm.size + 1, width)
        return self._comm.all_gather(self._storage.tensor, bounds, unit=unit)

    def _own_slice(self) -> Tensor:
        return self._storage.tensor.chunk(self._comm.size)[self._comm.rank]

    @property
    def nbytes(self) -> int:
        return self._piece.nbytes
