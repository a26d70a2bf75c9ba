"""How fast bytes move between the host and the GPU: the ceiling of what goes up and down in a step."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from zerofold.bench.io_rows import Rate
from zerofold.memory.arena import HostArena

PART = "pcie"
ROUNDS = 5  # the fastest counts
GIB = 2**30


def pcie_rates(nbytes: int) -> list[Rate]:
    """Copies of `nbytes` up, down, and both ways at once, from three kinds of host memory. Needs CUDA."""
    arena = HostArena(pins=True)
    begin = time.perf_counter()
    segments = arena.take(nbytes), arena.take(nbytes)
    arena.wait()
    pinning = time.perf_counter() - begin
    rates = [Rate(PART, "pinning", 2 * nbytes / pinning / 1e9, note=f"{pinning * GIB / (2 * nbytes):.2f} s per GiB")]
    rates += _rates("arena", segments, note="" if segments[0].is_pinned() else "torch does not see it as pinned")
    pinned = tuple(torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    rates += _rates("torch's pinned", (pinned[0], pinned[1]))
    pageable = tuple(torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    rates += _rates("pageable", (pageable[0], pageable[1]))
    arena.close()
    return rates


def _rates(kind: str, host: tuple[Tensor, Tensor], note: str = "") -> list[Rate]:
    device = tuple(torch.zeros(part.numel(), dtype=torch.uint8, device="cuda") for part in host)
    up, down = (device[0], host[0]), (host[1], device[1])
    return [
        Rate(PART, f"{kind}, {way}", _gb_per_s(copies), note=note)
        for way, copies in {"up": [up], "down": [down], "both": [up, down]}.items()
    ]


def _gb_per_s(copies: list[tuple[Tensor, Tensor]]) -> float:
    """Of copies (target, source) that run at the same time, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in copies]
    seconds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for stream, (target, source) in zip(streams, copies, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return sum(target.nbytes for target, _ in copies) / min(seconds) / 1e9
