"""What materialising a model takes at most. Apart from its test, since the processes that it starts import this file
alone, and none of transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zerofold as zf
from zerofold.launch import init_ranks

WIDTH, LAYERS = 2048, 9
UNIT = 4 * (WIDTH * WIDTH + WIDTH)


def peak_of_materialising(stage: int) -> tuple[int, int]:
    """Bytes by which this process's memory grew at most, by the kernel's own count, and those of the shards."""

    def materialise(width: int) -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        return zf.shard(model, stage=stage, units=nn.Linear)

    with init_ranks("cpu"):
        zf.close(materialise(16))  # imports, sockets, threads and code are there
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = memory("VmRSS")
        model = materialise(WIDTH)
        grown = memory("VmHWM") - before
        shards = zf.ledger(model).snapshot()["state_bytes"]["parameters"]
        zf.close(model)
        return grown, shards


def memory(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024
