"""One storage per slab, allocated and freed in place, so that every view of it stays valid.

Autograd keeps views of weights until backward. They point at the storage, not at its memory, so a storage may
lose its memory after forward and get new memory before backward; a second storage would leave them behind.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class StorageCache:
    """Keeps freed CPU memory blocks for the next storage of the same size.

    The C library returns large blocks to the system, so each gather into fresh memory would pay a page fault per
    4 KiB. CUDA has a caching allocator of its own and needs none of this. A block enters the cache only when a
    storage leaves, and a size that is not there empties the cache first: together never more than was live at once.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[torch.UntypedStorage]] = defaultdict(list)

    @staticmethod
    def works_for(storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "cpu" and hasattr(storage, "_swap_data_ptr_")

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if self.works_for(storage) and self._blocks[nbytes]:
            _swap(storage, self._blocks[nbytes].pop())
        else:
            self.clear()
            storage.resize_(nbytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        if not self.works_for(storage):
            storage.resize_(0)
            return
        block = torch.UntypedStorage(0, device=storage.device)
        nbytes = storage.nbytes()
        _swap(storage, block)
        self._blocks[nbytes].append(block)

    def clear(self) -> None:
        self._blocks.clear()

    @property
    def nbytes(self) -> int:
        return sum(nbytes * len(blocks) for nbytes, blocks in self._blocks.items())


def _swap(one: Any, other: Any) -> None:
    """Exchanges the memory behind two storages; every view of either stays with its storage."""
    one._swap_data_ptr_(other)


def share_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory.

    >>> flat = torch.zeros(4)
    >>> share_storage(flat[1:2], flat[2:]), share_storage(flat, flat.clone())
    (True, False)
    """
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class FlatStorage:
    """A 1-D tensor whose memory comes and goes while the tensor and its views stay.

    >>> flat = FlatStorage(8, torch.float32, torch.device("cpu"), StorageCache())
    >>> view = flat.tensor[2:4]
    >>> flat.free(); flat.nbytes
    0
    >>> flat.allocate(); _ = flat.tensor.fill_(3.0); view.tolist()
    [3.0, 3.0]
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, cache: StorageCache) -> None:
        self.tensor: Tensor = torch.empty(numel, dtype=dtype, device=device)
        self.full_nbytes = numel * self.tensor.element_size()
        self._cache = cache
        self.tensor.untyped_storage().resize_(0)  # untouched memory, so that even the first comes from the cache
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self.nbytes == self.full_nbytes

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def allocate(self) -> None:
        if not self.is_allocated:
            self._cache.fill(self.tensor.untyped_storage(), self.full_nbytes)

    def free(self) -> None:
        if self.nbytes:
            self._cache.empty(self.tensor.untyped_storage())
