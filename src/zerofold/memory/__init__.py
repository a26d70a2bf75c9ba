"""Flat storages and the pools behind them; the memory of each tier, and copies between them."""

from zerofold.memory.buffers import BufferPool
from zerofold.memory.storage import FlatStorage, StorageCache, share_storage
from zerofold.memory.tiers import FromFile, TierMemory
from zerofold.memory.transfers import Done, Transfers

__all__ = ["BufferPool", "Done", "FlatStorage", "FromFile", "StorageCache", "TierMemory", "Transfers", "share_storage"]
