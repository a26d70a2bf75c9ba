"""The ring of the update from a file: nothing is read into memory that is still on its way out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import zerofold as zf
from zerofold.bench import beside_disk
from zerofold.bench.disk import ORDERS
from zerofold.memory import Done
from zerofold.memory.disk_blocks import Block
from zerofold.memory.disk_queue import BlockQueue
from zerofold.optim.away import chunks
from zerofold.optim.away.chunks import CHUNK, PieceWork, Run, Scaling
from zerofold.optim.away.from_disk import BATCH, DiskUpdate, Order
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


def changes_of_direction(folder: str) -> list[tuple[int, int]]:
    """Between reading and writing, in one update: in bursts, and mixed; and the blocks that it moves."""
    found = []
    for mixes in (False, True):
        kinds: list[bool] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunks, "CHUNK", 2**12)
            for name in ("read", "write"):
                move = getattr(Block, name)
                patch.setattr(Block, name, lambda *given, move=move: (time.sleep(0.001), move(*given))[1])
            patch.setattr(Order, "choose", lambda *_, mixes=mixes: mixes)
            model = torch.nn.Sequential(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(16)]))
            optimizer = torch.optim.AdamW(model.parameters())
            offload = {"optimizer": "nvme", "path": folder}
            zf.prepare(
                model, optimizer, stage=3, units=torch.nn.Sequential, offload=offload, precision="bf16", one_pass=True
            )
            for _ in range(2):
                model(torch.ones(2, 128)).sum().backward()
                with pytest.MonkeyPatch.context() as watch:
                    following = BlockQueue._next

                    def note(self: BlockQueue, following: Any = following, kinds: list[bool] = kinds) -> Any:
                        taken = following(self)
                        if taken is not None:
                            kinds.append(taken[0].is_write)
                        return taken

                    watch.setattr(BlockQueue, "_next", note)
                    kinds.clear()
                    optimizer.step()
                    optimizer.zero_grad()
                    zf.full(next(model.parameters()))
            zf.close(model)
        found.append((sum(one != other for one, other in itertools.pairwise(kinds)), len(kinds)))
    return found


def test_bursts_are_of_one_kind(ranks: Any, tmp_path: Path) -> None:
    """Also where the disk is so slow that the next one is asked for before the last has come to its end."""
    ((bursts, blocks), (mixed, _)) = ranks(1, changes_of_direction, str(tmp_path))[0]
    batches = blocks / (2 * 3 * BATCH)
    assert bursts <= 2 * batches + 2
    assert mixed > blocks / 2
