"""How much of each memory this rank may use."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from zerofold.memory.host import host_memory
from zerofold.offload.wishes import Offload

GIB = 2**30


@dataclass(frozen=True)
class Budget:
    """Bytes that this rank may use; no disk where no folder was given."""

    device: int
    host: int
    disk: int | None = None
    one_memory: bool = False
    """The device is the CPU: device and host are the same memory, and what both take together must fit `host`."""


def available(device: torch.device, offload: Offload, ranks_on_host: int) -> Budget:
    """What is free now, shared by the ranks of this host, less a rest for everybody else, within the wish's limits.

    >>> from zerofold.offload.wishes import read_offload
    >>> budget = available(torch.device("cpu"), read_offload({"optimizer": "auto", "host_limit": "64MiB"}), 2)
    >>> budget.host, budget.disk, budget.one_memory
    (67108864, None, True)
    """
    free = host_memory().available
    host = _least(max(0, free - max(2 * GIB, free // 20)) // ranks_on_host, offload.host_limit)
    disk = None
    if offload.path is not None:
        left = shutil.disk_usage(_existing(Path(offload.path))).free
        disk = _least(max(0, left - max(GIB, left // 50)) // ranks_on_host, offload.disk_limit)
    on_device = host if device.type == "cpu" else device_memory(device)
    return Budget(_least(on_device, offload.device_limit), host, disk, one_memory=device.type == "cpu")


def device_memory(device: torch.device) -> int:
    """What this process may have: what is free and what it holds already, and no more than torch was told to take."""
    memory = torch.get_device_module(device)
    free, total = memory.mem_get_info(device)
    found: int = free + memory.memory_reserved(device)
    fraction = getattr(memory, "get_per_process_memory_fraction", None)  # not in every torch
    return found if fraction is None else min(found, int(fraction(device) * total))


def _least(found: int, limit: int | None) -> int:
    return found if limit is None else min(found, limit)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists: it may be made later."""
    return next(found for found in (folder.absolute(), *folder.absolute().parents) if found.exists())
