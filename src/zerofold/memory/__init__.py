"""Flat storages and the pools behind them."""

from zerofold.memory.buffers import BufferPool
from zerofold.memory.storage import FlatStorage, StorageCache

__all__ = ["BufferPool", "FlatStorage", "StorageCache"]
