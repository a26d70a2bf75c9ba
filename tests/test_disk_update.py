"""The ring of the update from a file: nothing is read into memory that is still on its way out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim.away.from_disk import BATCH, DiskUpdate
from zerofold.placement import Tier

SIZE = 8


class LateDisk:
    """Writes take what is in the memory when they are waited for: the latest moment that a real disk could."""

    def __init__(self, chunks: int) -> None:
        self.file = torch.arange(float(chunks * 3 * SIZE)).view(chunks * 3, SIZE)

    def read(self, offset: int, into: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: into.copy_(self.file[offset]))

    def write(self, offset: int, source: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: self.file[offset].copy_(source))


def _add_one(chunk: Any, states: list[Tensor], then: Callable[[Done], None]) -> Any:
    for state in states:
        state.add_(1)
    then(Done())
    return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("count", [1, BATCH, BATCH + 1, 2 * BATCH, 3 * BATCH - 1, 4 * BATCH + 2])
def test_every_chunk_is_updated_once_and_written_where_it_was(count: int, mixes: bool) -> None:
    disk, places = LateDisk(count), {}
    slab = SimpleNamespace(tiers=SimpleNamespace(parameters=Tier.DEVICE))
    chunks: list[Any] = []
    for index in range(count):
        states = tuple(torch.empty(SIZE) for _ in range(3))
        places.update({id(state): 3 * index + number for number, state in enumerate(states)})
        chunks.append(SimpleNamespace(states=states, size=SIZE, copy=None, slab=slab))
    memory: Any = SimpleNamespace(
        take=lambda tier, elements, dtype, *labels: torch.empty(elements, dtype=dtype),
        offset=lambda tensor: places[id(tensor)],
    )
    host: Any = SimpleNamespace(submit=_add_one)
    update, before = DiskUpdate(memory, disk, host, SIZE), disk.file.clone()  # type: ignore[arg-type]
    update.mixes = mixes
    for step in (1, 2):
        batches = list(update.batches(chunks))
        for batch, following in zip(batches, [*batches[1:], []], strict=True):
            update.run(batch, following)
        update.finish()
        assert torch.equal(disk.file, before + step)
