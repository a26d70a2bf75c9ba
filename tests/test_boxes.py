"""Parts of tensors, read from whole ones and from other parts: the right elements, and no more than needed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from zerofold.checkpoint.boxes import CutOut, SavedPart, Spread, flat_ranges, runs_in_whole
from zerofold.checkpoint.contents import CheckpointError, Stored
from zerofold.checkpoint.manifest import Entry, PartEntry
from zerofold.part import Part


@dataclass
class InMemory:
    """A stored tensor that notes what is read of it."""

    values: Tensor
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def read(self, start: int, stop: int) -> Tensor:
        self.reads.append((start, stop))
        return self.values.reshape(-1)[start:stop].clone()


def parts(shape: tuple[int, ...], dim: int, count: int, blocks: int = 1) -> list[Part]:
    size = shape[dim] // blocks
    bounds = [(size * i // count, size * (i + 1) // count) for i in range(count)]
    return [Part(torch.Size(shape), dim, start, stop, counts=True, blocks=blocks) for start, stop in bounds]


def spread_over(whole: Tensor, cuts: list[Part]) -> Spread:
    saved = tuple(SavedPart(part.boxes(), InMemory(part.of(whole))) for part in cuts)
    return Spread(tuple(whole.shape), whole.dtype, saved)


@pytest.mark.parametrize("seed", range(40))
def test_every_cut_is_read_from_every_other(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice([3, 6, 9, 12]) for _ in range(draw.randint(1, 3)))
    whole = torch.arange(torch.Size(shape).numel())
    whole = whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))].view(shape)
    fused = [draw.choice([1, 3]) for _ in range(2)]
    source, target = (parts(shape, draw.randrange(len(shape)), draw.randint(1, 3), blocks) for blocks in fused)
    stored: Stored = draw.choice([spread_over(whole, source), InMemory(whole)])
    for part in target:
        cut, expected = CutOut(stored, part), part.of(whole).reshape(-1)
        assert cut.shape == tuple(part.local_shape)
        start, stop = sorted(draw.randint(0, len(expected)) for _ in range(2))
        assert torch.equal(cut.read(start, stop), expected[start:stop])
        for low, high, place in runs_in_whole(part, start, stop):
            assert torch.equal(expected[low:high], whole.reshape(-1)[place : place + high - low])
        assert sum(run.stop - run.start for run in runs_in_whole(part, start, stop)) == stop - start
    start, stop = sorted(draw.randint(0, whole.numel()) for _ in range(2))
    assert torch.equal(stored.read(start, stop), whole.reshape(-1)[start:stop])


def test_what_is_cut_alike_is_read_as_it_is() -> None:
    whole = torch.arange(8 * 10.0).view(8, 10)
    cuts = parts((8, 10), 1, 2)
    stored = spread_over(whole, cuts)
    CutOut(stored, cuts[1]).read(5, 25)  # five rows of five: whole rows of the part, not of the matrix
    first, second = (part.stored for part in stored.parts)
    assert isinstance(first, InMemory)
    assert isinstance(second, InMemory)
    assert first.reads == []
    assert second.reads == [(5, 25)]


def test_long_rows_are_read_alone() -> None:
    whole = InMemory(torch.zeros(4, 4096))
    part = Part(torch.Size(whole.shape), 1, 2048, 4096, counts=True)
    CutOut(whole, part).read(0, 2 * 2048)
    assert whole.reads == [(2048, 4096), (6144, 8192)]
    assert [each[1:] for each in flat_ranges(CutOut(whole, part), 0, 2 * 2048)] == whole.reads


def test_parts_with_a_gap_are_not_read() -> None:
    whole = torch.arange(12.0).view(4, 3)
    stored = spread_over(whole, parts((4, 3), 0, 2)[:1])
    assert torch.equal(stored.read(0, 6), torch.arange(6.0))
    with pytest.raises(CheckpointError, match="6 of the 7 elements from 0 to 7"):
        stored.read(0, 7)


def test_parts_of_several_ranges_make_a_whole() -> None:
    cuts = parts((12, 2), 0, 2, blocks=3)
    files = [{"bytes": 1000}]
    entries = [PartEntry(list(cut.local_shape), list(cut.boxes()), [(0, 0, 12, 0)]) for cut in cuts]
    Entry("F32", [12, 2], parts=entries).check("w", files)
    with pytest.raises(ValueError, match="do not follow each other"):
        Entry("F32", [12, 2], parts=[entries[0], entries[0]]).check("w", files)
