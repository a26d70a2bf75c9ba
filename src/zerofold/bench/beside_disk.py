"""How close an engine's update comes to what the disk does alone: both in turns.

    [ alone: mixed, in bursts ][ step ][ alone ][ step ][ alone ] …       one process, one folder

A disk that others use as well changes its rate by a fifth within seconds (measured). One short measurement behind a run
would compare two moments, not two ways of moving bytes. So each step is compared with the disk before it and after it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import NamedTuple

from zerofold.bench.disk import ORDERS, raw_disk

TURNS = 3
BLOCK = 8 * 2**20
STATE_BYTES = 12  # of a parameter in the file: master and moments in fp32


class DiskTurn(NamedTuple):
    """GB/s: of one update, and of the disk alone, the mean of right before it and right after it, by the order of reads
    and writes."""

    update: float
    alone: dict[str, float]


def take_turns(step: Callable[[], float], folder: str, parameters: int) -> list[DiskTurn]:
    """`step` takes one and tells its update's rate in GB/s.

    Alone the disk moves as many bytes as an update does, half of them in each order, from and to a file as large as
    that of the states.
    """
    nbytes = max(2 * BLOCK, min(STATE_BYTES * parameters, shutil.disk_usage(folder).free // 2))
    with raw_disk(folder, nbytes, block=BLOCK) as rate:
        turns, before = list[DiskTurn](), {order: rate(order) for order in ORDERS}
        for _ in range(TURNS):
            update, after = step(), {order: rate(order) for order in ORDERS}
            turns.append(DiskTurn(update, {order: (before[order] + after[order]) / 2 for order in ORDERS}))
            before = after
        return turns
