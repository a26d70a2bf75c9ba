"""How fast a folder's disk reads and writes: plain O_DIRECT calls, and the same bytes through the NVMe tier."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zerofold.bench.disk import KINDS, ORDERS, raw_rates
from zerofold.bench.io_rows import Rate
from zerofold.memory.arena import HostArena
from zerofold.memory.disk import PAGE, DiskStore, Request

PART = "disk"
PIECE = 64 * 2**20  # bytes of one request
PIECES = 4  # requests under way at once, each with host memory of its own

Move = tuple[Callable[[int, Tensor], Request], int]  # the store's call and its offset


def disk_rates(folder: Path, nbytes: int) -> list[Rate]:
    """Moves `nbytes` each time: read, written, and half of it read while the other half is written, or in turns."""
    piece = min(PIECE, max(1, nbytes // (2 * PIECES) // PAGE) * PAGE)
    whole = max(nbytes // piece, 2) * piece
    found = raw_rates(folder, whole, list(dict.fromkeys((*KINDS, *ORDERS))), block=min(piece, 8 * 2**20))
    raw = {mix: Rate(PART, f"{mix}, raw", rate) for mix, rate in found.items()}
    with DiskStore(folder, whole) as store:
        note = "" if store.is_direct else "through the page cache: this file system has no O_DIRECT"
        through = _through_the_store(store, whole, piece)
    rates = list(raw.values())
    for mix in KINDS:
        share = through[mix] / raw[mix].gb_per_s
        rates.append(Rate(PART, f"{mix}, NVMe tier", through[mix], share, raw[mix].name, note))
    return rates


def _through_the_store(store: DiskStore, nbytes: int, piece: int) -> dict[str, float]:
    """GB/s by mix."""
    arena = HostArena(pins=torch.cuda.is_available())
    memory = [arena.take(piece) for _ in range(PIECES)]
    for part in memory:
        part.copy_(torch.frombuffer(bytearray(os.urandom(piece)), dtype=torch.uint8))  # no disk can take it for zeros
    arena.wait()
    first = store.take(nbytes, "bench").offset
    offsets = range(first, first + nbytes, piece)
    half = len(offsets) // 2
    reads: list[Move] = [(store.read, offset) for offset in offsets]
    writes: list[Move] = [(store.write, offset) for offset in offsets]
    both = [move for pair in zip(reads[:half], writes[half:], strict=False) for move in pair]
    _run(writes, memory)  # blocks that were never written cost more the first time
    rates = {
        mix: len(moves) * piece / _run(moves, memory) / 1e9
        for mix, moves in zip(KINDS, (reads, writes, both), strict=True)
    }
    arena.close()
    return rates


def _run(moves: list[Move], memory: list[Tensor]) -> float:
    """Seconds for all, with as many requests under way as there are parts of the memory."""
    begin = time.perf_counter()
    under_way: list[Request] = []
    for index, (move, offset) in enumerate(moves):
        if index >= len(memory):
            under_way[index - len(memory)].wait()
        under_way.append(move(offset, memory[index % len(memory)]))
    for request in under_way:
        request.wait()
    return time.perf_counter() - begin
