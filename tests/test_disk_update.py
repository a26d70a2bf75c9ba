"""The ring of the update from a file: nothing is read into memory that is still on its way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zerofold.bench import beside_disk
from zerofold.bench.disk import ORDERS
from zerofold.memory import Done
from zerofold.optim.away.chunks import CHUNK, PieceWork, Run, Scaling
from zerofold.optim.away.from_disk import BATCH, DiskUpdate
from zerofold.optim.onepass import AdamSettings
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


@pytest.mark.parametrize("elements", [5000, CHUNK, 3 * CHUNK + 5000, 7 * CHUNK - 1])
def test_no_chunk_of_a_file_is_small_beside_others(elements: int) -> None:
    """The disk reads the last one of a burst while the next is made ready: it must be worth that."""
    slab: Any = SimpleNamespace(tier=Tier.NVME)
    shard = torch.empty(elements, device="meta")
    piece = PieceWork(0, elements, shard, AdamSettings(1e-3, 0.9, 0.99, 1e-8, 0.0), step=1, seed=0)
    run = Run(slab, 0, elements, [piece], (shard,) * 3, None, Scaling(None, None), Done())
    sizes = [chunk.size for chunk in run.chunks()]
    assert sum(sizes) == elements
    assert max(sizes) <= CHUNK
    assert len(sizes) == -(-elements // CHUNK)
    assert min(sizes) > max(sizes) / 3
    assert all(size % 2**21 == 0 for size in sizes[:-1])  # whole blocks of 8 MiB


def test_an_update_is_compared_with_the_disk_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that becomes faster all the time would make every update look slow beside what comes after it."""
    clock = iter(range(100))

    @contextmanager
    def raw_disk(*_: Any, **__: Any) -> Iterator[Callable[[str], float]]:
        yield lambda order: float(next(clock))

    monkeypatch.setattr(beside_disk, "raw_disk", raw_disk)
    turns = beside_disk.take_turns(lambda: float(next(clock)), ".", 2**22)
    assert len(turns) == beside_disk.TURNS
    for update, alone in turns:
        assert sum(alone.values()) / len(ORDERS) == update
